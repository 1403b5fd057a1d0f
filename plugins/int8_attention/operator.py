"""speceyes::Int8KVAttention: names, and the arithmetic in numpy that every other form is held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .quantise import Codes, Floats, Packed, dequantise, quantise

DOMAIN = "speceyes"
NAME = "Int8KVAttention"
VERSION = 1
OPSET = 24
CHUNK = 128

INPUTS = ("query", "key", "value", "cache_k", "cache_v", "scale_k", "scale_v", "write_index", "mask", "center")
OUTPUTS = ("attended", "present_k", "present_v", "present_scale_k", "present_scale_v")
ATTRIBUTES = ("scale", "q_num_heads", "kv_num_heads", "groups")

Integers = NDArray[np.int64]


def int8_kv_attention(
    query: Floats,
    key: Floats,
    value: Floats,
    cache_k: Codes,
    cache_v: Codes,
    scale_k: Floats,
    scale_v: Floats,
    write_index: Integers,
    mask: NDArray[np.bool_],
    center: Floats,
    *,
    scale: float,
    q_num_heads: int,
    kv_num_heads: int,
    groups: int = 1,
) -> tuple[Floats, Codes, Codes, Floats, Floats]:
    """Round the new keys and values into the cache, then attend over it.

    Shapes: `query` [batch, width, heads*head_dim]; `key`, `value` [batch, width, kv_heads*head_dim]; `cache_k`,
    `cache_v` int8 [batch, kv_heads, capacity, head_dim]; `scale_k`, `scale_v` [batch, kv_heads, capacity, groups];
    `write_index` [batch]; `mask` bool [batch, 1, width, capacity], any tree, True = may attend.
    `center` [kv_heads, head_dim], zeros for none, is subtracted from keys before they are rounded: the scores of a
    query then all change by one number, which softmax does not see.

    Token t of a row is written to slot `write_index + t` and is read as int8 from then on, by itself too. Each chunk of
    CHUNK slots is worked off by itself and the chunks are joined in ascending order; a token's result has the same bits
    whatever the width, the batch and the capacity are. A token that sees nothing yields zeros.

    Returns (attended, present_k, present_v, present_scale_k, present_scale_v); inputs are not changed. Raises
    ValueError when a row does not fit into the cache, or for groups that do not divide the channels.
    """
    batch, width, _ = query.shape
    capacity, head_dim = cache_k.shape[2:]
    if (write_index + width > capacity).any():
        raise ValueError(f"write_index {write_index.tolist()} + width {width} exceeds the capacity {capacity}")
    keys, values = Packed(cache_k.copy(), scale_k.copy()), Packed(cache_v.copy(), scale_v.copy())
    for row, start in enumerate(write_index):
        for held, states, shift in ((keys, key, center[:, None]), (values, value, np.float32(0))):
            new = quantise(states[row].reshape(width, kv_num_heads, head_dim).transpose(1, 0, 2) - shift, groups)
            held.codes[row, :, start : start + width] = new.codes
            held.scales[row, :, start : start + width] = new.scales
    attended = np.zeros((batch, width, q_num_heads, head_dim), np.float32)
    for row in range(batch):
        for head in range(q_num_heads):
            place = row, head // (q_num_heads // kv_num_heads)
            k, v = (dequantise(Packed(held.codes[place], held.scales[place])) for held in (keys, values))
            for token in range(width):
                one = query[row, token].reshape(q_num_heads, head_dim)[head]
                attended[row, token, head] = _attend(one * np.float32(scale), k, v, mask[row, 0, token])
    flat = attended.reshape(batch, width, q_num_heads * head_dim)
    return flat, keys.codes, values.codes, keys.scales, values.scales


class _Partial(NamedTuple):
    """What a chunk gives: its highest score, and relative to that its weight and its weighted values [head_dim]."""

    highest: np.float32
    weight: np.float32
    values: Floats


def _attend(query: Floats, keys: Floats, values: Floats, visible: NDArray[np.bool_]) -> Floats:
    """One token of one head: `query` [head_dim], `keys`, `values` [capacity, head_dim], `visible` [capacity]."""
    chunks = [
        slice(first, first + CHUNK) for first in range(0, len(keys), CHUNK) if visible[first : first + CHUNK].any()
    ]
    partials = [_attend_chunk(query, keys[chunk][visible[chunk]], values[chunk][visible[chunk]]) for chunk in chunks]
    return _join(partials) if partials else np.zeros_like(query)


def _attend_chunk(query: Floats, keys: Floats, values: Floats) -> _Partial:
    scores = (keys * query).sum(-1)
    weights = np.exp(scores - scores.max())
    return _Partial(scores.max(), weights.sum(), (weights[:, None] * values).sum(0))


def _join(partials: Sequence[_Partial]) -> Floats:
    highest = max(part.highest for part in partials)
    weight, values = np.float32(0), np.zeros_like(partials[0].values)
    for part in partials:
        share = np.exp(part.highest - highest)
        weight, values = weight + share * part.weight, values + share * part.values
    return values / weight
