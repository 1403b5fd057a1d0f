"""The systems that `bench_decode.py` measures, each run as a worker in a process of its own.

    python scripts/bench_systems.py SYSTEM PATH

One JSON request per line on stdin, one JSON reply per line on stdout.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

QUESTION = "What is in this picture?"
REFERENCE = "transformers"
PAST = 256
REPEATS = 40


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

        load = partial(speceyes.load, settings={"memory": {"cache_size": 0}})
        self.import_seconds = time.perf_counter() - began
        began = time.perf_counter()
        self._model = load(bundle)
        self.load_seconds = time.perf_counter() - began
        self._model.disable_speculation()
        self._marks = clock_engines()
        engines = self._model.manifest.targets[self._model.target].engines
        self.weight_bytes = sum(engine.weight_bytes for engine in engines.values())

    def run(self, images: list[Any], tokens: int) -> dict[str, Any]:
        from speceyes.runtime.session import Request

        requests = [Request(conversation(), images=[image], options={"max_new_tokens": tokens}) for image in images]
        self._marks.clear()
        results = self._model.generate_batch(requests)
        stages = [result.stats.seconds for result in results]
        new = sum(result.stats.new_tokens - 1 for result in results)
        decode = max(s["decode"] for s in stages)
        steps = self._marks[-max(result.stats.new_tokens for result in results) :]
        host = [after[0] - before[1] for before, after in itertools.pairwise(steps)]
        return {
            "vision": sum(s["vision"] for s in stages),
            "first_token": sum(s["process"] + s["vision"] + s["prefill"] for s in stages),
            "tokens_per_second": new / decode,
            "host_ms_per_step": 1e3 * statistics.fmean(host),
            "tokens": [list(result.token_ids) for result in results],
            "cache_bytes": sum(result.stats.cache_bytes for result in results),
        }

    def widths(self, widest: int) -> dict[str, float]:
        """Median milliseconds of a decoder step by its tokens, 1 to `widest`, after `PAST` tokens."""
        from speceyes.compile.measure import measure_decoder
        from speceyes.compile.recipe import Measure

        measure = Measure(widths=tuple(range(1, widest + 1)), past=PAST, repeats=REPEATS)
        return measure_decoder(self._model._engines.decoder.engine, self._model.manifest.model, measure)


def clock_engines() -> list[tuple[float, float]]:
    """A list to which every run of an ONNX Runtime step appends its begin and end from now on.

    In seconds of the calling thread's processor time: what other programs take from it does not count.
    """
    from speceyes.engines.onnxruntime import OnnxRuntimeStep

    marks: list[tuple[float, float]] = []
    run = OnnxRuntimeStep.run

    def clocked(self: OnnxRuntimeStep) -> None:
        began = time.thread_time()
        run(self)
        marks.append((began, time.thread_time()))

    OnnxRuntimeStep.run = clocked  # type: ignore[method-assign]
    return marks


def serve(system: str, path: Path) -> None:
    """Answer requests until stdin ends."""
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
        if "widths" in request:
            assert isinstance(runner, Ours)
            print(json.dumps(runner.widths(request["widths"])), file=replies)
            continue
        images = [picture(seed) for seed in range(request["batch"])]
        reply = runner.run(images, request["tokens"])
        print(json.dumps({**reply, "peak_bytes": peak_bytes()}), file=replies)


class Worker:
    """A system in its own process."""

    def __init__(self, system: str, path: Path) -> None:
        command = [sys.executable, __file__, system, str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._read()

    def run(self, batch: int, tokens: int) -> dict[str, Any]:
        return self._ask({"batch": batch, "tokens": tokens})

    def widths(self, widest: int) -> dict[str, float]:
        return self._ask({"widths": widest})

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, request: dict[str, int]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended early; its error stands above")
        reply: dict[str, Any] = json.loads(line)
        return reply


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
