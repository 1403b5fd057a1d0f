"""Training a predictor: resumption, overfitting, limits, figures that can be checked by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speceyes.compile.predictor.batches import Batches
from speceyes.compile.predictor.calibrate import (
    Bin,
    Judged,
    acceptance,
    calibrate,
    confidences,
    expected_error,
    fit_platt,
    hits,
    judge,
    plan_figures,
    reliability,
    tokens_per_pass,
)
from speceyes.compile.predictor.frozen import Frozen, choose_slice
from speceyes.compile.predictor.loss import compute_loss, unroll
from speceyes.compile.predictor.model import Predictor
from speceyes.compile.predictor.settings import MAX_PARAMETERS, Shape, Training
from speceyes.compile.predictor.traces import BEST, Traces
from speceyes.compile.predictor.train import schedule, train
from speceyes.engines.errors import ConfigError, PredictorError

HIDDEN, VOCABULARY, LENGTH = 24, 50, 9
SHAPE = Shape(state=32, heads=2, head_width=8, window=3)
TRAINING = Training(epochs=3, batch=4, dropout=0.1, seed=5)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_traces(requests: int = 30, seed: int = 0) -> Traces:
    """Answers of 9 tokens counting upwards from a random start; features say nothing. The splits take turns."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(VOCABULARY, HIDDEN))
    starts = rng.integers(0, VOCABULARY, requests)
    tokens = ((starts[:, None] + np.arange(LENGTH)) % VOCABULARY).reshape(-1)
    best = (tokens[:, None] + np.arange(BEST)) % VOCABULARY
    hidden = table[tokens] + 0.1 * rng.normal(size=(len(tokens), HIDDEN))
    return Traces(
        {
            "tokens": tokens.astype(np.int32),
            "hidden": hidden.astype(np.float16),
            "best": best.astype(np.int32),
            "logits": np.tile(np.linspace(8, 0, BEST), (len(tokens), 1)).astype(np.float16),
            "visual": np.arange(len(tokens)) % LENGTH == 5,
            "copied": np.arange(len(tokens)) % LENGTH == 2,
            "features": rng.normal(size=(3 * requests, HIDDEN)).astype(np.float16),
            "first": starts.astype(np.int32),
            "split": (np.arange(requests) % 5 - 2).clip(0).astype(np.uint8),
            "ends": LENGTH * np.arange(1, requests + 1),
            "feature_ends": 3 * np.arange(1, requests + 1),
        }
    )


def make_frozen(ids: np.ndarray | None = None) -> Frozen:
    inside = torch.arange(VOCABULARY) if ids is None else torch.from_numpy(ids)
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    rows = torch.full((VOCABULARY,), len(inside))
    rows[inside] = torch.arange(len(inside))
    return Frozen(
        ids=inside,
        rows=rows,
        embedding=torch.cat([table[inside], torch.zeros(1, HIDDEN)]),
        head=table[inside],
        bias=torch.zeros(len(inside)),
        softcap=None,
    )


def make_batches(shape: Shape = SHAPE, **options: Any) -> Batches:
    return Batches(make_traces(**options), make_frozen(), shape.window, shape.form)


def test_going_on_equals_not_having_stopped(tmp_path: Path) -> None:
    def run(name: str, stop: int | None = None) -> Predictor:
        def report(done: int, total: int, loss: float) -> None:
            if done == stop:
                raise KeyboardInterrupt

        save = tmp_path / f"{name}.pt"
        return train(make_batches(), make_frozen(), SHAPE, TRAINING, save, images=True, report=report)

    whole = run("whole")
    steps = make_batches().steps("training", TRAINING.batch)
    for stop in (steps + 1, 2 * steps + 2):
        with pytest.raises(KeyboardInterrupt):
            run("stopped", stop)
    resumed = run("stopped")
    for (name, wanted), found in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(wanted, found), name
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_training_is_deterministic_and_depends_on_the_seed(tmp_path: Path) -> None:
    def weights(seed: int, name: str) -> torch.Tensor:
        training = Training(epochs=1, batch=4, seed=seed)
        done = train(make_batches(), make_frozen(), SHAPE, training, tmp_path / name, images=True)
        return done.foresee.weight

    assert torch.equal(weights(1, "a"), weights(1, "b"))
    assert not torch.equal(weights(1, "c"), weights(2, "d"))


def test_another_training_is_not_gone_on_with(tmp_path: Path) -> None:
    save = tmp_path / "save.pt"
    train(make_batches(), make_frozen(), SHAPE, Training(epochs=1), save, images=True, identity={"data": "a"})
    with pytest.raises(PredictorError, match="differs in data, training; take the same options"):
        train(make_batches(), make_frozen(), SHAPE, TRAINING, save, images=True, identity={"data": "b"})


@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_learns_what_can_be_learned(tmp_path: Path, checkpointing: bool) -> None:
    training = Training(epochs=12, batch=4, learning_rate=5e-3, dropout=0, gradient_checkpointing=checkpointing)
    batches = make_batches(requests=60)
    predictor = train(batches, make_frozen(), SHAPE, training, tmp_path / "save.pt", images=True)
    judged = judge(predictor, batches, "training")
    shares = acceptance(judged)
    assert len(shares) == 3 and min(shares) > 0.9
    assert tokens_per_pass(shares) > 3.4
    calibrate(predictor, batches)
    assert (confidences(predictor, judge(predictor, batches, "test")) > 0.5).mean() > 0.9


def test_the_documents_form_cannot_learn_it(tmp_path: Path) -> None:
    shape = Shape(form="document", state=32, window=3)
    training = Training(epochs=12, batch=4, learning_rate=5e-3, dropout=0)
    batches = make_batches(shape, requests=60)
    predictor = train(batches, make_frozen(), shape, training, tmp_path / "save.pt", images=True)
    assert acceptance(judge(predictor, batches, "training"))[0] < 0.4


def test_gradient_checkpointing_changes_no_gradient() -> None:
    torch.manual_seed(0)
    predictor = Predictor(SHAPE, make_frozen(), images=True)
    batch = make_batches().make([0, 1, 2])
    gradients = []
    for checkpointing in (False, True):
        predictor.zero_grad()
        compute_loss(predictor, batch, Training(astray=1, gradient_checkpointing=checkpointing)).backward()
        gradients.append([parameter.grad for parameter in predictor.parameters()])
    for name, plain, again in zip((n for n, _ in predictor.named_parameters()), *gradients, strict=True):
        assert plain is not None and again is not None, name
        torch.testing.assert_close(plain, again, rtol=1e-5, atol=1e-7)
        assert plain.abs().sum() > 0, name


def test_the_targets_tables_are_not_trained() -> None:
    predictor = Predictor(SHAPE, make_frozen(), images=True)
    assert all(not name.startswith("frozen") for name, _ in predictor.named_parameters())
    assert all(not name.startswith("frozen") for name in predictor.state_dict())
    assert predictor.parameters_own == sum(parameter.numel() for parameter in predictor.parameters())


def test_a_predictor_has_at_most_five_million_parameters() -> None:
    with pytest.raises(ConfigError, match=r"state: 1200 makes a predictor of [0-9,]+ parameters .* at most 5,000,000"):
        Predictor(Shape(state=1200), make_frozen(), images=True)
    assert Predictor(Shape(state=1000), make_frozen(), images=True).parameters_own <= MAX_PARAMETERS


def test_only_drafts_after_right_ones_count() -> None:
    torch.manual_seed(0)
    predictor = Predictor(SHAPE, make_frozen(), images=True).eval()
    batch = make_batches().make([0, 1])
    steps = unroll(predictor, batch)
    assert len(steps[0].hit) == 2 * (LENGTH - 1) and bool(steps[0].reached.all())
    going_on = steps[0].hit & steps[0].goal.exists & ~steps[0].goal.final
    assert len(steps[1].hit) == int(going_on.sum())
    everything = unroll(predictor, batch, astray=1.0)
    assert [len(step.hit) for step in everything] == [16, 14, 12]


def test_goals_are_the_next_tokens() -> None:
    batches = make_batches()
    batch = batches.make([1])
    tokens = batches.traces.tokens[LENGTH : 2 * LENGTH]
    assert batch.token.tolist() == tokens[:-1].tolist()
    for ahead, goal in enumerate(batch.goals, 1):
        count = LENGTH - ahead
        assert goal.exists.tolist() == [place < count for place in range(LENGTH - 1)]
        assert goal.full[:count].tolist() == tokens[ahead:].tolist()
        assert goal.plan[:count, 0].tolist() == [float(place == 2) for place in range(ahead, LENGTH)]
        assert goal.plan[:count, 2].tolist() == [float(place == 5) for place in range(ahead, LENGTH)]
        assert goal.plan[:count, 1].tolist() == [float(place in (3, 4, 5)) for place in range(ahead, LENGTH)]
        assert goal.final[:count].tolist() == [False] * (count - 1) + [True]


def test_tokens_outside_the_slice_are_misses() -> None:
    traces = make_traces()
    ids = np.arange(0, VOCABULARY, 2)
    batches = Batches(traces, make_frozen(ids), 3, "recurrent")
    goal = batches.make([0]).goals[0]
    assert goal.token.tolist() == [int(t) // 2 if t % 2 == 0 else -1 for t in goal.full.tolist()]
    predictor = Predictor(SHAPE, make_frozen(ids), images=True)
    assert torch.isfinite(compute_loss(predictor, batches.make([0, 1]), TRAINING))
    assert not (unroll(predictor, batches.make([0]))[0].hit & (goal.token < 0)).any()


def test_the_slice_is_the_most_frequent_tokens() -> None:
    traces = make_traces()
    numbers = np.concatenate([traces.tokens[traces.span(number)] for number in traces.of("training")])
    counts = np.bincount(numbers, minlength=VOCABULARY)
    chosen = choose_slice(traces, 10, VOCABULARY)
    assert len(chosen) == 10 and (np.diff(chosen) > 0).all()
    assert counts[chosen].min() >= np.delete(counts, chosen).max()
    assert len(choose_slice(traces, 4096, VOCABULARY)) <= VOCABULARY


def test_a_request_without_features_has_no_image_vector() -> None:
    torch.manual_seed(0)
    predictor = Predictor(SHAPE, make_frozen(), images=True).eval()
    assert predictor.image is not None
    memory = predictor.image.remember(torch.randn(2, 5, HIDDEN))
    seen = predictor.image(torch.randn(2, 32), memory, torch.tensor([0, 3]))
    assert seen[0].abs().sum() == 0 and seen[1].abs().sum() > 0
    shorter = predictor.image(torch.zeros(1, 32), memory[1:, :3], torch.tensor([3]))
    longer = predictor.image(torch.zeros(1, 32), memory[1:], torch.tensor([3]))
    torch.testing.assert_close(shorter, longer)


def test_reliability_and_its_error_on_known_values() -> None:
    confidence = np.array([0.05, 0.15, 0.95, 0.95, 0.95, 1.0])
    accepted = np.array([False, True, True, True, True, False])
    curve = reliability(confidence, accepted)
    assert curve[0] == Bin(1, 0.05, 0.0) and curve[1] == Bin(1, 0.15, 1.0)
    assert curve[2].count == 4 and curve[2].accepted == 0.75 and curve[2].confidence == pytest.approx(0.9625)
    assert expected_error(curve) == pytest.approx((0.05 + 0.85 + 4 * 0.2125) / 6)
    assert expected_error([]) == 0.0
    assert expected_error(reliability(np.full(10, 0.3), np.arange(10) < 3)) == pytest.approx(0)


def test_platt_finds_the_map_that_made_the_labels() -> None:
    rng = np.random.default_rng(0)
    odds = rng.normal(size=20_000) * 2
    hit = rng.random(20_000) < 1 / (1 + np.exp(-(0.5 * odds - 1)))
    scale, shift = fit_platt(odds, hit)
    assert scale == pytest.approx(0.5, abs=0.03) and shift == pytest.approx(-1, abs=0.05)


@pytest.mark.parametrize("hit", [np.ones(30, bool), np.zeros(30, bool), np.arange(5) < 2, np.zeros(0, bool)])
def test_platt_with_little_to_go_by_keeps_the_order(hit: np.ndarray) -> None:
    scale, shift = fit_platt(np.linspace(-3, 3, len(hit)), hit)
    assert scale == 1.0 and np.isfinite(shift)


def test_platt_never_turns_the_order_round() -> None:
    odds = np.linspace(-2, 2, 40)
    scale, shift = fit_platt(odds, odds < 0)
    assert scale == 1.0 and shift == pytest.approx(0)


def test_figures_of_the_plan_and_acceptance() -> None:
    plan = np.array([[0.9, 0.1, 0.6, 0.2], [0.8, 0.2, 0.4, 0.3]])
    labels = np.array([[1.0, 0, 1, 0], [0, 0, 1, 1]])
    judged = [Judged(np.zeros(2), np.array([True, False]), plan, labels), Judged(*(np.zeros((0, 4)),) * 4)]
    figures = plan_figures(judged[:1])
    assert figures["text_encoder"] == {"share": 0.5, "precision": 0.5, "recall": 1.0, "brier": pytest.approx(0.325)}
    assert figures["cross_attention"]["recall"] == 0.5 and figures["cross_attention"]["precision"] == 1.0
    assert figures["image_encoder"]["precision"] == 0.0
    assert acceptance(judged) == [0.5, 0.0]
    assert hits(judged[:1]).tolist() == [True, False]
    assert tokens_per_pass([0.5, 0.5]) == 1.75


def test_the_learning_rate_rises_and_falls() -> None:
    shares = [schedule(step, 100) for step in range(100)]
    assert shares[4] == 1.0 and shares[0] == 0.2
    assert shares[5:] == sorted(shares[5:], reverse=True) and shares[-1] < 0.01
