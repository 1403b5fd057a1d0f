"""Int8KVAttention's reference: how far it is from exact attention, and what it promises to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from speceyes.plugins import cached_attention as exact
from speceyes.plugins.int8_attention.operator import CHUNK
from speceyes.plugins.int8_attention.quantise import Packed, quantise
from speceyes.plugins.int8_attention.tolerance import UNIT, error_bound, rounding_bound

from .int8_feeds import CACHES, GROUPS, HEAD_DIM, HEADS, SCALE, SHAPES, feeds, prefill, reference


def exact_attention(feed: dict[str, np.ndarray], heads: int, kv_heads: int, scale: float = SCALE) -> np.ndarray:
    """Sums in float64 over the keys and values before they were rounded."""
    batch, width = feed["query"].shape[:2]
    empty = np.zeros(feed["cache_k"].shape)
    states = (feed[name].astype(np.float64) for name in ("query", "key", "value"))
    live = np.full(batch, width)
    sizes = {"q_num_heads": heads, "kv_num_heads": kv_heads}
    return exact.cached_attention(*states, empty, empty, feed["write_index"], live, feed["mask"], scale=scale, **sizes)[
        0
    ]


@given(SHAPES, HEADS, GROUPS)
@settings(max_examples=60, deadline=None)
def test_the_error_beside_exact_attention_keeps_the_derived_bound(shape, heads, groups):
    feed = prefill(*shape, *heads, groups)
    found = reference(feed, *heads, groups)
    split = (*found[0].shape[:2], heads[0], HEAD_DIM)
    apart = np.abs(found[0] - exact_attention(feed, *heads)).reshape(split).max(-1)
    sums = rounding_bound(feed["query"], Packed(*found[1::2]), Packed(*found[2::2]), feed["mask"], SCALE)
    keys, values = (feed[name].reshape(*split[:2], heads[1], HEAD_DIM) for name in ("key", "value"))
    for row, token, head in np.ndindex(apart.shape):
        seen = np.flatnonzero(feed["mask"][row, 0, token])
        held = head // (heads[0] // heads[1])
        query, exact_values = feed["query"][row, token].reshape(heads[0], HEAD_DIM)[head], values[row, seen, held]
        bound = error_bound(query, keys[row, seen, held] - feed["center"][held], exact_values, SCALE, groups)
        assert apart[row, token, head] <= bound + sums[row, token, head] + UNIT * np.abs(exact_values).max()


@pytest.mark.parametrize("scale", [0.001, 0.01, 0.05])
def test_the_bound_is_reached_by_keys_rounded_in_opposite_directions(scale):
    """Steps of 1: 0.499 becomes 0 and 0.501 becomes 1 in fifteen channels that the query adds up; values stay."""
    feed = prefill(0, 1, 2, 2, 1, 1, 1) | {"mask": np.ones((1, 1, 2, 2), bool)}
    feed["query"], feed["center"] = np.ones_like(feed["query"]), np.zeros_like(feed["center"])
    feed["key"] = np.repeat(np.array([[[0.499], [0.501]]], np.float32), HEAD_DIM, -1)
    feed["value"] = np.repeat(np.array([[[0], [127]]], np.float32), HEAD_DIM, -1)
    feed["key"][..., 0] = 127
    moved = np.abs(reference(feed, 1, 1, 1, scale)[0] - exact_attention(feed, 1, 1, scale)).max()
    feed["query"][..., 0] = 0
    bound = error_bound(feed["query"][0, 0], feed["key"][0], feed["value"][0], scale) - 0.5
    assert 0.95 * bound < moved <= bound * 1.001


@given(SHAPES, HEADS, GROUPS)
@settings(max_examples=25, deadline=None)
def test_a_token_has_the_same_bits_at_every_width_batch_and_capacity(shape, heads, groups):
    """Token by token, alone, in a larger cache: what a row gave together with others."""
    seed, batch, width, capacity = shape
    feed = feeds(seed, batch, width, capacity, *heads, groups)
    whole = reference(feed, *heads, groups)
    row, more = batch - 1, CHUNK + 7
    alone = {name: array if name == "center" else array[row : row + 1] for name, array in feed.items()}
    for name in CACHES:
        alone[name] = np.pad(alone[name], ((0, 0), (0, 0), (0, more), (0, 0)))
    alone["mask"] = np.pad(alone["mask"], ((0, 0), (0, 0), (0, 0), (0, more)))
    for token in range(width):
        one = {**alone, "write_index": alone["write_index"] + token, "mask": alone["mask"][:, :, token : token + 1]}
        one |= {name: alone[name][:, token : token + 1] for name in ("query", "key", "value")}
        made = reference(one, *heads, groups)
        np.testing.assert_array_equal(made[0][0, 0], whole[0][row, token])
        alone |= dict(zip(CACHES, made[1:], strict=True))
    for found, kept in zip(made[1:], whole[1:], strict=True):
        np.testing.assert_array_equal(found[0, :, :capacity], kept[row])


@given(SHAPES, HEADS)
@settings(max_examples=25, deadline=None)
def test_softmax_does_not_see_the_center(shape, heads):
    """Keys that are whole numbers round to themselves with any whole center that leaves them within 127, so only the
    order of sums is left to differ: scores change by up to |q · center|, weights by nothing."""
    feed = prefill(*shape, *heads, 1)
    rng = np.random.default_rng(shape[0])
    feed["key"] = rng.integers(-50, 51, feed["key"].shape).astype(np.float32)
    feed["key"][..., ::HEAD_DIM] = 97
    center = rng.integers(-30, 31, feed["center"].shape).astype(np.float32)
    center[:, 0] = -30
    feed["query"] = feed["query"] / 16
    plain = reference({**feed, "center": np.zeros_like(center)}, *heads, 1)
    centered = reference({**feed, "center": center}, *heads, 1)
    assert (centered[3][:, :, : shape[2]] == 1).all() and not np.array_equal(plain[1], centered[1])
    wanted = exact_attention(feed, *heads)
    sums = rounding_bound(feed["query"], Packed(*centered[1::2]), Packed(*centered[2::2]), feed["mask"], SCALE)
    values = quantise(feed["value"].reshape(*feed["value"].shape[:2], -1, HEAD_DIM)).scales.max() * (0.5 + 254 * UNIT)
    apart = np.abs(centered[0] - wanted).reshape(*sums.shape, HEAD_DIM).max(-1)
    assert (apart <= sums + values + UNIT * np.abs(feed["value"]).max()).all()


def test_a_center_near_the_mean_makes_the_steps_finer():
    feed = prefill(3, 1, 4, 20, 2, 1, 1)
    feed["key"] = feed["key"] + 5
    plain, centered = (
        reference({**feed, "center": np.full((1, HEAD_DIM), shift, np.float32)}, 2, 1, 1) for shift in (0, 5)
    )
    wanted = exact_attention(feed, 2, 1)
    assert centered[3][:, :, :4].max() < 0.6 * plain[3][:, :, :4].max()
    assert np.abs(centered[0] - wanted).mean() < np.abs(plain[0] - wanted).mean()


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_what_is_written_is_rounded_alone_and_nothing_else_changes(groups):
    feed = feeds(4, 2, 3, 30, 4, 2, groups)
    kept = {name: array.copy() for name, array in feed.items()}
    made = dict(zip(("cache_k", "cache_v", "scale_k", "scale_v"), reference(feed, 4, 2, groups)[1:], strict=True))
    for name, array in kept.items():
        np.testing.assert_array_equal(feed[name], array)
    for row, start in enumerate(feed["write_index"]):
        states = feed["key"][row].reshape(3, 2, HEAD_DIM) - feed["center"]
        new = quantise(states.transpose(1, 0, 2), groups)
        np.testing.assert_array_equal(made["cache_k"][row, :, start : start + 3], new.codes)
        np.testing.assert_array_equal(made["scale_k"][row, :, start : start + 3], new.scales)
        others = np.delete(np.arange(30), np.arange(start, start + 3))
        for name in CACHES:
            np.testing.assert_array_equal(made[name][row][:, others], kept[name][row][:, others])


def test_a_token_that_sees_nothing_is_zero_and_its_neighbours_are_not():
    feed = feeds(1, 2, 3, 10, 2, 2, 1)
    feed["mask"][1, 0, 2] = False
    found = reference(feed, 2, 2, 1)[0]
    assert not found[1, 2].any()
    assert np.abs(found[[0, 0, 0, 1, 1], [0, 1, 2, 0, 1]]).min(-1).all()


def test_what_does_not_fit_is_refused():
    feed = feeds(1, 2, 3, 10, 2, 2, 1)
    with pytest.raises(ValueError, match="exceeds the capacity 10"):
        reference({**feed, "write_index": np.array([8, 0])}, 2, 2, 1)
    with pytest.raises(ValueError, match="a divisor of the 16 channels"):
        reference(feed, 2, 2, 3)


@pytest.mark.parametrize(
    ("head_dim", "groups", "of_fp32", "of_fp16"),
    [
        (64, 1, 0.734, 0.469),
        (64, 2, 0.719, 0.4375),
        (64, 8, 0.625, 0.25),
        (80, 1, 0.7375, 0.475),
        (128, 1, 0.742, 0.484),
    ],
)
def test_what_a_cache_saves_as_allocated(head_dim, groups, of_fp32, of_fp16):
    """The table of docs/int8-attention.md; at 64 channels and one scale at least 70 % of fp32 and 44 % of fp16."""
    held = quantise(np.ones((2, 4, 100, head_dim), np.float32), groups)
    for dtype, saved in ((np.float32, of_fp32), (np.float16, of_fp16)):
        assert 1 - held.nbytes / np.empty(held.codes.shape, dtype).nbytes == pytest.approx(saved, abs=5e-4)
