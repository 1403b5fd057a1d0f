"""Rollback, journal, fall-back and switches of a running model."""

import numpy as np
import pytest
import speceyes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from speceyes.engines.errors import ConfigError
from speceyes.runtime import generation
from speceyes.runtime.options import Options
from speceyes.runtime.row import Row
from speceyes.runtime.session import Request
from speceyes.runtime.speculation import journal as journals
from speceyes.runtime.speculation.journal import Accept, Journal, Propose, ReplayDrafter, Rewind, Verify

from .bundles import bundle, model
from .drafters import Scripted, speculating

PROMPTS = ("the quick brown fox", "one two three one two three", "what is written here?")


def rows_of(vlm, count: int, tokens: int, **options) -> list[Row]:
    entry = vlm.manifest.model
    made = []
    for n, text in enumerate(PROMPTS[:count]):
        prompt = vlm.processor.prepare(None, prompt=text)
        chosen = Options.make({"max_new_tokens": tokens, "seed": n, **options})
        made.append(Row(prompt, chosen, vlm.processor.tokenizer, entry.vocabulary, frozenset(entry.eos_token_ids)))
    return made


def answers(vlm, count: int, tokens: int) -> list[tuple[int, ...]]:
    return [vlm.generate(prompt=p, max_new_tokens=tokens, speculate=False).token_ids for p in PROMPTS[:count]]


@given(st.lists(st.integers(0, 6), min_size=3, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_after_any_rounds_the_cache_equals_a_fresh_prefill(drafts, right):
    vlm = model("llama")
    decoder = vlm._engines.decoder
    ids = np.array(vlm.processor.prepare(None, prompt=PROMPTS[0]).token_ids)
    cache = decoder.open(2, 200)
    logits = cache.prefill(0, ids, np.arange(len(ids)), np.full(len(ids), -1), None, 64).logits
    committed = [*ids.tolist(), int(logits.argmax())]
    for length, good in zip(drafts, right, strict=False):
        start = len(committed) - 1
        guess = [(committed[-1] * 7 + i) % decoder.model.vocabulary for i in range(length)]
        if good:
            probe = cache.forward(np.array([[committed[-1]]]), np.array([[start]]), np.array([1])).logits[0]
            guess[:1] = [int(probe.argmax())] * bool(guess)
            cache.rewind(0, start)
        run = np.array([[committed[-1], *guess]])
        found = cache.forward(run, start + np.arange(length + 1)[None], np.array([length + 1]), every=True).logits[0]
        accepted = 0
        while accepted < length and int(found[accepted].argmax()) == guess[accepted]:
            accepted += 1
        committed += [*guess[:accepted], int(found[accepted].argmax())]
        cache.rewind(0, start + 1 + accepted)
    fresh = decoder.open(1, 200)
    tokens = np.array(committed[:-1])
    expected = fresh.prefill(0, tokens, np.arange(len(tokens)), np.full(len(tokens), -1), None, 64).logits
    assert int(expected.argmax()) == committed[-1]
    for name, layer in cache._layers.items():
        live = layer.array[0, :, : len(tokens)]
        np.testing.assert_allclose(live, fresh._layers[name].array[0, :, : len(tokens)], atol=1e-4)
    np.testing.assert_allclose(
        cache.forward(np.array([[committed[-1]]]), np.array([[len(tokens)]]), np.array([1])).logits[0],
        fresh.forward(np.array([[committed[-1]]]), np.array([[len(tokens)]]), np.array([1])).logits[0],
        atol=1e-4,
    )


def recorded(vlm, drafters, count: int, **options) -> tuple[Journal, list[Row]]:
    journal, rows = Journal(), rows_of(vlm, count, 20)
    with speculating(vlm, drafters, window_size=4, **options):
        for _ in generation.generate(vlm._engines, rows, journal):
            pass
    return journal, rows


def test_a_journal_replays_to_the_same_events():
    vlm = model("llama")
    expected = answers(vlm, 3, 20)
    journal, rows = recorded(vlm, [Scripted("mixed", expected, vlm.manifest.model.vocabulary)], 3)
    assert [tuple(row.tokens) for row in rows] == expected
    again, _ = recorded(vlm, [ReplayDrafter(journals.loads(journal.dumps()))], 3)
    assert list(again) == list(journal)
    kinds = {type(event) for event in journal}
    assert kinds == {Propose, Verify, Accept, Rewind}


def test_a_journal_tells_the_answer():
    vlm = model("llama")
    expected = answers(vlm, 2, 20)
    journal, _ = recorded(vlm, [Scripted("ragged", expected, vlm.manifest.model.vocabulary)], 2)
    for request, tokens in enumerate(expected):
        told = [t for event in journal if isinstance(event, Accept) and event.request == request for t in event.tokens]
        assert told == list(tokens[1:])


def test_a_journal_is_bounded():
    journal = Journal(limit=3)
    for number in range(10):
        journal.add(Verify(number, 1, 1))
    assert [event.round for event in journal if isinstance(event, Verify)] == [7, 8, 9]


def test_a_failed_round_leaves_its_journal(tmp_path):
    vlm = model("llama")

    class Broken(Scripted):
        def propose(self, states, windows, confidence):
            if len(states[0].tokens) > 5:
                raise RuntimeError("broken drafter")
            return super().propose(states, windows, confidence)

    drafter = Broken("right", answers(vlm, 1, 20), vlm.manifest.model.vocabulary)
    with speculating(vlm, [drafter], window_size=2, journal=str(tmp_path)), pytest.raises(RuntimeError) as caught:
        vlm.generate(prompt=PROMPTS[0], max_new_tokens=20)
    (path,) = tmp_path.glob("journal-*.jsonl")
    assert str(path) in caught.value.__notes__[0]
    assert any(isinstance(event, Accept) for event in journals.loads(path.read_text()))


def test_a_drafter_that_is_always_wrong_is_given_up():
    vlm = model("llama")
    drafter = Scripted("wrong", answers(vlm, 1, 200), vlm.manifest.model.vocabulary)
    with speculating(vlm, [drafter], window_size=4, adaptive=True) as speculator:
        speculator.costs.observe = lambda *_: None
        for width in range(1, 10):
            speculator.costs._measured[1, width] = 1e-9 * width
        stats = vlm.generate(prompt=PROMPTS[0], max_new_tokens=200).stats.speculation
    assert stats.accepted == 0
    assert stats.plain > 0.6 * stats.rounds > 60
    assert stats.drafters["wrong-0"].asked < 0.3 * stats.rounds


def test_warm_up_decodes_plainly_and_gathers_statistics():
    vlm = model("llama")
    drafter = Scripted("right", answers(vlm, 1, 30), vlm.manifest.model.vocabulary)
    with speculating(vlm, [drafter], window_size=4, warmup_steps=8) as speculator:
        stats = vlm.generate(prompt=PROMPTS[0], max_new_tokens=30).stats.speculation
        assert stats.plain == 7
        assert speculator._calibrations["right-0"].cumulative([0.9]) > [0.9]
    with speculating(vlm, [drafter], window_size=4, long_input_tokens=2, long_warmup_steps=40):
        stats = vlm.generate(prompt=PROMPTS[0], max_new_tokens=30).stats.speculation
    assert (stats.rounds, stats.plain) == (29, 29)


def test_each_request_of_a_batch_warms_up_for_itself():
    vlm = model("llama")
    expected = answers(vlm, 2, 30)
    long = len(vlm.processor.prepare(None, prompt=PROMPTS[1]).token_ids)
    short = len(vlm.processor.prepare(None, prompt=PROMPTS[0]).token_ids)
    assert short < long
    drafter = Scripted("right", expected, vlm.manifest.model.vocabulary)
    with speculating(vlm, [drafter], window_size=4, long_input_tokens=short, long_warmup_steps=20):
        found = vlm.generate_batch([Request(prompt=p, options={"max_new_tokens": 30}) for p in PROMPTS[:2]])
    at_once, later = (result.stats.speculation for result in found)
    assert [result.token_ids for result in found] == expected
    assert (at_once.plain, later.plain) == (0, 19)


def test_a_cancelled_request_counts_in_the_totals():
    vlm = model("llama")
    drafter = Scripted("right", answers(vlm, 1, 30), vlm.manifest.model.vocabulary)
    with speculating(vlm, [drafter], window_size=4):
        stream = vlm.stream(prompt=PROMPTS[0], max_new_tokens=30)
        pieces = [next(stream) for _ in range(3)]
        stream.close()
        done = stream.result.stats.speculation
        assert all(pieces) and stream.result.finish_reason == "cancelled"
        assert vlm.statistics.rounds == done.rounds > 0
        assert vlm.statistics.emitted == done.emitted


def test_what_is_drafted_ahead_is_used_when_all_was_right():
    vlm = model("llama")
    expected = answers(vlm, 3, 40)
    vocabulary = vlm.manifest.model.vocabulary
    asked = {}
    for double in (False, True):
        for kind in ("right", "mixed", "wrong"):
            drafter = Scripted(kind, expected, vocabulary)
            with speculating(vlm, [drafter], window_size=3, double_buffer=double):
                found = vlm.generate_batch([Request(prompt=p, options={"max_new_tokens": 40}) for p in PROMPTS])
            assert [result.token_ids for result in found] == expected
            asked[kind, double] = [result.stats.speculation.rounds for result in found]
    assert asked["right", True] == asked["right", False]


def test_a_wider_window_waits_for_the_next_request():
    vlm = model("llama")
    (expected,) = answers(vlm, 1, 60)
    drafter = Scripted("right", [expected], vlm.manifest.model.vocabulary)
    with speculating(vlm, [drafter], window_size=2):
        stream = vlm.stream(prompt=PROMPTS[0], max_new_tokens=60)
        next(stream)
        vlm.configure(window_size=30, max_parallel=8)
        assert stream.result.token_ids == expected
        assert len(stream.result.stats.speculation.issued_at) == 2


def test_switches_of_a_running_model():
    vlm = model("llama")
    before = vlm._engines.speculator.settings
    try:
        vlm.configure(adaptive=False)
        stream = vlm.stream(prompt=PROMPTS[1], max_new_tokens=60)
        next(stream)
        vlm.disable_speculation()
        off = vlm.generate(prompt=PROMPTS[1], max_new_tokens=60)
        assert off.stats.speculation is None
        vlm.enable_speculation()
        assert stream.result.token_ids == off.token_ids
        vlm.configure(window_size=2)
        assert len(vlm.generate(prompt=PROMPTS[1], max_new_tokens=60).stats.speculation.issued_at) <= 2
        with pytest.raises(ConfigError, match="window_size: found -1"):
            vlm.configure(window_size=-1)
        with pytest.raises(ConfigError, match="did you mean 'window_size'"):
            vlm.configure(window_sise=1)
    finally:
        vlm._engines.speculator.settings = before


def test_settings_reach_the_model_and_totals_add_up(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("speculation: {window_size: 3, warmup_steps: 8, max_parallel: 2, fallback_thresh: 0.3}")
    with speceyes.load(bundle("llama"), threads=1, settings=path) as vlm:
        vlm.configure(adaptive=False)
        first = vlm.generate(prompt=PROMPTS[1], max_new_tokens=30)
        batch = vlm.generate_batch([Request(prompt=p, options={"max_new_tokens": 12}) for p in PROMPTS])
        each = [first.stats.speculation, *(result.stats.speculation for result in batch)]
        assert vlm.statistics.emitted == sum(stats.emitted for stats in each) == 29 + 3 * 11
        assert vlm.statistics.rounds == sum(stats.rounds for stats in each)
        assert all(stats.plain >= 7 for stats in each)
        assert vlm._engines.speculator.history.tree.size > 0
