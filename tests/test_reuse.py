"""What a request finds of earlier ones: never another answer, and less work."""

import dataclasses

import numpy as np
import pytest
import speceyes
from hypothesis import given, settings
from hypothesis import strategies as st
from speceyes.engines.errors import ConfigError
from speceyes.runtime.closed_caches import ClosedCaches
from speceyes.runtime.decoder import Decoder
from speceyes.runtime.memory.pool import Pool
from speceyes.runtime.perception.features import FeatureStore
from speceyes.runtime.prefix import Content
from speceyes.runtime.processing.prompt import Tile
from speceyes.runtime.session import Model, Request

from .bundles import VISION, bundle, model, picture
from .drafters import Scripted, speculating

QUESTIONS = ("what is written here?", "which colours are there?")
TOKENS = {"max_new_tokens": 12}


def fresh(family: str, precision: str = "fp32", **memory) -> Model:
    return speceyes.load(bundle(family, precision), settings={"memory": memory})


def alone(family: str, request: Request, precision: str = "fp32") -> tuple[int, ...]:
    """The answer of a model that keeps nothing."""
    with fresh(family, precision, cache_size=0) as plain:
        (result,) = plain.generate_batch([request])
    assert (result.stats.reused_tokens, result.stats.reused_tiles) == (0, 0)
    return result.token_ids


def forget_prompts(vlm: Model) -> None:
    """As if the closed caches had been evicted; features stay."""
    vlm.engines.decoder._closed = ClosedCaches(vlm.pool)


def turn(text: str, images: int = 0) -> dict:
    return {"role": "user", "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}]}


@pytest.mark.parametrize("family", VISION)
def test_a_second_question_about_a_picture_encodes_nothing_and_answers_the_same(family):
    vlm = fresh(family)
    for number, question in enumerate(QUESTIONS):
        result = vlm.generate(question, images=[picture("landscape")], **TOKENS)
        assert result.token_ids == alone(family, Request(question, images=[picture("landscape")], options=TOKENS))
        assert result.stats.reused_tiles == number * result.stats.tiles
    assert result.stats.reused_tokens > result.stats.image_tokens
    assert vlm.audit().live == {}


def test_a_second_turn_goes_on_behind_the_first_answer():
    vlm, images = fresh("idefics3"), [picture("square")]
    first = vlm.generate([turn(QUESTIONS[0], 1)], images=images, **TOKENS)
    told = [turn(QUESTIONS[0], 1), {"role": "assistant", "content": [{"type": "text", "text": first.text}]}]
    second = vlm.generate([*told, turn(QUESTIONS[1])], images=images, **TOKENS)
    assert second.stats.reused_tokens >= first.stats.prompt_tokens
    asked = Request([*told, turn(QUESTIONS[1])], images=images, options=TOKENS)
    assert second.token_ids == alone("idefics3", asked)


def test_another_picture_at_the_same_place_shares_what_comes_before_it():
    vlm = fresh("idefics3")
    vlm.generate(QUESTIONS[0], images=[picture("square", 1)], **TOKENS)
    result = vlm.generate(QUESTIONS[0], images=[picture("square", 2)], **TOKENS)
    assert result.token_ids == alone("idefics3", Request(QUESTIONS[0], images=[picture("square", 2)], options=TOKENS))
    assert 0 < result.stats.reused_tokens < result.stats.prompt_tokens - result.stats.image_tokens
    assert result.stats.reused_tiles == 0


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_broad_heads_reuse_a_beginning_only_from_beyond_the_last_seam(precision):
    """Tokens that were computed while the cache was short have other bits than those of a long prompt's first step."""
    vlm = fresh("llama_broad", precision)
    words = "the quick brown fox jumps over the lazy dog " * 12
    short, long = words[:40], words
    for prompt, after in ((short, False), (long, False), (f"{long}again", True), (f"{short}x", False)):
        result = vlm.generate(prompt=prompt, **TOKENS)
        assert (result.stats.reused_tokens >= 64) == after
        assert after or result.stats.reused_tokens == 0
        assert result.token_ids == alone("llama_broad", Request(prompt=prompt, options=TOKENS), precision)


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl"])
@pytest.mark.parametrize("seed", range(3))
def test_batches_and_requests_in_any_order_answer_as_alone(family, seed):
    vlm, generator = fresh(family), np.random.default_rng(seed)
    for _ in range(6):
        requests = [
            Request(
                QUESTIONS[int(generator.integers(2))],
                images=[picture("square", int(generator.integers(3)))] * int(generator.integers(1, 3)),
                options={"max_new_tokens": int(generator.integers(2, 12))},
            )
            for _ in range(int(generator.integers(1, 4)))
        ]
        found = vlm.generate_batch(requests)
        assert [result.token_ids for result in found] == [alone(family, request) for request in requests]
        assert vlm.audit().live == {}
    assert vlm.pool.statistics.hits > 0


def test_a_corrupted_entry_is_a_normal_computation():
    vlm, images = fresh("idefics3"), [picture("square")]
    expected = vlm.generate(QUESTIONS[0], images=images, **TOKENS).token_ids
    spoiled = 0
    for entry in vlm.pool._entries.values():
        for array in getattr(entry, "arrays", ()):
            array.reshape(-1).view(np.uint8)[3] ^= 0x40
            spoiled += 1
    assert spoiled > 0
    forget_prompts(vlm)
    result = vlm.generate(QUESTIONS[0], images=images, **TOKENS)
    assert (result.token_ids, result.stats.reused_tiles) == (expected, 0)


def test_int8_features_answer_the_same_whether_found_or_not():
    images = [picture("landscape", 4)]
    vlm, other = fresh("idefics3", features="int8", quant_groups=4), fresh("idefics3", features="int8", quant_groups=4)
    first = vlm.generate(QUESTIONS[0], images=images, **TOKENS)
    vlm.generate("another", images=[picture("square")], **TOKENS)
    forget_prompts(vlm)
    again = vlm.generate(QUESTIONS[0], images=images, **TOKENS)
    assert again.stats.reused_tiles == again.stats.tiles > 0
    assert first.token_ids == again.token_ids == other.generate(QUESTIONS[0], images=images, **TOKENS).token_ids
    exact = fresh("idefics3")
    exact.generate(QUESTIONS[0], images=images, **TOKENS)
    sizes = [sum(e.nbytes for key, e in m.pool._entries.items() if key[0] != "cache") for m in (other, exact)]
    assert sizes[0] < 0.35 * sizes[1]


def test_features_that_int8_cannot_hold_are_not_kept():
    store = FeatureStore(Pool(1_000_000), "owner", groups=2)
    tile = Tile({"pixel_values": np.zeros((1, 3, 2, 2), np.float32)}, 2)
    broken = np.array([[1, np.inf], [np.nan, 2]], np.float32)
    np.testing.assert_array_equal(store.keep(tile, broken), broken)
    assert store.find(tile) is None
    kept = store.keep(tile, np.ones((2, 2), np.float32))
    np.testing.assert_array_equal(store.find(tile), kept)
    assert FeatureStore(store._pool, "another engine").find(tile) is None


def test_groups_that_do_not_divide_the_features_are_refused():
    with pytest.raises(ConfigError, match="quant_groups: found 7; a divisor of the"):
        fresh("idefics3", features="int8", quant_groups=7)


def test_what_is_kept_stays_within_the_budget():
    vlm = fresh("idefics3", cache_size="20KB")
    for seed in range(6):
        vlm.generate(QUESTIONS[0], images=[picture("portrait", seed)], **TOKENS)
        assert vlm.audit().entry_bytes <= 20_000
    assert vlm.pool.statistics.evicted > 0


@given(
    st.integers(0, 2000),
    st.lists(st.one_of(st.just("close"), st.tuples(st.integers(1, 3), st.integers(1, 900))), max_size=30),
)
@settings(max_examples=30, deadline=None)
def test_closed_caches_are_the_last_one_and_what_the_budget_has_room_for(kilobytes, events):
    decoder = model("llama").engines.decoder
    pool = Pool(kilobytes * 1000)
    made = Decoder(decoder.engine, decoder.model, decoder.min_width, pool=pool)
    held = []
    for event in events:
        if event == "close" and held:
            made.close(held.pop(0))
        elif event != "close":
            held.append(made.open(*event))
        last, *others = made._closed._caches or [None]
        assert {id(cache) for cache in others} == {id(entry._cache) for entry in pool._entries.values()}
        assert sum(cache.nbytes for cache in others) == pool.audit().entry_bytes <= pool.budget
        assert not {id(cache) for cache in held} & {id(cache) for cache in (last, *others)}


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=12),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=12),
)
def test_shared_counts_equal_tokens_at_equal_places_of_equal_tiles(left, right):
    """Tokens (id, kind): kind 1 is a row of the picture whose bytes are told by the first digest."""
    made = [
        Content(
            np.array([token for token, _ in run], np.int64),
            np.arange(len(run)),
            np.array([kind - 1 for _, kind in run], np.int64),
            (bytes([len(run)]),),
        )
        for run in (left, right)
    ]
    same = 0
    for a, b in zip(left, right, strict=False):
        if a != b or (a[1] == 1 and len(left) != len(right)):
            break
        same += 1
    assert made[0].shared(made[1]) == made[1].shared(made[0]) == same
    shifted = dataclasses.replace(made[0], positions=made[0].positions + 1)
    assert made[0].shared(shifted) == 0


@pytest.mark.parametrize("tokens", [1, 2, 30])
@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_streams_that_are_cancelled_leave_nothing_open(tokens, pieces):
    """One that had ended with its last piece, but was not asked for more, among them."""
    vlm = model("idefics3")
    drafter = Scripted("right", [[0] * 40], vlm.manifest.model.vocabulary)
    with speculating(vlm, [drafter], window_size=4):
        with vlm.stream(QUESTIONS[0], images=[picture("square")], max_new_tokens=tokens) as stream:
            for _ in range(pieces):
                next(stream, None)
        assert all(state.closed for state in drafter.states)
        assert len(drafter.states) == (pieces > 0)
    assert vlm.audit().live == {}
