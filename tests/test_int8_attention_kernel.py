"""The CUDA kernels without a GPU: their arithmetic on the host, from the same source, and their assembly."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from speceyes.plugins.int8_attention.kernel.compile import CAPABILITIES, SOURCE, assemble, compile_ptx, missing_tools
from speceyes.plugins.int8_attention.operator import int8_kv_attention

DIMS = (64, 80, 96, 128, 256)
POINTERS = ("query", "key", "value", "center", "write_index", "cache_k", "cache_v", "scale_k", "scale_v", "mask")
HEADS, KV_HEADS, SCALE = 4, 2, 0.1


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The arithmetic compiled by g++, without contraction: a fused product would round once less than numpy."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: the kernels' arithmetic cannot be compiled for the host")
    library = tmp_path_factory.mktemp("kernel") / "host.so"
    options = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(["g++", *options, str(SOURCE.with_name("host.cpp")), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library)).int8_attention


def feeds(seed: int, batch: int, width: int, capacity: int, head_dim: int) -> dict[str, np.ndarray]:
    """A ragged cache, rounded already, and a tree mask."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, capacity - width + 1, batch)
    places = start[:, None] + np.arange(width)
    seen = (np.arange(capacity) <= places[..., None]) & (rng.random((batch, width, capacity)) < 0.7)
    made = {
        name: rng.standard_normal((batch, width, heads * head_dim))
        for name, heads in (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS))
    }
    made |= {name: rng.uniform(0.005, 0.02, (batch, KV_HEADS, capacity, 1)) for name in ("scale_k", "scale_v")}
    found = {name: array.astype(np.float32) for name, array in made.items()}
    for name in ("cache_k", "cache_v"):
        found[name] = rng.integers(-127, 128, (batch, KV_HEADS, capacity, head_dim)).astype(np.int8)
    found |= {"center": rng.standard_normal((KV_HEADS, head_dim)).astype(np.float32), "write_index": start}
    return found | {"mask": np.ascontiguousarray(seen[:, None])}


def run(host: Any, feed: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """As the reference's results."""
    held = {name: np.ascontiguousarray(feed[name]).copy() for name in POINTERS}
    (batch, width, _), (_, _, capacity, head_dim) = feed["query"].shape, feed["cache_k"].shape
    attended = np.zeros_like(feed["query"])
    pointers = [held[name].ctypes.data_as(ctypes.c_void_p) for name in POINTERS]
    sizes = (batch, width, HEADS, KV_HEADS, capacity, head_dim)
    assert host(*pointers, attended.ctypes.data_as(ctypes.c_void_p), ctypes.c_float(SCALE), *sizes) == 0
    return attended, held["cache_k"], held["cache_v"], held["scale_k"], held["scale_v"]


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize(("seed", "batch", "width", "capacity"), [(0, 1, 1, 1), (1, 2, 3, 100), (2, 3, 5, 300)])
def test_the_arithmetic_gives_the_reference(host, head_dim, seed, batch, width, capacity):
    """Codes and scales to the bit. A sum of n terms is off by at most n roundings of its largest partial sum, here and
    there: of scores as of weighted values."""
    feed = feeds(seed, batch, width, capacity, head_dim)
    found = run(host, feed)
    wanted = int8_kv_attention(**feed, scale=SCALE, q_num_heads=HEADS, kv_num_heads=KV_HEADS)
    for made, expected in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(made, expected)
    largest = 127 * max(float(found[index].max()) for index in (3, 4))
    score = SCALE * float(np.abs(feed["query"]).reshape(batch, width, HEADS, head_dim).sum(-1).max()) * largest
    tolerance = 2 * float(np.finfo(np.float32).eps) * (head_dim * score + capacity) * largest
    np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("head_dim", DIMS)
def test_a_token_has_the_same_bits_at_every_width_batch_and_capacity(host, head_dim):
    feed = feeds(5, 3, 4, 260, head_dim)
    whole = run(host, feed)
    alone = {name: feed[name] if name == "center" else feed[name][1:2] for name in feed}
    for name in ("cache_k", "cache_v", "scale_k", "scale_v"):
        alone[name] = np.pad(alone[name], ((0, 0), (0, 0), (0, 135), (0, 0)))
    alone["mask"] = np.pad(alone["mask"], ((0, 0), (0, 0), (0, 0), (0, 135)))
    for token in range(4):
        one = {**alone, "write_index": alone["write_index"] + token, "mask": alone["mask"][:, :, token : token + 1]}
        one |= {name: alone[name][:, token : token + 1] for name in ("query", "key", "value")}
        made = run(host, one)
        np.testing.assert_array_equal(made[0][0, 0], whole[0][1, token])
        alone |= dict(zip(("cache_k", "cache_v", "scale_k", "scale_v"), made[1:], strict=True))


@pytest.mark.skipif(bool(missing_tools()), reason=f"no {' and '.join(missing_tools())}: the kernels are not assembled")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernels_are_assembled_without_spills(capability: int, tmp_path: Path) -> None:
    found = assemble(compile_ptx(capability, tmp_path / "kernels.ptx"), capability)
    types = ("float", "half", "bfloat16")
    assert set(found) == {
        "join_chunks",
        *(f"write_{t}" for t in types),
        *(f"attend_{t}_{d}" for t in types for d in DIMS),
    }
    assert all(taken.spilled == 0 and 16 <= taken.registers <= 128 for taken in found.values())
