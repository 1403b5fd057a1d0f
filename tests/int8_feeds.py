"""Inputs of Int8KVAttention: a ragged cache that is rounded already, and trees of new tokens behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from speceyes.plugins.int8_attention.operator import int8_kv_attention
from speceyes.plugins.int8_attention.quantise import Packed
from speceyes.plugins.int8_attention.tolerance import Half, rounding_bound

HEAD_DIM, SCALE = 16, 0.25
CACHES = ("cache_k", "cache_v", "scale_k", "scale_v")

SHAPES = st.tuples(st.integers(0, 99), st.integers(1, 3), st.integers(1, 5), st.sampled_from([6, 40, 130, 300]))
"""(seed, batch, width, capacity)"""

HEADS = st.sampled_from([(1, 1), (4, 2), (6, 2), (4, 1)])
"""(heads, kv_heads): one to four heads read the same keys."""

GROUPS = st.sampled_from([1, 2, 8])


def feeds(
    seed: int, batch: int, width: int, capacity: int, heads: int, kv_heads: int, groups: int, head_dim: int = HEAD_DIM
) -> dict[str, Any]:
    """What the operator takes, by name."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, capacity - width + 1, batch)
    made = {
        "query": rng.standard_normal((batch, width, heads * head_dim)),
        "key": rng.standard_normal((batch, width, kv_heads * head_dim)),
        "value": rng.standard_normal((batch, width, kv_heads * head_dim)),
        "scale_k": rng.uniform(0.005, 0.02, (batch, kv_heads, capacity, groups)),
        "scale_v": rng.uniform(0.005, 0.02, (batch, kv_heads, capacity, groups)),
        "center": rng.standard_normal((kv_heads, head_dim)),
    }
    found: dict[str, Any] = {name: array.astype(np.float32) for name, array in made.items()}
    for name in ("cache_k", "cache_v"):
        found[name] = rng.integers(-127, 128, (batch, kv_heads, capacity, head_dim)).astype(np.int8)
    return found | {"write_index": start, "mask": tree_mask(rng, start, width, capacity)}


def tree_mask(rng: np.random.Generator, start: np.ndarray, width: int, capacity: int) -> np.ndarray:
    """A token sees what is committed, its ancestors in a random tree, and itself: bool [batch, 1, width, capacity]."""
    mask = np.zeros((len(start), 1, width, capacity), bool)
    for row, first in enumerate(start):
        mask[row, 0, :, :first] = True
        for token in range(width):
            parent = int(rng.integers(-1, token)) if token else -1
            if parent >= 0:
                mask[row, 0, token] = mask[row, 0, parent]
            mask[row, 0, token, first + token] = True
    return mask


def prefill(seed: int, batch: int, width: int, capacity: int, heads: int, kv_heads: int, groups: int) -> dict[str, Any]:
    """The same with nothing before the new tokens, so that the exact keys and values of all that is seen are known."""
    feed = feeds(seed, batch, width, capacity, heads, kv_heads, groups)
    start = np.zeros(batch, np.int64)
    return feed | {"write_index": start, "mask": tree_mask(np.random.default_rng(seed), start, width, capacity)}


def reference(
    feed: dict[str, Any], heads: int, kv_heads: int, groups: int, scale: float = SCALE
) -> tuple[np.ndarray, ...]:
    return int8_kv_attention(**feed, scale=scale, q_num_heads=heads, kv_num_heads=kv_heads, groups=groups)


def assert_within_rounding(
    found: np.ndarray, feed: dict[str, Any], wanted: tuple[np.ndarray, ...], half: Half | None = None
) -> None:
    """`found` may be as far from the reference's result as both may be from exact sums."""
    keys, values = Packed(wanted[1], wanted[3]), Packed(wanted[2], wanted[4])
    ours, theirs = (rounding_bound(feed["query"], keys, values, feed["mask"], SCALE, kind) for kind in (None, half))
    by_head = (*ours.shape, -1)
    apart = np.abs(found.astype(np.float64) - wanted[0]).reshape(by_head).max(-1)
    assert (apart <= ours + theirs).all(), (apart.max(), (ours + theirs).min())
