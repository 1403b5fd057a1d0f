"""Which kernels one call of the operator launches, with which grid and sizes; the same for a launcher and for TensorRT.

Sizes are integers, or TensorRT's symbolic ones: only sums, products and floor divisions are taken of them, with the
symbolic one on the left.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from ..operator import CHUNK
from .ptx import ROWS

Size = Any


class Shape(NamedTuple):
    """The sizes of one call."""

    batch: int
    width: int
    heads: int
    kv_heads: int
    capacity: int
    head_dim: int


class Launch(NamedTuple):
    """Blocks of THREADS threads. A kernel's arguments are its inputs, these sizes as 32-bit integers, its outputs."""

    kernel: str
    grid: tuple[Size, Size, Size]
    sizes: tuple[Size, ...]


class Step(NamedTuple):
    """A launch with the names of the arrays whose addresses it takes, as of the operator or of PARTIALS."""

    launch: Launch
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


CACHES = ("cache_k", "cache_v", "scale_k", "scale_v")
PARTIALS = ("highest", "weights", "sums")


def steps(kind: str, shape: Shape, scale: float) -> tuple[Step, Step, Step]:
    """The three launches of one call, whose cache is changed in place."""
    batch, width, heads, kv_heads, capacity, head_dim = shape
    return (
        Step(
            write(kind, batch, width, kv_heads, capacity, head_dim),
            ("key", "value", "center", "write_index", *CACHES),
            CACHES,
        ),
        Step(
            attend(kind, head_dim, scale, batch, width, heads, kv_heads, capacity),
            ("query", *CACHES, "mask"),
            PARTIALS,
        ),
        Step(join(kind, batch, width, heads, chunks(capacity), head_dim), ("query", *PARTIALS), ("attended",)),
    )


def partial_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Shapes of PARTIALS, which are float32."""
    rows = (shape.batch, shape.width, shape.heads, chunks(shape.capacity))
    return dict(zip(PARTIALS, (rows, rows, (*rows, shape.head_dim)), strict=True))


def chunks(capacity: Size) -> Size:
    """How many partial results each query row has."""
    return (capacity + (CHUNK - 1)) // CHUNK


def write(kind: str, batch: Size, width: Size, kv_heads: Size, capacity: Size, head_dim: Size) -> Launch:
    """Round the new tokens into the cache.

    Inputs: key, value, center, write_index, cache_k, cache_v, scale_k, scale_v. Outputs: the last four, in place.
    """
    return Launch(f"write_{kind}", (width * kv_heads, 2, batch), (width, kv_heads, capacity, head_dim))


def attend(
    kind: str, head_dim: int, scale: float, batch: Size, width: Size, heads: Size, kv_heads: Size, capacity: Size
) -> Launch:
    """A partial result of each query row for each chunk.

    Inputs: query, present_k, present_v, present_scale_k, present_scale_v, mask. Outputs: highest, weights
    [batch, width, heads, chunks] and sums [batch, width, heads, chunks, head_dim], float32.
    """
    tiles = (width * (heads // kv_heads) + (ROWS - 1)) // ROWS
    (bits,) = struct.unpack("<i", struct.pack("<f", scale))
    grid = (chunks(capacity), tiles * kv_heads, batch)
    return Launch(f"attend_{kind}_{head_dim}", grid, (bits, width, heads, kv_heads, capacity))


def join(kind: str, batch: Size, width: Size, heads: Size, count: Size, head_dim: Size) -> Launch:
    """The results of `count` chunks to one, of the query's type. Inputs: query, highest, weights, sums."""
    return Launch(f"join_{kind}", (batch * width * heads, 1, 1), (count, head_dim))
