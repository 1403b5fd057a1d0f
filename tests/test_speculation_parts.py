"""Acceptance, look-up, policy, costs, calibration, statistics: their right values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from speceyes.runtime.processing.prompt import Prompt
from speceyes.runtime.sampling import Sampling
from speceyes.runtime.speculation.acceptance import Chooser, Tolerance, accept, accept_sampled
from speceyes.runtime.speculation.calibration import Calibration
from speceyes.runtime.speculation.costs import Costs, refresh
from speceyes.runtime.speculation.drafter import Draft
from speceyes.runtime.speculation.lookup import History, LookupDrafter
from speceyes.runtime.speculation.policy import Candidate, plan_round
from speceyes.runtime.speculation.statistics import SpeculationStatistics
from speceyes.runtime.speculation.suffix_tree import ROOT, Cursor, Sequence, SuffixTree
from speceyes.runtime.speculation.worth import OPEN_EVERY, PROBE_EVERY, TRIALS, Worth

VOCABULARY = 7


def greedy_chooser(position: int = 0) -> Chooser:
    return Chooser(Sampling(), np.zeros(VOCABULARY, np.bool_), 0, position)


def logits_for(tokens) -> np.ndarray:
    return np.eye(VOCABULARY, dtype=np.float32)[list(tokens)]


@pytest.mark.parametrize(
    ("branches", "chosen", "branch", "tokens"),
    [
        ([()], [[3]], 0, (3,)),
        ([(1, 2)], [[1, 2, 3]], 0, (1, 2, 3)),
        ([(1, 2)], [[1, 5, 3]], 0, (1, 5)),
        ([(1, 2)], [[4, 5, 3]], 0, (4,)),
        ([(1, 2), (4, 5)], [[4, 0, 0], [4, 5, 6]], 1, (4, 5, 6)),
        ([(1, 2), (1, 3)], [[1, 3, 0], [1, 3, 6]], 1, (1, 3, 6)),
        ([(1,), (1, 3)], [[1, 3], [1, 3, 6]], 1, (1, 3, 6)),
    ],
)
def test_acceptance_follows_the_models_own_choices(branches, chosen, branch, tokens):
    found = accept(branches, [logits_for(row) for row in chosen], greedy_chooser())
    assert (found.branch, found.tokens, found.accepted) == (branch, tokens, len(tokens) - 1)


def test_penalties_count_the_tokens_of_the_round_itself():
    sampling = Sampling(repetition_penalty=10.0)
    logits = np.array([[0, 3, 2, 0, 0, 0, 0]] * 3, np.float32)
    seen = np.zeros(VOCABULARY, np.bool_)
    found = accept([(1, 2)], [logits], Chooser(sampling, seen, 0, 0))
    assert found.tokens == (1, 2, 1)
    assert not seen.any()


@given(st.data())
def test_sampled_acceptance_does_not_depend_on_the_drafts(data):
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    table = generator.normal(size=(6, VOCABULARY)).astype(np.float32)
    sampling = Sampling(temperature=1.0, top_k=5, repetition_penalty=1.3)
    chooser = Chooser(sampling, np.zeros(VOCABULARY, np.bool_), 11, 4)
    expected: list[int] = []
    for row in table:
        expected.append(chooser.choose(row, expected))
    right = data.draw(st.integers(0, 5))
    draft = [*expected[:right], *data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=5 - right))]
    found = accept([draft], [table[: len(draft) + 1]], chooser)
    assert list(found.tokens) == expected[: len(found.tokens)]
    assert len(found.tokens) > min(right, len(draft))


def test_sampled_drafts_keep_the_models_distribution():
    generator = np.random.default_rng(0)
    wanted, proposed = generator.dirichlet(np.ones(VOCABULARY), 3), generator.dirichlet(np.ones(VOCABULARY), 2)
    count = 40_000
    first, pairs = np.zeros(VOCABULARY), np.zeros((VOCABULARY, VOCABULARY))
    for _ in range(count):
        draft = [int(generator.choice(VOCABULARY, p=q)) for q in proposed]
        tokens = accept_sampled(draft, proposed, wanted, generator.random((3, 2)))
        first[tokens[0]] += 1
        if len(tokens) > 1:
            pairs[tokens[0], tokens[1]] += 1
    expected = wanted[0] * count
    assert ((first - expected) ** 2 / expected).sum() < 22.5  # chi-square, 6 degrees of freedom, p = 0.001
    second = pairs.sum(0)
    expected = wanted[1] * second.sum()
    assert ((second - expected) ** 2 / expected).sum() < 22.5


def test_approximate_acceptance_takes_what_deviates_little():
    hidden = np.ones((2, 4), np.float32)
    near, far = hidden * 1.2, hidden * 1.5
    for foreseen, tokens, approximated in ((near, (1, 2, 3), 2), (far, (5,), 0)):
        tolerance = Tolerance(0.3, [np.vstack([hidden, hidden[:1]])], [foreseen])
        found = accept([(1, 2)], [logits_for([5, 6, 3])], greedy_chooser(), tolerance)
        assert (found.tokens, found.approximated) == (tokens, approximated)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 6))
def test_suffix_tree_counts_every_run(tokens, depth):
    tree = SuffixTree(depth)
    tree.add(tokens)
    for length in range(1, depth + 1):
        for start in range(len(tokens) - length + 1):
            run = tokens[start : start + length]
            node = ROOT
            for token in run:
                node = tree.child(node, token)
            assert tree.counts[node] == sum(tokens[i : i + length] == run for i in range(len(tokens) - length + 1))
            assert tree.counts[tree.best(node)] == max(tree.counts[tree.child(node, token)] for token in range(4))


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=12))
def test_cursors_find_the_ends_that_occurred(tokens, text):
    tree = SuffixTree(8)
    tree.add(tokens)
    found = {length for length, _ in Cursor(tree, text).matches(99)}
    runs = {tuple(tokens[i : i + n]) for n in range(1, 8) for i in range(len(tokens) - n)}
    assert found == {n for n in range(1, min(len(text), 7) + 1) if tuple(text[-n:]) in runs}


def test_follow_takes_the_most_frequent_continuation():
    tree = SuffixTree()
    for tail in ([2, 3], [2, 4], [2, 3], [5, 6]):
        tree.add([1, *tail])
    assert tree.follow(tree.child(ROOT, 1), 8) == ([2, 3], [3 / 5, 2 / 4])
    own = Sequence(tree)
    own.extend([1])
    assert own.matches(1)[0][0] == 1


def prompt(tokens, image=0) -> Prompt:
    ids = np.array(tokens)
    index = np.full(len(ids), -1)
    index[:image] = np.arange(image)
    return Prompt(ids, index, np.arange(len(ids)), len(ids), (), image > 0)


def test_lookup_repeats_the_prompt_but_no_image_tokens():
    drafter = LookupDrafter(History(0))
    state = drafter.open(prompt([9, 9, 9, 1, 2, 3, 4, 5], image=3), None)
    assert drafter.propose([state], [4], 0.0)[0].tokens == ()
    state.commit([1, 2], np.zeros((2, 4), np.float32))
    found = drafter.propose([state, state], [3, 0], 0.0)
    assert [draft.tokens for draft in found] == [(3, 4, 5), ()]
    assert list(found[0].confidences) == sorted(found[0].confidences, reverse=True)
    state.commit([9], np.zeros((1, 4), np.float32))
    assert drafter.propose([state], [3], 0.0)[0].tokens == ()


def test_lookup_repeats_past_answers_and_forgets_the_oldest():
    history = History(40)
    drafter = LookupDrafter(history)
    for answer in range(9):
        history.add([100, 101, answer, answer + 50, answer + 51])
    assert 20 <= history.tree.size <= 40
    state = drafter.open(prompt([100]), None)
    state.commit([101, 8], np.zeros((2, 4), np.float32))
    assert drafter.propose([state], [4], 0.0)[0].tokens == (58, 59)
    state = drafter.open(prompt([100]), None)
    state.commit([101, 0], np.zeros((2, 4), np.float32))
    assert drafter.propose([state], [4], 0.0)[0].tokens == ()


def candidate(tokens, chances, name="a") -> Candidate:
    return Candidate(Draft(name, tuple(tokens), tuple(chances)), tuple(chances))


def flat(rows: int, width: int) -> float:
    return 1.0 + 0.01 * rows * width


def steep(rows: int, width: int) -> float:
    return float(rows * width)


def test_policy_takes_the_window_of_the_best_rate():
    good = [[candidate((1, 2, 3, 4), (0.9, 0.8, 0.7, 0.001))]]
    plan = plan_round(good, flat, 1, adaptive=True)
    assert plan.branches[0][0].tokens == (1, 2, 3)
    assert plan.expected == pytest.approx(1 + 0.9 + 0.8 + 0.7)
    assert plan.seconds == pytest.approx(1.04)
    assert plan_round(good, steep, 1, adaptive=True).branches == ((),)
    assert plan_round(good, steep, 1, adaptive=False).branches[0][0].tokens == (1, 2, 3, 4)


def test_policy_adds_a_branch_when_it_pays():
    two = [[candidate((1, 2), (0.5, 0.3), "a"), candidate((5, 6), (0.4, 0.3), "b")], []]
    assert [d.drafter for d in plan_round(two, flat, 2, adaptive=True).branches[0]] == ["a", "b"]
    assert [d.drafter for d in plan_round(two, flat, 1, adaptive=True).branches[0]] == ["a"]
    same = [[candidate((1, 2), (0.5, 0.3), "a"), candidate((1,), (0.5,), "b")]]
    assert [d.drafter for d in plan_round(same, flat, 2, adaptive=True).branches[0]] == ["a"]

    def per_row(rows: int, width: int) -> float:
        return float(rows)

    assert len(plan_round(two, per_row, 2, adaptive=True).branches[0]) == 1


def test_costs_start_from_the_table_and_follow_what_is_measured():
    costs = Costs({"1": 1.0, "2": 2.0, "4": 3.0}, min_width=2)
    assert [costs.seconds(1, width) for width in (1, 2, 3, 4)] == pytest.approx([2e-3, 2e-3, 2.5e-3, 3e-3])
    assert costs.seconds(2, 2) == pytest.approx(3e-3)
    assert costs.seconds(2, 4) > costs.seconds(2, 2)
    for _ in range(200):
        costs.observe(1, 2, 4e-3)
    assert costs.seconds(1, 2) == pytest.approx(4e-3, rel=1e-3)
    assert costs.seconds(1, 4) == pytest.approx(6e-3, rel=1e-2)
    costs.observe(1, 2, 10.0)
    assert costs.seconds(1, 2) < 5e-3


def test_plain_steps_are_not_thought_slower_because_wide_passes_are():
    costs = Costs({"1": 1.0, "8": 2.0})
    for _ in range(200):
        costs.observe(1, 8, 3e-3)
    assert costs.seconds(1, 7) > 1.9e-3
    assert costs.seconds(1, 1) == pytest.approx(1e-3)
    for _ in range(200):
        costs.observe(1, 8, 1e-3)
    assert costs.seconds(1, 1) == pytest.approx(0.5e-3, rel=1e-2)


def test_costs_of_the_build_are_refreshed_from_a_few_widths():
    table = {"1": 1.0, "2": 1.0, "4": 2.0, "7": 4.0}
    found = refresh(table, {1: 2e-3, 7: 4e-3, 16: 1.0})
    assert found == pytest.approx({"1": 2.0, "2": 11 / 6, "4": 3.0, "7": 4.0})
    assert refresh(table, {}) == table
    assert refresh({}, {1: 1.0}) == {}


def test_calibration_learns_what_claims_are_worth():
    calibration = Calibration()
    assert calibration.cumulative([0.9, 0.45]) == pytest.approx([0.9, 0.45])
    for index in range(1000):
        hits = 1 if index % 4 == 0 else 0
        calibration.learn([0.95, 0.9], hits, min(hits + 1, 2))
    first, both = calibration.cumulative([0.95, 0.9])
    assert first == pytest.approx(0.2, abs=0.03)
    assert both < first


def test_statistics_count_what_happened():
    stats = SpeculationStatistics()
    stats.count_round([Draft("a", (1, 2, 3), (1, 1, 1))], (1, 2, 9))
    stats.count_round([Draft("a", (1,), (1,)), Draft("b", (5, 6), (1, 1))], (5, 6, 7))
    stats.count_round([Draft("none")], (4,))
    stats.count_time(1.0, 2.0, 3.0)
    assert (stats.rounds, stats.plain, stats.emitted, stats.rollbacks) == (3, 1, 7, 1)
    assert (stats.drafted, stats.accepted) == (5, 4)
    assert stats.tokens_per_round == pytest.approx(7 / 3)
    assert stats.acceptance_by_position == [1.0, 1.0, 0.0]
    assert stats.first_acceptance == 1.0
    assert stats.precision == pytest.approx(0.8)
    assert stats.coverage == pytest.approx(2 / 3)
    assert (stats.drafters["a"].issued, stats.drafters["a"].accepted, stats.drafters["a"].first) == (2, 2, 1)
    total = SpeculationStatistics()
    total.add(stats)
    total.add(stats)
    assert (total.rounds, total.issued_at, total.seconds["verify"]) == (6, [4, 4, 2], 4.0)
    assert total.drafters["b"].accepted == 4


def test_a_drafter_that_loses_is_asked_now_and_then():
    worth = Worth()
    for _ in range(TRIALS):
        assert worth.opens()
        assert worth.due()
        worth.learn(-1e-4)
    assert sum(worth.opens() for _ in range(10 * OPEN_EVERY)) == 10
    assert sum(worth.due() for _ in range(10 * PROBE_EVERY)) == 10
    for _ in range(60):
        worth.learn(1e-3)
    assert all(worth.due() and worth.opens() for _ in range(20))
