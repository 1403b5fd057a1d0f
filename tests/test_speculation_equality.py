"""Speculation gives the tokens of plain decoding: families, windows, branches, batches, sampling, any drafter."""

import numpy as np
import pytest
from speceyes.runtime.session import Request

from .bundles import TEXT, VISION, ask, model, picture
from .drafters import Scripted, speculating

KINDS = ("right", "wrong", "random", "mixed", "ragged")
TOKENS = 24
SAMPLED = {"temperature": 1.1, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.2}


def requests(family: str, count: int, sampled: bool) -> list[Request]:
    """Requests of different lengths, with 0 to 2 images."""
    made = []
    for n in range(count):
        options = {"max_new_tokens": TOKENS - 3 * n, "seed": n, **(SAMPLED if sampled else {})}
        text = "the quick brown fox " * (n + 1)
        images = [picture(("square", "portrait")[i], n) for i in range((n + 1) % 3)] if family in VISION else []
        if family in VISION:
            made.append(Request(ask(text, len(images)), images=images, options=options))
        else:
            made.append(Request(prompt=text, options=options))
    return made


def plain(vlm, wanted: list[Request]) -> list[tuple[int, ...]]:
    results = []
    for request in wanted:
        options = {**request.options, "speculate": False}
        found = vlm.generate(request.messages, prompt=request.prompt, images=request.images, **options)
        assert found.stats.speculation is None
        results.append(found.token_ids)
    return results


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", [*VISION, *TEXT])
def test_tokens_equal_plain_decoding(family, sampled):
    vlm = model(family)
    wanted = requests(family, 4, sampled)
    expected = plain(vlm, wanted)
    vocabulary = vlm.manifest.model.vocabulary
    generator = np.random.default_rng(0)
    for window in (1, 2, 3, 5, 8):
        for batch in (1, 3, 4):
            branches = int(generator.integers(1, 4))
            drafters = [Scripted(KINDS[(window + batch + b) % 5], expected, vocabulary, b) for b in range(branches)]
            with speculating(vlm, drafters, window_size=window, max_parallel=branches):
                found = vlm.generate_batch(wanted[:batch])
            assert [result.token_ids for result in found] == expected[:batch], (window, batch, branches)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("branches", [1, 2, 3])
def test_every_drafter_window_and_branch_count(kind, branches, precision):
    vlm = model("llama", precision)
    for sampled in (False, True):
        wanted = requests("llama", 3, sampled)
        expected = plain(vlm, wanted)
        for window in range(9):
            kinds = [kind, "mixed", "ragged"][:branches]
            drafters = [Scripted(k, expected, vlm.manifest.model.vocabulary, 7 * b) for b, k in enumerate(kinds)]
            with speculating(vlm, drafters, window_size=window, max_parallel=branches):
                assert [r.token_ids for r in vlm.generate_batch(wanted)] == expected
                alone = vlm.generate(prompt=wanted[0].prompt, **wanted[0].options)
            assert alone.token_ids == expected[0]


def test_right_drafts_are_all_accepted_and_wrong_ones_rejected():
    vlm = model("llama")
    wanted = requests("llama", 1, sampled=False)
    expected = plain(vlm, wanted)
    for kind, rate in (("right", 1.0), ("wrong", 0.0)):
        drafter = Scripted(kind, expected, vlm.manifest.model.vocabulary)
        with speculating(vlm, [drafter], window_size=3):
            stats = vlm.generate_batch(wanted)[0].stats.speculation
        assert stats.precision == rate
        assert stats.emitted == TOKENS - 1
        assert stats.rollbacks == (0 if rate else stats.rounds - stats.plain)
        assert stats.rounds == (-(-(TOKENS - 1) // 4) if rate else TOKENS - 1)


def test_the_second_branch_is_accepted_where_the_first_is_wrong():
    vlm = model("llama")
    wanted = requests("llama", 3, sampled=True)
    expected = plain(vlm, wanted)
    vocabulary = vlm.manifest.model.vocabulary
    drafters = [Scripted("wrong", expected, vocabulary, 1), Scripted("right", expected, vocabulary, 2)]
    with speculating(vlm, drafters, window_size=3, max_parallel=2):
        found = vlm.generate_batch(wanted)
    assert [result.token_ids for result in found] == expected
    stats = found[0].stats.speculation
    assert stats.precision == 1.0
    assert stats.drafters["wrong-1"].accepted == 0
    assert stats.drafters["right-2"].accepted == stats.accepted > 0


def test_drafters_see_committed_tokens_and_what_chose_them():
    vlm = model("llama")
    wanted = requests("llama", 1, sampled=False)
    expected = plain(vlm, wanted)
    seen = []
    for kind in ("wrong", "mixed", "right"):
        drafter = Scripted(kind, expected, vlm.manifest.model.vocabulary)
        with speculating(vlm, [drafter], window_size=4):
            vlm.generate_batch(wanted)
        assert drafter.states[0].tokens == list(expected[0])
        seen.append(np.array(drafter.states[0].hidden))
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[0], seen[2])


def test_stop_strings_and_streams_are_those_of_plain_decoding():
    vlm = model("idefics3")
    wanted = requests("idefics3", 1, sampled=False)[0]
    text = vlm.generate(wanted.messages, images=wanted.images, **wanted.options, speculate=False).text
    stop = text[len(text) // 2 :][:3]
    answer = [vlm.generate(wanted.messages, images=wanted.images, **wanted.options, speculate=False).token_ids]
    before = vlm.generate(wanted.messages, images=wanted.images, **wanted.options, speculate=False, stop=stop)
    for kind in KINDS:
        with speculating(vlm, [Scripted(kind, answer, vlm.manifest.model.vocabulary)], window_size=5):
            found = vlm.generate(wanted.messages, images=wanted.images, **wanted.options, stop=stop)
            assert (found.text, found.token_ids, found.finish_reason) == (before.text, before.token_ids, "stop")
            pieces = list(vlm.stream(wanted.messages, images=wanted.images, **wanted.options))
        assert "".join(pieces) == text


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_token_has_the_same_bits_beside_any_others(precision):
    decoder = model("llama", precision)._engines.decoder
    rows, past, widths = 5, 20, 9
    generator = np.random.default_rng(0)
    context, tokens = (generator.integers(0, decoder.model.vocabulary, (rows, count)) for count in (past, widths))

    def fill(rows: range):
        cache = decoder.open(len(rows), past + widths)
        for slot, row in enumerate(rows):
            cache.prefill(slot, context[row], np.arange(past), np.full(past, -1), None, 64)
        return cache

    expected = np.zeros((rows, widths, decoder.model.vocabulary), np.float32)
    for row in range(rows):
        cache = fill(range(row, row + 1))
        for place in range(widths):
            one, position = tokens[row : row + 1, place : place + 1], np.array([[past + place]])
            expected[row, place] = cache.forward(one, position, np.array([1])).logits[0]
    for count in range(1, rows + 1):
        cache = fill(range(count))
        for width in range(1, widths + 1):
            positions = np.broadcast_to(past + np.arange(width), (count, width))
            output = cache.forward(tokens[:count, :width], positions, np.full(count, width), every=True)
            np.testing.assert_array_equal(output.logits, expected[:count, :width])
            for row in range(count):
                cache.rewind(row, past)


def test_a_batch_of_eight_ends_raggedly():
    vlm = model("llama")
    vocabulary = vlm.manifest.model.vocabulary
    options = [{"max_new_tokens": 3 + 5 * (n % 4) + n, "seed": n, **(SAMPLED if n % 2 else {})} for n in range(8)]
    wanted = [Request(prompt="one two three " * (1 + n % 3), options=options[n]) for n in range(8)]
    expected = plain(vlm, wanted)
    for kind in ("mixed", "ragged"):
        drafters = [Scripted(kind, expected, vocabulary, 1), Scripted("mixed", expected, vocabulary, 2)]
        with speculating(vlm, drafters, window_size=6, max_parallel=2):
            found = vlm.generate_batch(wanted)
        assert [result.token_ids for result in found] == expected


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_broad_heads_keep_their_bits_across_the_seams(precision):
    decoder = model("llama_broad", precision)._engines.decoder
    assert decoder.seams == (32, 64)
    generator = np.random.default_rng(3)
    past, total = 20, 80
    tokens = generator.integers(0, decoder.model.vocabulary, total).tolist()

    def fresh():
        cache = decoder.open(1, total + 16)
        cache.prefill(0, np.array(tokens[:past]), np.arange(past), np.full(past, -1), None, 64)
        return cache

    cache = fresh()
    expected = [cache.advance([[token]], [place]).logits[0].copy() for place, token in enumerate(tokens[past:], past)]
    for wanted in (2, 3, 5, 7, 9):
        cache, place = fresh(), past
        while place < total:
            width = min(wanted, cache.widest(1), total - place)
            logits = cache.advance([tokens[place : place + width]], [place], every=True).logits[0]
            np.testing.assert_array_equal(logits[:width], expected[place - past : place - past + width])
            place += width


def test_broad_heads_speculate_in_ragged_batches():
    vlm = model("llama_broad", "int8")
    options = [{"max_new_tokens": 70 - 9 * n, "seed": n, **(SAMPLED if n % 2 else {})} for n in range(3)]
    wanted = [Request(prompt="one two three " * (1 + 2 * n), options=options[n]) for n in range(3)]
    expected = plain(vlm, wanted)
    for kind in KINDS:
        drafters = [Scripted(kind, expected, vlm.manifest.model.vocabulary, b) for b in range(2)]
        with speculating(vlm, drafters, window_size=8, max_parallel=2):
            assert [result.token_ids for result in vlm.generate_batch(wanted)] == expected
