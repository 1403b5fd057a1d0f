"""Plain decoding beside speculation on one bundle, interleaved: `python scripts/bench_speculation.py BUNDLE`.

Suites are the demonstration model's held-out tasks, or a file of requests. Prints a table; `--json FILE` keeps it all.
Each kind of speculation answers a few other requests first, so that costs are measured and past answers are at hand.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import speceyes
from speceyes.runtime.processing.prompt import Prompt
from speceyes.runtime.session import Model, Request
from speceyes.runtime.speculation.drafter import Draft
from speceyes.runtime.speculation.settings import read_settings
from speceyes.runtime.speculation.speculator import Speculator
from speceyes.runtime.speculation.statistics import SpeculationStatistics

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

KINDS: dict[str, dict[str, Any]] = {
    "lookup": {"drafters": ["lookup"]},
    "predictor": {"drafters": ["predictor"]},
    "both": {},
    "one branch": {"max_parallel": 1},
    "double buffer": {"double_buffer": True},
    "document's values": {"window_size": 3, "warmup_steps": 8, "confidence_thresh": 0.8},
    "approximate": {"mode": "approximate"},
    "always wrong": {},
}
DEFAULT_KINDS = ("lookup", "predictor", "both")
WARM_UP = 12


class AlwaysWrong:
    """What a useless drafter costs: sure of whole windows that are never right, at no expense of its own."""

    name = "always wrong"

    def __init__(self, unused: int) -> None:
        self._unused = unused

    def open(self, prompt: Prompt, features: Any) -> "AlwaysWrong":
        return self

    def commit(self, tokens: Sequence[int], hidden: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def propose(self, states: Sequence[Any], windows: Sequence[int], confidence: float) -> list[Draft]:
        return [Draft(self.name, (self._unused,) * window, (0.9,) * window) for window in windows]


def make_speculator(model: Model, kind: str) -> Speculator:
    """The speculator of that kind, which has learned nothing yet."""
    speculator = model.make_speculator(read_settings({"speculation": KINDS[kind]}))
    if kind == AlwaysWrong.name:
        speculator.drafters = {kind: AlwaysWrong(model.manifest.model.vocabulary - 1)}
    return speculator


def demo_suite(name: str, split: str) -> Iterator[Request]:
    """Endless requests of one task: whole readings of documents, summaries of clips, or questions."""
    from scripts.demo import tasks

    task = {"documents": ("document",), "clips": ("clip",), "questions": ("scene", "chart", "document")}[name]
    index = 0
    while True:
        drawn = tasks.sample(task[index % len(task)], split, index)
        turn = drawn.turns[-1 if name == "questions" else 0]
        index += 1
        yield Request(
            turn.question, images=[canvas.image for canvas in drawn.canvases], options={"max_new_tokens": 160}
        )


def file_suite(path: Path, tokens: int) -> list[Request]:
    """The requests of a file, as in docs/predictor.md."""
    from speceyes.compile.predictor.requests import read_file

    return [
        Request(r.entry.messages, r.entry.prompt, r.images, {"max_new_tokens": r.entry.max_new_tokens or tokens})
        for r in read_file(path)
    ]


def answer(model: Model, requests: Sequence[Request], **options: Any) -> tuple[float, list[Any]]:
    """Seconds from the requests to their whole answers, and the results."""
    asked = [Request(r.messages, r.prompt, r.images, {**r.options, **options}) for r in requests]
    began = time.perf_counter()
    results = model.generate_batch(asked)
    return time.perf_counter() - began, results


def run_suite(
    model: Model, kinds: Sequence[str], requests: Sequence[Request], warm: Sequence[Request], batch: int
) -> Any:
    """All kinds beside plain decoding on the same groups of requests, in turns."""
    speculators = {}
    for kind in kinds:
        speculators[kind] = model.speculator = make_speculator(model, kind)
        for start in range(0, len(warm), batch):
            answer(model, warm[start : start + batch])
    seconds: dict[str, list[float]] = defaultdict(list)
    decode: dict[str, float] = defaultdict(float)
    totals = {kind: SpeculationStatistics() for kind in kinds}
    tokens = differing = 0
    for number, start in enumerate(range(0, len(requests), batch)):
        group = requests[start : start + batch]
        order = ["plain", *kinds]
        order = order[number % len(order) :] + order[: number % len(order)]
        found = {}
        for kind in order:
            if kind != "plain":
                model.speculator = speculators[kind]
            taken, results = answer(model, group, speculate=kind != "plain")
            seconds[kind].append(taken)
            decode[kind] += max(result.stats.seconds.get("decode", 0.0) for result in results)
            found[kind] = [result.token_ids for result in results]
            for result in results:
                if result.stats.speculation is not None:
                    totals[kind].add(result.stats.speculation)
        tokens += sum(map(len, found["plain"]))
        differing += sum(found[kind] != found["plain"] for kind in kinds if KINDS[kind].get("mode") != "approximate")
    report: dict[str, Any] = {
        "requests": len(requests),
        "tokens_per_answer": tokens / len(requests),
        "answers_that_differ": differing,
        "plain": {
            "seconds_per_answer": sum(seconds["plain"]) / len(requests),
            "decode_share": decode["plain"] / sum(seconds["plain"]),
        },
    }
    for kind in kinds:
        ratios = np.array(seconds["plain"]) / np.array(seconds[kind])
        stats = totals[kind]
        report[kind] = {
            "speedup": sum(seconds["plain"]) / sum(seconds[kind]),
            "decode_speedup": decode["plain"] / decode[kind],
            "per_request": {f"p{p}": float(np.percentile(ratios, p)) for p in (10, 50, 90)},
            "share_slower": float((ratios < 1).mean()),
            "tokens_per_round": stats.tokens_per_round,
            "first_acceptance": stats.first_acceptance,
            "acceptance_by_position": stats.acceptance_by_position,
            "coverage": stats.coverage,
            "precision": stats.precision,
            "fallbacks": stats.fallbacks,
            "approximated": stats.approximated / max(stats.emitted, 1),
            "predicted_speedup": stats.predicted_speedup,
            "observed_speedup": stats.observed_speedup,
            "ms_per_round": {stage: s / max(stats.rounds, 1) * 1e3 for stage, s in stats.seconds.items()},
            "drafters": {name: asdict(counts) for name, counts in stats.drafters.items()},
        }
    return report


def beside_transformers(model: Model, checkpoint: Path, requests: Sequence[Request], kind: str) -> dict[str, float]:
    """Time of transformers' generate over ours, end to end, plain and with prompt lookup, in turns; and the share of
    requests that prompt lookup fails on."""
    import torch
    from speceyes.compile.processing import load_source
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    loader = AutoModelForImageTextToText if model.sees else AutoModelForCausalLM
    network = loader.from_pretrained(checkpoint, dtype=torch.float32).eval()
    source = load_source(checkpoint)
    model.speculator = make_speculator(model, kind)
    seconds: dict[str, list[float]] = defaultdict(list)
    refused = 0
    for request in requests:
        images = list(request.images)
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": request.messages}]
        for name in ("ours", "prompt lookup", "generate"):
            began = time.perf_counter()
            if name == "ours":
                model.generate(request.messages, prompt=request.prompt, images=images, **request.options)
            else:
                if request.prompt is None and source.processor is not None:
                    messages = [{"role": "user", "content": content}]
                    text = source.processor.apply_chat_template(messages, add_generation_prompt=True)
                    inputs = source.processor(text=[text], images=[images] if images else None, return_tensors="pt")
                else:
                    inputs = source.tokenizer(request.prompt, return_tensors="pt")
                extra = {"prompt_lookup_num_tokens": 8} if name == "prompt lookup" else {}
                try:
                    with torch.inference_mode():
                        network.generate(**inputs, do_sample=False, **request.options, **extra)
                except ValueError:
                    # It drafts the prompt's image tokens, and the model then misses their features.
                    refused += 1
                    continue
            seconds[name].append(time.perf_counter() - began)
    ours = statistics.median(seconds["ours"])
    ratios = {name: statistics.median(found) / ours for name, found in seconds.items() if name != "ours"}
    return {**ratios, "prompt lookup refused": refused / len(requests)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--suites", nargs="+", default=["documents", "clips", "questions"])
    parser.add_argument("--requests", type=Path, help="a file of requests instead of the suites")
    parser.add_argument("--kinds", nargs="+", default=list(DEFAULT_KINDS), choices=list(KINDS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--count", type=int, default=60, help="requests of a suite")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of an answer to a request of the file")
    parser.add_argument("--checkpoint", type=Path, help="compare with transformers on this checkpoint as well")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # Nothing may be found of the request that another kind has just answered.
    model = speceyes.load(options.bundle, threads=options.threads, settings={"memory": {"cache_size": 0}})
    report: dict[str, Any] = {
        "environment": {
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "threads": options.threads,
            "onnxruntime": onnxruntime.__version__,
            "bundle": options.bundle.name,
            "precision": {n: e.precision for n, e in model.manifest.targets[model.target].engines.items()},
        },
        "suites": {},
    }
    for name in [options.requests.stem] if options.requests else options.suites:
        if options.requests:
            given = file_suite(options.requests, options.tokens)
            warm, requests = given[:WARM_UP], given[WARM_UP : WARM_UP + options.count]
        else:
            drawn, others = demo_suite(name, "test"), demo_suite(name, "validation")
            requests, warm = [next(drawn) for _ in range(options.count)], [next(others) for _ in range(WARM_UP)]
        for batch in options.batch:
            found = run_suite(model, options.kinds, requests, warm, batch)
            report["suites"][f"{name}, batch {batch}"] = found
            show(f"{name}, batch {batch}", found, options.kinds)
        if options.checkpoint:
            found = beside_transformers(model, options.checkpoint, requests[:20], options.kinds[-1])
            report["suites"][f"{name}, transformers"] = found
            print(f"  transformers: {', '.join(f'{name} {figure:.2f}' for name, figure in found.items())}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def show(name: str, found: dict[str, Any], kinds: Sequence[str]) -> None:
    plain = found["plain"]
    print(
        f"{name}: {found['requests']} answers of {found['tokens_per_answer']:.0f} tokens, plain "
        f"{plain['seconds_per_answer'] * 1e3:.1f} ms each ({plain['decode_share']:.0%} decoding); "
        f"{found['answers_that_differ']} differ"
    )
    for kind in kinds:
        row = found[kind]
        print(
            f"  {kind:18} {row['speedup']:.2f}x  decoding {row['decode_speedup']:.2f}x  p10/50/90 "
            + "/".join(f"{ratio:.2f}" for ratio in row["per_request"].values())
            + f"  tokens a round {row['tokens_per_round']:.2f}  first {row['first_acceptance']:.2f}  "
            f"coverage {row['coverage']:.2f}  precision {row['precision']:.2f}"
            + (f"  approximated {row['approximated']:.3f}" if row["approximated"] else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
