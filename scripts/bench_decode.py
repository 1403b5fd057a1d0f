"""Measure ours against transformers' `generate` on one checkpoint, interleaved in one run; JSON out.

    python scripts/seeded_checkpoint.py build/smolvlm-256m
    python scripts/bench_decode.py build/smolvlm-256m --json build/bench_decode.json

Each system lives in a process of its own, so that memory and load time are its own, and idles while another one runs.
The order of the systems is drawn anew in every round. Ratios are taken round by round; the table shows their medians.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

QUESTION = "What is in this picture?"
REFERENCE = "transformers"
OURS = ("fp32", "int8", "int4")
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
PACKAGES = ("torch", "transformers", "onnxruntime", "speceyes")


def peak_bytes() -> int:
    """The process's greatest resident memory so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def picture(seed: int) -> Any:
    """A 512×512 picture of smooth noise."""
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((512, 512), Image.Resampling.BICUBIC)


def conversation() -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]


class Transformers:
    """fp32, SDPA, its own dynamic cache: what `generate` does by default."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self._torch = torch
        began = time.perf_counter()
        self._processor = AutoProcessor.from_pretrained(checkpoint)
        self._model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.load_seconds = time.perf_counter() - began
        self.weight_bytes = sum(p.nbytes for p in self._model.parameters())
        self._marks: dict[str, float] = {}
        body = self._model.model
        body.vision_model.register_forward_pre_hook(lambda *_: self._marks.update(vision_begin=time.perf_counter()))
        body.connector.register_forward_hook(lambda *_: self._marks.update(vision_end=time.perf_counter()))

    def run(self, images: list[Any], tokens: int) -> dict[str, Any]:
        from transformers import StoppingCriteria, StoppingCriteriaList

        times: list[float] = []

        class Clock(StoppingCriteria):  # type: ignore[misc]
            def __call__(self, ids: Any, scores: Any, **kwargs: Any) -> Any:
                times.append(time.perf_counter())
                return ids.new_zeros(ids.shape[0], dtype=bool)

        began = time.perf_counter()
        text = self._processor.apply_chat_template(conversation(), add_generation_prompt=True)
        inputs = self._processor(text=[text] * len(images), images=[[i] for i in images], return_tensors="pt")
        with self._torch.inference_mode():
            out = self._model.generate(
                **inputs,
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                stopping_criteria=StoppingCriteriaList([Clock()]),
            )
        new = out[:, inputs["input_ids"].shape[1] :].tolist()
        return {
            "vision": self._marks["vision_end"] - self._marks["vision_begin"],
            "first_token": times[0] - began,
            "tokens_per_second": len(images) * (len(times) - 1) / (times[-1] - times[0]),
            "tokens": new,
        }


class Ours:
    """A bundle in the runtime."""

    def __init__(self, bundle: Path) -> None:
        began = time.perf_counter()
        import speceyes

        load = speceyes.load
        self.import_seconds = time.perf_counter() - began
        began = time.perf_counter()
        self._model = load(bundle)
        self.load_seconds = time.perf_counter() - began
        engines = self._model.manifest.targets[self._model.target].engines
        self.weight_bytes = sum(engine.weight_bytes for engine in engines.values())

    def run(self, images: list[Any], tokens: int) -> dict[str, Any]:
        from speceyes.runtime.session import Request

        requests = [Request(conversation(), images=[image], options={"max_new_tokens": tokens}) for image in images]
        results = self._model.generate_batch(requests)
        stages = [result.stats.seconds for result in results]
        new = sum(result.stats.new_tokens - 1 for result in results)
        return {
            "vision": sum(s["vision"] for s in stages),
            "first_token": sum(s["process"] + s["vision"] + s["prefill"] for s in stages),
            "tokens_per_second": new / max(s["decode"] for s in stages),
            "tokens": [list(result.token_ids) for result in results],
            "cache_bytes": sum(result.stats.cache_bytes for result in results),
        }


def serve(system: str, path: Path) -> None:
    """A worker: one JSON request per line on stdin, one JSON reply per line on stdout."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    runner = Transformers(path) if system == REFERENCE else Ours(path)
    facts = {
        "load_seconds": runner.load_seconds,
        "import_seconds": getattr(runner, "import_seconds", None),
        "weight_bytes": runner.weight_bytes,
        "peak_bytes_after_load": peak_bytes(),
    }
    print(json.dumps(facts), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        images = [picture(seed) for seed in range(request["batch"])]
        reply = runner.run(images, request["tokens"])
        print(json.dumps({**reply, "peak_bytes": peak_bytes()}), file=replies)


class Worker:
    """A system in its own process."""

    def __init__(self, system: str, path: Path) -> None:
        command = [sys.executable, __file__, str(path), "--worker", system]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._read()

    def run(self, batch: int, tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"batch": batch, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended early; its error stands above")
        reply: dict[str, Any] = json.loads(line)
        return reply


def build_bundles(checkpoint: Path, systems: list[str]) -> dict[str, Path]:
    """Compile what is missing, each in a process of its own."""
    paths = {REFERENCE: checkpoint}
    for precision in systems:
        if precision == REFERENCE:
            continue
        paths[precision] = checkpoint.with_name(f"{checkpoint.name}-{precision}.speceyes")
        if not paths[precision].exists():
            parts = precision if precision != "int4" else "decoder=int4,vision=int8"
            command = ["speceyes-compile", "build", str(checkpoint), "-o", str(paths[precision]), "--precision", parts]
            subprocess.run([Path(sys.executable).with_name(command[0]), *command[1:]], check=True)
    return paths


def measure(
    workers: dict[str, Worker], batches: list[int], rounds: int, tokens: int, seed: int
) -> list[dict[str, Any]]:
    """All rounds of all systems; the first of each batch size warms up and is dropped."""
    order, runs = random.Random(seed), []
    for batch in batches:
        for turn in range(rounds + 1):
            for system in order.sample(sorted(workers), len(workers)):
                run = workers[system].run(batch, tokens)
                print(f"batch {batch} round {turn} {system}: {run['tokens_per_second']:.1f} tokens/s", file=sys.stderr)
                if turn:
                    runs.append({"system": system, "batch": batch, "round": turn, **run})
    return runs


def summarise(runs: list[dict[str, Any]], workers: dict[str, Worker]) -> list[dict[str, Any]]:
    """Medians per system and batch size, ratios to transformers taken within each round."""
    rows = []
    for batch in sorted({run["batch"] for run in runs}):
        chosen = [run for run in runs if run["batch"] == batch]
        reference = {run["round"]: run for run in chosen if run["system"] == REFERENCE}
        for system in workers:
            mine = [run for run in chosen if run["system"] == system]
            row: dict[str, Any] = {"system": system, "batch": batch}
            for key in ("vision", "first_token", "tokens_per_second"):
                row[key] = statistics.median(run[key] for run in mine)
                row[f"{key}_ratio"] = statistics.median(run[key] / reference[run["round"]][key] for run in mine)
            row["peak_bytes"] = max(run["peak_bytes"] for run in mine)
            row["cache_bytes"] = mine[0].get("cache_bytes")
            row["same_tokens"] = mine[0]["tokens"] == reference[mine[0]["round"]]["tokens"]
            rows.append({**row, **workers[system].facts})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| system | batch | vision s | first token s | tokens/s | load s | weights MB | peak MB | same tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["system"], str(row["batch"])]
        for key, digits in (("vision", 2), ("first_token", 2), ("tokens_per_second", 1)):
            cells.append(f"{row[key]:.{digits}f} ({row[f'{key}_ratio']:.2f})")
        cells.append(f"{row['load_seconds']:.2f}")
        cells += [f"{row[key] / 1e6:.0f}" for key in ("weight_bytes", "peak_bytes")]
        lines.append(f"| {' | '.join([*cells, 'yes' if row['same_tokens'] else 'no'])} |")
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    flags = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", flags)
    return {
        "cpu": name.group(1) if name else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "features": [feature for feature in FEATURES if f" {feature}" in flags],
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in PACKAGES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--systems", nargs="+", default=[REFERENCE, *OURS], choices=[REFERENCE, *OURS])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all runs, the summary and the environment to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments.worker, arguments.checkpoint)
        return
    if REFERENCE not in arguments.systems:
        parser.error(f"--systems: {REFERENCE} is needed, ratios are taken to it")
    paths = build_bundles(arguments.checkpoint, arguments.systems)
    workers = {system: Worker(system, path) for system, path in paths.items()}
    try:
        runs = measure(workers, arguments.batches, arguments.rounds, arguments.tokens, arguments.seed)
    finally:
        for worker in workers.values():
            worker.close()
    rows = summarise(runs, workers)
    print(table(rows))
    if arguments.json:
        report = {"environment": environment(), "command": sys.argv, "summary": rows, "runs": runs}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
