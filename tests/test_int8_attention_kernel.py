"""The CUDA kernels without a GPU: their blocks on the host, from the same source, and their assembly."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from speceyes.plugins.int8_attention.kernel import launches, ptx
from speceyes.plugins.int8_attention.kernel.compile import CAPABILITIES, SOURCE, assemble, compile_ptx, missing_tools
from speceyes.plugins.int8_attention.operator import CHUNK, int8_kv_attention
from speceyes.plugins.int8_attention.quantise import Packed
from speceyes.plugins.int8_attention.tolerance import rounding_bound

CACHES = launches.CACHES
FEEDS = ("query", "key", "value", "center", "write_index", *CACHES, "mask")
HEADS, KV_HEADS, SCALE = 6, 2, 0.1
SPOILED = "-ftrivial-auto-var-init=pattern"  # what is read of shared memory before it is written would show
needs_nvcc = pytest.mark.skipif(
    bool(missing_tools()), reason=f"no {' and '.join(missing_tools())}: the kernels are not compiled"
)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The blocks compiled by g++, without contraction, as nvcc does; half types where CUDA's headers are."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: the kernels' arithmetic cannot be compiled for the host")
    library = tmp_path_factory.mktemp("kernel") / "host.so"
    options = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", SPOILED, "-shared", "-fPIC"]
    headers = ["-isystem", str(cuda_headers())] if cuda_headers() else []
    subprocess.run(["g++", *options, *headers, str(SOURCE.with_name("host.cpp")), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def cuda_headers() -> Path | None:
    """The folder of cuda_fp16.h as nvcc knows it."""
    if shutil.which("nvcc") is None:
        return None
    told = subprocess.run(["nvcc", "-dryrun", "-c", "none.cu"], capture_output=True, text=True, check=False).stderr
    folders = [Path(folder) for folder in re.findall(r'-I([^\s"]+)', told)]
    return next((folder for folder in folders if (folder / "cuda_fp16.h").is_file()), None)


def feeds(seed: int, batch: int, width: int, capacity: int, head_dim: int) -> dict[str, np.ndarray]:
    """A ragged cache, rounded already, and a mask with random holes; the first token sees nothing at all."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, capacity - width + 1, batch)
    places = start[:, None] + np.arange(width)
    seen = (np.arange(capacity) <= places[..., None]) & (rng.random((batch, width, capacity)) < 0.7)
    seen[0, 0] = False
    made = {
        name: rng.standard_normal((batch, width, heads * head_dim))
        for name, heads in (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS))
    }
    made |= {name: rng.uniform(0.005, 0.02, (batch, KV_HEADS, capacity, 1)) for name in ("scale_k", "scale_v")}
    found = {name: array.astype(np.float32) for name, array in made.items()}
    for name in ("cache_k", "cache_v"):
        found[name] = rng.integers(-127, 128, (batch, KV_HEADS, capacity, head_dim)).astype(np.int8)
    found |= {"center": rng.standard_normal((KV_HEADS, head_dim)).astype(np.float32), "write_index": start}
    return found | {"mask": seen[:, None]}


def run(host: Any, feed: dict[str, np.ndarray], kind: str = "float", backwards: bool = False) -> tuple[np.ndarray, ...]:
    """As the reference's results, of blocks whose threads take their turns forwards or backwards."""
    held = {name: np.array(feed[name], order="C") for name in FEEDS}
    (batch, width, _), (_, _, capacity, head_dim) = feed["query"].shape, feed["cache_k"].shape
    shape = launches.Shape(batch, width, HEADS, KV_HEADS, capacity, head_dim)
    held |= {name: np.full(sizes, np.nan, np.float32) for name, sizes in launches.partial_shapes(shape).items()}
    held["attended"] = np.empty_like(held["query"])
    for launch, inputs, outputs in launches.steps(kind, shape, SCALE):
        call(host, launch, [held[name] for name in inputs], [held[name] for name in outputs], backwards)
    return tuple(held[name] for name in ("attended", *CACHES))


def call(
    host: Any, launch: launches.Launch, inputs: list[np.ndarray], outputs: list[np.ndarray], backwards: bool
) -> None:
    """One block after the other."""
    kernel = getattr(host, launch.kernel)
    kernel.restype = None
    given = [ctypes.c_void_p(array.ctypes.data) for array in inputs]
    made = [ctypes.c_void_p(array.ctypes.data) for array in outputs]
    for place in np.ndindex(*launch.grid):
        host.place(*place, launch.grid[0], ctypes.c_bool(backwards))
        kernel(*given, *launch.sizes, *made)


def assert_near(found: np.ndarray, feed: dict[str, np.ndarray], wanted: tuple[np.ndarray, ...], unit: float) -> None:
    """Both may be as far from exact sums as their roundings allow; the result is rounded once more, to `unit`."""
    bound = 2 * rounding_bound(
        feed["query"], Packed(wanted[1], wanted[3]), Packed(wanted[2], wanted[4]), feed["mask"], SCALE
    )
    by_head = [array.astype(np.float64).reshape(*bound.shape, -1) for array in (found, wanted[0])]
    assert (np.abs(by_head[0] - by_head[1]) <= bound[..., None] + unit * np.abs(by_head[1])).all()


SHAPES = [(0, 1, 1, 1), (1, 2, 3, 100), (2, 3, 5, 300)]


@pytest.mark.parametrize("head_dim", ptx.HEAD_DIMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_blocks_give_the_reference(host: Any, head_dim: int, shape: tuple[int, ...]) -> None:
    """Codes and scales to the bit."""
    feed = feeds(*shape, head_dim)
    found = run(host, feed)
    wanted = int8_kv_attention(**feed, scale=SCALE, q_num_heads=HEADS, kv_num_heads=KV_HEADS)
    for made, expected in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(made, expected)
    assert_near(found[0], feed, wanted, 0)
    assert not found[0][0, 0].any()


def test_halves_are_rounded_to_even(host: Any) -> None:
    feed = feeds(4, 1, 2, 8, 64)
    feed["value"][0, 0, :64] = [127, *(0.5 + np.arange(63))]
    codes = run(host, feed)[2]
    assert codes[0, 0, feed["write_index"][0], :6].tolist() == [127, 0, 2, 2, 4, 4]


@pytest.mark.parametrize(("kind", "unit"), [("half", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_half_types_are_widened_and_rounded_once(host: Any, kind: str, unit: float) -> None:
    if not hasattr(host, f"write_{kind}"):
        pytest.skip("no cuda_fp16.h beside nvcc: the half types do not exist on the host")
    feed = feeds(3, 2, 3, 200, 64)
    narrow, widen = (to_half, from_half) if kind == "half" else (to_bfloat16, from_bfloat16)
    halves = {name: narrow(feed[name]) for name in ("query", "key", "value")}
    feed |= {name: widen(half) for name, half in halves.items()}
    found = run(host, feed | halves, kind)
    wanted = int8_kv_attention(**feed, scale=SCALE, q_num_heads=HEADS, kv_num_heads=KV_HEADS)
    for made, expected in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(made, expected)
    assert_near(widen(found[0]), feed, wanted, unit)


def to_half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16)


def from_half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("head_dim", ptx.HEAD_DIMS)
def test_a_token_has_the_same_bits_at_every_width_batch_and_capacity(host: Any, head_dim: int) -> None:
    """The width of 4 has 12 query rows for each kv head: two tiles."""
    feed = feeds(5, 3, 4, 260, head_dim)
    whole = run(host, feed)
    alone = {name: feed[name] if name == "center" else feed[name][1:2] for name in feed}
    for name in CACHES:
        alone[name] = np.pad(alone[name], ((0, 0), (0, 0), (0, CHUNK + 7), (0, 0)))
    alone["mask"] = np.pad(alone["mask"], ((0, 0), (0, 0), (0, 0), (0, CHUNK + 7)))
    for token in range(4):
        one = {**alone, "write_index": alone["write_index"] + token, "mask": alone["mask"][:, :, token : token + 1]}
        one |= {name: alone[name][:, token : token + 1] for name in ("query", "key", "value")}
        made = run(host, one)
        np.testing.assert_array_equal(made[0][0, 0], whole[0][1, token])
        alone |= dict(zip(CACHES, made[1:], strict=True))
    for found, kept in zip(made[1:], whole[1:], strict=True):
        np.testing.assert_array_equal(found[0, :, :260], kept[1])


@pytest.mark.parametrize("head_dim", ptx.HEAD_DIMS)
def test_no_step_depends_on_the_order_of_threads(host: Any, head_dim: int) -> None:
    feed = feeds(6, 2, 5, 300, head_dim)
    for one, other in zip(run(host, feed), run(host, feed, backwards=True), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_does_not_fit_is_left_out_and_nan_reaches_only_who_sees_it(host: Any) -> None:
    feed = feeds(7, 2, 3, 40, 64)
    feed |= {"write_index": np.array([38, 4]), "mask": np.ones((2, 1, 3, 40), bool)}
    found = run(host, feed)
    np.testing.assert_array_equal(found[1][0, :, :38], feed["cache_k"][0, :, :38])
    assert (found[1][0, :, 38:] != feed["cache_k"][0, :, 38:]).any(-1).all()
    feed["value"][1, 1, 0], feed["key"][1, 1, 64] = np.nan, np.inf
    feed["mask"][1, 0, :2, 5] = False
    shown = run(host, feed)[0].reshape(2, 3, HEADS, 64)
    assert np.isfinite(shown[0]).all() and np.isfinite(shown[1, :2]).all()
    assert np.isnan(shown[1, 2]).all()


def test_the_numbers_of_the_source_are_those_of_the_launch() -> None:
    source = SOURCE.with_name("arithmetic.h").read_text() + SOURCE.with_name("block.h").read_text()
    found = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", source)}
    assert (found["CHUNK"], found["ROWS"], found["THREADS"]) == (CHUNK, ptx.ROWS, ptx.THREADS)
    assert found["WIDEST"] == max(ptx.HEAD_DIMS)


def test_the_shipped_ptx_holds_every_kernel() -> None:
    steps = [("write",), ("join",), *(("attend", str(head_dim)) for head_dim in ptx.HEAD_DIMS)]
    wanted = {"_".join([step, kind, *rest]) for kind in ptx.TYPES for step, *rest in steps}
    assert set(ptx.names(ptx.shipped())) == wanted
    assert ptx.names(ptx.only(ptx.shipped(), "attend_half_96")) == ["attend_half_96"]
    with pytest.raises(ValueError, match="found 'attend_half_72'"):
        ptx.only(ptx.shipped(), "attend_half_72")


@needs_nvcc
def test_the_shipped_ptx_is_what_the_source_gives() -> None:
    made = compile_ptx()
    if ptx.compiler(made) != ptx.compiler(ptx.shipped()):
        pytest.skip(f"shipped by {ptx.compiler(ptx.shipped())}, here is {ptx.compiler(made)}")
    assert made == ptx.shipped(), "run `python -m speceyes.plugins.int8_attention.kernel.compile --write`"


@needs_nvcc
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_ptxas_assembles_the_shipped_ptx_without_spills(capability: int) -> None:
    cubin, found = assemble(ptx.shipped(), capability)
    assert cubin.startswith(b"\x7fELF")
    assert set(found) == set(ptx.names(ptx.shipped()))
    assert all(taken.spilled == 0 and 16 <= taken.registers <= 80 for taken in found.values())
    assert max(taken.shared for taken in found.values()) <= 48 * 1024
    attend = [taken.shared for name, taken in found.items() if name.startswith("attend_half")]
    assert len(attend) == len(ptx.HEAD_DIMS) and min(attend) > CHUNK * 64


@needs_nvcc
@pytest.mark.parametrize("name", ["write_half", "attend_bfloat16_128", "join_float"])
def test_a_kernel_alone_is_assembled_as_it_was_among_the_others(name: str) -> None:
    _, found = assemble(ptx.only(ptx.shipped(), name), 90)
    assert found == {name: assemble(ptx.shipped(), 90)[1][name]}


@needs_nvcc
def test_the_source_compiles_for_each_capability_itself() -> None:
    """Not only through the PTX of the lowest one."""
    for capability in (90, 120):
        assert all(taken.spilled == 0 for taken in assemble(compile_ptx(capability), capability)[1].values())
