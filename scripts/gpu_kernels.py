"""The int8 attention kernels on a GPU: their numerics beside the reference, their bytes a second beside a copy.

    python scripts/gpu_kernels.py --json build/gpu_kernels.json

Never run on a GPU. The bytes of a call are those of the keys, values and scales that it reads. Calls over caches that
together exceed the device's own cache are captured into a CUDA graph, and the median of its launches is taken.
`--repeats 0` leaves the speed out.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from speceyes.engines.cuda import Device, open_device
from speceyes.engines.device_buffer import DeviceBuffer
from speceyes.engines.errors import SpecEyesError
from speceyes.plugins.int8_attention.kernel.launch import Kernels
from speceyes.plugins.int8_attention.kernel.launches import CACHES, Shape, partial_shapes, steps
from speceyes.plugins.int8_attention.kernel.ptx import HEAD_DIMS
from speceyes.plugins.int8_attention.operator import int8_kv_attention
from speceyes.plugins.int8_attention.quantise import Packed
from speceyes.plugins.int8_attention.tolerance import UNITS, rounding_bound

SCALE = 0.125
ROUNDING = {"float": 0.0, "half": UNITS["fp16"], "bfloat16": UNITS["bf16"]}
"""By the type of the queries, how far one rounding of a result moves it."""
OVERFLOW = 256 << 20
"""Bytes of the caches that take turns, and of a copy: more than a device's own cache holds."""


def draw(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """Inputs of the operator, behind a cache that is nearly full."""
    rng = np.random.default_rng(seed)
    batch, width, heads, kv_heads, capacity, head_dim = shape
    start = capacity - width - rng.integers(0, min(capacity - width, 100) + 1, batch)
    seen = np.arange(capacity) <= start[:, None, None] + np.arange(width)[:, None]
    held = (batch, kv_heads, capacity)
    made = {
        "query": rng.standard_normal((batch, width, heads * head_dim)),
        "key": rng.standard_normal((batch, width, kv_heads * head_dim)),
        "value": rng.standard_normal((batch, width, kv_heads * head_dim)),
        "scale_k": rng.uniform(0.005, 0.02, (*held, 1)),
        "scale_v": rng.uniform(0.005, 0.02, (*held, 1)),
        "center": rng.standard_normal((kv_heads, head_dim)),
    }
    found = {name: array.astype(np.float32) for name, array in made.items()}
    found |= {name: rng.integers(-127, 128, (*held, head_dim)).astype(np.int8) for name in ("cache_k", "cache_v")}
    return found | {"write_index": start.astype(np.int64), "mask": np.ascontiguousarray(seen[:, None])}


def narrow(values: np.ndarray, kind: str) -> np.ndarray:
    """To the kernel's type; bfloat16, which numpy lacks, by its bits, cut off."""
    if kind == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16 if kind == "half" else np.float32)


def widen(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


class Call:
    """One call of the operator: its arrays on the device and its three launches."""

    def __init__(self, device: Device, kernels: Kernels, kind: str, shape: Shape, feed: dict[str, np.ndarray]) -> None:
        self._device, self._kernels, self._steps = device, kernels, steps(kind, shape, SCALE)
        states = {name: narrow(feed[name], kind) for name in ("query", "key", "value")}
        shapes: dict[str, Any] = {name: (sizes, np.float32) for name, sizes in partial_shapes(shape).items()}
        shapes |= {name: (array.shape, array.dtype) for name, array in (feed | states).items()}
        shapes["attended"] = shapes["query"]
        self.buffers = {
            name: DeviceBuffer.allocate(device, sizes, dtype, resident=False) for name, (sizes, dtype) in shapes.items()
        }
        with device.lock:
            for name, array in (feed | states).items():
                self.buffers[name].array[...] = array
                self.buffers[name].upload()
            device.synchronize()

    def issue(self) -> None:
        addresses = {name: buffer.address for name, buffer in self.buffers.items()}
        for step in self._steps:
            self._kernels.issue(step, addresses, self._device.stream)

    def run(self) -> dict[str, np.ndarray]:
        names = ("attended", *CACHES)
        with self._device.lock:
            self.issue()
            for name in names:
                self.buffers[name].download()
            self._device.synchronize()
        return {name: self.buffers[name].array.copy() for name in names}


def compare(device: Device, kernels: Kernels, kind: str, shape: Shape) -> dict[str, Any]:
    """The device beside the reference: codes and scales to the bit, results within the derived bound; and the bits of a
    call beside those of its tokens one after the other."""
    feed = draw(shape, 7)
    states = {name: widen(narrow(feed[name], kind), kind) for name in ("query", "key", "value")}
    found = Call(device, kernels, kind, shape, feed).run()
    given: dict[str, Any] = feed | states
    wanted = int8_kv_attention(**given, scale=SCALE, q_num_heads=shape.heads, kv_num_heads=shape.kv_heads)
    keys, values = Packed(wanted[1], wanted[3]), Packed(wanted[2], wanted[4])
    bound = 2 * rounding_bound(states["query"], keys, values, feed["mask"], SCALE)[..., None]
    ours, theirs = (
        x.astype(np.float64).reshape(*bound.shape[:3], -1) for x in (widen(found["attended"], kind), wanted[0])
    )
    apart, allowed = np.abs(ours - theirs), bound + ROUNDING[kind] * np.abs(theirs)
    alone, one = dict(feed), shape._replace(width=1)
    same = True
    for token in range(shape.width):
        alone |= {name: feed[name][:, token : token + 1] for name in ("query", "key", "value")}
        alone |= {"write_index": feed["write_index"] + token, "mask": feed["mask"][:, :, token : token + 1].copy()}
        made = Call(device, kernels, kind, one, alone).run()
        same &= bool((made["attended"][:, 0] == found["attended"][:, token]).all())
        alone |= {name: made[name] for name in CACHES}
    return {
        "kind": kind,
        **shape._asdict(),
        "codes_equal": all((found[name] == array).all() for name, array in zip(CACHES, wanted[1:], strict=True)),
        "largest_error": float(apart.max()),
        "of_the_bound": float((apart / allowed).max()),
        "bits_of_every_width_equal": same,
    }


def timed(device: Device, issue: Callable[[], None], repeats: int) -> float:
    """Median of the seconds that a graph of the issued work takes, the first launch left out."""
    with device.lock:
        issue()
        device.synchronize()
        graph = device.capture(issue)
        found = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            graph.launch()
            device.synchronize()
            found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def speed(device: Device, kernels: Kernels, kind: str, shape: Shape, repeats: int) -> dict[str, Any]:
    """Gigabytes a second that a call reads of its cache."""
    nbytes = 2 * shape.batch * shape.kv_heads * shape.capacity * (shape.head_dim + 4)
    feed = draw(shape, 1)
    calls = [Call(device, kernels, kind, shape, feed) for _ in range(-(-OVERFLOW // nbytes))]

    def issue() -> None:
        for call in calls:
            call.issue()

    seconds = timed(device, issue, repeats) / len(calls)
    return {
        "kind": kind,
        **shape._asdict(),
        "microseconds": seconds * 1e6,
        "gigabytes_per_second": nbytes / seconds / 1e9,
    }


def copy_speed(device: Device, repeats: int) -> float:
    """Gigabytes a second, read and written, of a copy within the device."""
    source, target = device.allocate(OVERFLOW), device.allocate(OVERFLOW)
    seconds = timed(device, lambda: device.copy(target.address, source.address, OVERFLOW), repeats)
    return 2 * OVERFLOW / seconds / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--repeats", type=int, default=30, help="launches of each timed graph, 0 for none (30)")
    parser.add_argument("--kind", action="append", choices=list(ROUNDING), help="type of the queries; repeated; all")
    chosen = parser.parse_args()
    try:
        device = open_device()
        with device.lock:
            kernels = Kernels()
    except SpecEyesError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    kinds = chosen.kind or list(ROUNDING)
    shapes = [Shape(2, 5, 6, 2, 300, head_dim) for head_dim in HEAD_DIMS]
    figures: dict[str, Any] = {"device": device.description}
    figures["numerics"] = [compare(device, kernels, kind, shape) for kind, shape in itertools.product(kinds, shapes)]
    if chosen.repeats:
        figures["copy_gigabytes_per_second"] = copy_speed(device, chosen.repeats)
        sizes = itertools.product((1, 4), (1, 4, 8), (2048, 8192), (64, 128))
        figures["speed"] = [
            speed(device, kernels, kind, Shape(batch, width, 16, 4, capacity, head_dim), chosen.repeats)
            for kind, (batch, width, capacity, head_dim) in itertools.product(kinds, sizes)
        ]
    text = json.dumps(figures, indent=1)
    print(text)
    if chosen.json:
        chosen.json.write_text(text + "\n")
    good = all(
        one["codes_equal"] and one["bits_of_every_width_equal"] and one["of_the_bound"] <= 1
        for one in figures["numerics"]
    )
    print("numerics hold" if good else "error: numerics do not hold", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
