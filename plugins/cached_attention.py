"""Attention over a cache of fixed capacity: the reference arithmetic and the body every ONNX runtime can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx

DOMAIN = "speceyes"
NAME = "CachedAttention"
VERSION = 1
OPSET = 24

INPUTS = ("query", "key", "value", "cache_k", "cache_v", "write_index", "kv_length", "mask")
OUTPUTS = ("attended", "present_k", "present_v")
ATTRIBUTES = ("scale", "q_num_heads", "kv_num_heads", "window")

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


def cached_attention(
    query: Floats,
    key: Floats,
    value: Floats,
    cache_k: Floats,
    cache_v: Floats,
    write_index: Integers,
    kv_length: Integers,
    mask: NDArray[np.bool_],
    *,
    scale: float,
    q_num_heads: int,
    kv_num_heads: int,
    window: int = 0,
) -> tuple[Floats, Floats, Floats]:
    """Write the new keys and values into the cache, then attend over it.

    Shapes: `query` [batch, width, heads*head_dim]; `key`, `value` [batch, width, kv_heads*head_dim]; `cache_k`,
    `cache_v` [batch, kv_heads, capacity, head_dim]; `write_index`, `kv_length` [batch]; `mask`
    [batch, 1, width, capacity], True = may attend. Token t of a row is written to slot `write_index + t`, padding too,
    so `write_index + width <= capacity` must hold, and slots from `kv_length` on hold finite garbage.

    A token sees a slot when the mask allows it, the slot is below `kv_length` and, with a `window` above zero, fewer
    than `window` slots back; for the window, padding tokens stand at the last live slot. A token that sees nothing
    yields zeros.

    Returns (attended [batch, width, heads*head_dim], present_k, present_v), the latter shaped like the cache; the
    inputs are not changed. Raises ValueError when a row does not fit into the cache.
    """
    batch, width, _ = query.shape
    capacity, head_dim = cache_k.shape[2:]
    if (write_index + width > capacity).any():
        raise ValueError(f"write_index {write_index.tolist()} + width {width} exceeds the capacity {capacity}")
    present_k, present_v = cache_k.copy(), cache_v.copy()
    for row, start in enumerate(write_index):
        present_k[row, :, start : start + width] = _split_heads(key[row], kv_num_heads)
        present_v[row, :, start : start + width] = _split_heads(value[row], kv_num_heads)

    slot = np.arange(capacity)
    position = np.minimum(write_index[:, None] + np.arange(width), kv_length[:, None] - 1)
    visible = mask & (slot < kv_length[:, None, None, None])
    if window:
        visible = visible & (position[:, None, :, None] - slot < window)

    group = q_num_heads // kv_num_heads
    attended = np.empty((batch, width, q_num_heads, head_dim), np.float32)
    for row in range(batch):
        for head in range(q_num_heads):
            rows = query[row].reshape(width, q_num_heads, head_dim)[:, head]
            scores = np.where(visible[row, 0], rows @ present_k[row, head // group].T * scale, -np.inf)
            attended[row, :, head] = _softmax(scores) @ present_v[row, head // group]
    return attended.reshape(batch, width, q_num_heads * head_dim), present_k, present_v


def _split_heads(rows: Floats, heads: int) -> Floats:
    """[width, heads*head_dim] -> [heads, width, head_dim]."""
    return rows.reshape(rows.shape[0], heads, -1).transpose(1, 0, 2)


def _softmax(scores: Floats) -> Floats:
    """Over the last axis; a row of -inf alone becomes zeros."""
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(highest), 0, highest))
    shares: Floats = weights / np.maximum(weights.sum(-1, keepdims=True), np.finfo(np.float32).tiny)
    return shares


def function_proto() -> onnx.FunctionProto:
    """The operator as a model-local function of standard operators (TensorScatter twice, then Attention)."""
    from onnx import parser

    function: onnx.FunctionProto = parser.parse_function(_BODY)
    return function


_BODY = f"""
<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>
{NAME} <{", ".join(ATTRIBUTES)}> ({", ".join(INPUTS)}) => ({", ".join(OUTPUTS)})
{{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    as_row = Constant <value_ints = [-1, 1, 1, 1]> ()
    as_column = Constant <value_ints = [1, 1, -1, 1]> ()
    flat = Constant <value_ints = [0, 0, -1]> ()
    keep = Constant <value_ints = [0, 0]> ()
    rest = Constant <value_ints = [-1]> ()
    heads = Constant <value_int: int = @q_num_heads> ()
    heads_1d = Reshape (heads, rest)
    query_shape = Concat <axis = 0> (keep, heads_1d, rest)
    kv_heads = Constant <value_int: int = @kv_num_heads> ()
    kv_heads_1d = Reshape (kv_heads, rest)
    key_shape = Concat <axis = 0> (keep, kv_heads_1d, rest)

    key_split = Reshape (key, key_shape)
    key_heads = Transpose <perm = [0, 2, 1, 3]> (key_split)
    value_split = Reshape (value, key_shape)
    value_heads = Transpose <perm = [0, 2, 1, 3]> (value_split)
    present_k = TensorScatter <axis = 2> (cache_k, key_heads, write_index)
    present_v = TensorScatter <axis = 2> (cache_v, value_heads, write_index)

    capacity_1d = Shape <start = 2, end = 3> (cache_k)
    capacity = Squeeze (capacity_1d)
    width_1d = Shape <start = 1, end = 2> (query)
    width = Squeeze (width_1d)
    slot = Range (zero, capacity, one)
    start = Reshape (write_index, as_row)
    length = Reshape (kv_length, as_row)
    step = Range (zero, width, one)
    step_column = Reshape (step, as_column)
    written_at = Add (start, step_column)
    last = Sub (length, one)
    position = Min (written_at, last)
    live = Less (slot, length)
    distance = Sub (position, slot)
    window = Constant <value_int: int = @window> ()
    near = Less (distance, window)
    unlimited = Equal (window, zero)
    in_window = Or (near, unlimited)
    live_in_window = And (live, in_window)
    visible = And (mask, live_in_window)

    query_split = Reshape (query, query_shape)
    query_heads = Transpose <perm = [0, 2, 1, 3]> (query_split)
    attended_heads = Attention <scale: float = @scale> (query_heads, present_k, present_v, visible)
    attended_split = Transpose <perm = [0, 2, 1, 3]> (attended_heads)
    attended = Reshape (attended_split, flat)
}}
"""
