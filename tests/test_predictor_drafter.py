"""The compiled predictor as a drafter: what it proposes is what torch proposes, alone or in a batch."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from speceyes.compile.checkpoint import open_checkpoint
from speceyes.compile.export import save_graph
from speceyes.compile.lowering import lower
from speceyes.compile.predictor.export import export_memory, export_step
from speceyes.compile.predictor.frozen import borrow
from speceyes.compile.predictor.model import Predictor
from speceyes.compile.predictor.settings import Form, Shape
from speceyes.engines.onnxruntime import OnnxRuntimeEngine
from speceyes.runtime.processing.prompt import Prompt
from speceyes.runtime.speculation.drafter import Draft
from speceyes.runtime.speculation.predictor import PredictorDrafter, PredictorState

from .checkpoints import checkpoint, session_folder

HIDDEN, VOCABULARY, FIRST = 64, 400, 7
SLICE = np.arange(0, VOCABULARY, 3)


def make_predictor(form: Form = "recurrent", *, images: bool = True, seed: int = 0) -> Predictor:
    """A predictor with random weights whose confidences and drafts vary."""
    frozen = borrow(open_checkpoint(checkpoint("idefics3")), SLICE)
    torch.manual_seed(seed)
    predictor = Predictor(Shape(form=form, state=32, heads=2, head_width=8, window=3), frozen, images=images).eval()
    with torch.no_grad():
        predictor.foresee.weight *= 4
        predictor.judge.bias[0] = 3.0
        predictor.get_buffer("scale").copy_(torch.tensor([0.9, 1.0, 1.1]))
        predictor.get_buffer("shift").copy_(torch.tensor([0.5, 0.2, -0.1]))
    return predictor


def engines(
    predictor: Predictor, ends: Sequence[int] = (), precision: str = "fp32"
) -> tuple[OnnxRuntimeEngine, OnnxRuntimeEngine | None]:
    folder = session_folder() / f"predictor-{predictor.shape.form}-{predictor.image is not None}-{ends}-{precision}"
    step = save_graph(lower(export_step(predictor, ends), "predictor", precision), folder / "predictor.onnx")
    image = None
    if predictor.image is not None:
        image = OnnxRuntimeEngine(save_graph(export_memory(predictor), folder / "predictor_image.onnx"), threads=1)
    return OnnxRuntimeEngine(step, threads=1), image


@pytest.fixture(scope="module", params=["recurrent", "document", "text"])
def pair(request: pytest.FixtureRequest) -> tuple[Predictor, PredictorDrafter]:
    """A predictor in torch and the drafter made of it: both forms, and one for a target without images."""
    form: Form = "document" if request.param == "document" else "recurrent"
    predictor = make_predictor(form, images=request.param != "text")
    return predictor, PredictorDrafter(*engines(predictor), HIDDEN)


@pytest.fixture(scope="module")
def recurrent() -> tuple[Predictor, PredictorDrafter]:
    predictor = make_predictor()
    return predictor, PredictorDrafter(*engines(predictor), HIDDEN)


def prompt() -> Prompt:
    ids = np.array([FIRST, 8, 9])
    return Prompt(ids, np.full(3, -1), np.arange(3), 3, (), 0)


def features(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, count]).normal(size=(count, HIDDEN)).astype(np.float32)


def begin(drafter: PredictorDrafter, token: int, count: int, seed: int = 0) -> PredictorState:
    """A request with `count` image features whose last committed token is `token`."""
    state = drafter.open(prompt(), features(count, seed) if count else None)
    state.commit([5, token], np.random.default_rng([seed, token]).normal(size=(2, HIDDEN)).astype(np.float32))
    return state


@torch.no_grad()
def expected(predictor: Predictor, token: int, count: int, window: int, seed: int = 0) -> tuple[list[int], list[float]]:
    """Tokens and cumulative confidences that torch drafts for the same request."""
    hidden = torch.from_numpy(np.random.default_rng([seed, token]).normal(size=(2, HIDDEN)).astype(np.float32)[1:])
    state, ids = torch.zeros(1, 32), predictor.get_buffer("frozen_ids")
    memory, lengths = torch.zeros(1, 1, 32), torch.tensor([count])
    if predictor.image is not None and count:
        memory = predictor.image.remember(torch.from_numpy(features(count, seed)))[None]
    current = torch.tensor([FIRST if predictor.shape.form == "document" else token])
    tokens: list[int] = []
    confidences: list[float] = []
    for position in range(window):
        step = predictor.step(state, hidden, current, memory, lengths)
        confidence = float(predictor.calibrate(step.confidence, position))
        tokens.append(int(ids[step.logits.argmax()]))
        confidences.append(confidence * (confidences[-1] if confidences else 1.0))
        state, hidden = step.state, step.hidden
        if predictor.shape.form == "recurrent":
            current = torch.tensor([tokens[-1]])
    return tokens, confidences


def test_it_drafts_what_torch_drafts(pair: tuple[Predictor, PredictorDrafter]) -> None:
    predictor, drafter = pair
    seen = set()
    for token, count in ((20, 0), (21, 4), (30, 70), (399, 4)):
        (draft,) = drafter.propose([begin(drafter, token, count)], [5], 0.0)
        tokens, confidences = expected(predictor, token, count, 5)
        assert draft.drafter == "predictor"
        assert list(draft.tokens) == tokens[: len(draft.tokens)] and len(draft.tokens) >= 1
        np.testing.assert_allclose(draft.confidences, confidences[: len(draft.tokens)], atol=1e-5)
        assert draft.hidden.shape == (len(draft.tokens), HIDDEN)
        seen.add(draft.tokens)
    if predictor.shape.form == "document":
        assert all(len(set(tokens)) == 1 for tokens in seen)  # it says the same at every step
    else:
        assert len(seen) > 1


def equal(one: Draft, other: Draft) -> None:
    assert one.tokens == other.tokens
    np.testing.assert_allclose(one.confidences, other.confidences, atol=1e-5)
    np.testing.assert_allclose(one.hidden, other.hidden, atol=1e-4)


def test_a_batch_equals_its_rows(pair: tuple[Predictor, PredictorDrafter]) -> None:
    _, drafter = pair
    states = [begin(drafter, token, count) for token, count in ((20, 0), (21, 4), (30, 70), (50, 12))]
    windows = [4, 2, 0, 5]
    batch = drafter.propose(states, windows, 0.0)
    for state, window, draft in zip(states, windows, batch, strict=True):
        equal(draft, drafter.propose([state], [window], 0.0)[0])
        assert len(draft.tokens) <= window
    turned = drafter.propose(states[::-1], windows[::-1], 0.0)
    for draft, other in zip(batch, turned[::-1], strict=True):
        equal(draft, other)


def test_a_draft_ends_below_the_confidence(recurrent: tuple[Predictor, PredictorDrafter]) -> None:
    _, drafter = recurrent
    state = begin(drafter, 21, 4)
    (whole,) = drafter.propose([state], [5], 0.0)
    assert all(a >= b for a, b in zip(whole.confidences, whole.confidences[1:], strict=False))
    assert len(whole.tokens) == 5
    for length in range(5):
        threshold = (whole.confidences[length] + (whole.confidences[length - 1] if length else 1.0)) / 2
        (draft,) = drafter.propose([state], [5], threshold)
        assert draft.tokens == whole.tokens[:length]
        assert draft.confidences == whole.confidences[:length]


def test_proposing_changes_nothing(recurrent: tuple[Predictor, PredictorDrafter]) -> None:
    _, drafter = recurrent
    states = [begin(drafter, 20, 4), begin(drafter, 22, 9)]
    held = [(state.token, state.hidden.copy(), state.memory.copy()) for state in states]
    first = drafter.propose(states, [5, 5], 0.0)
    drafter.propose(states, [1, 3], 0.0)
    drafter.plan(states)
    again = drafter.propose(states, [5, 5], 0.0)
    assert [d.tokens for d in first] == [d.tokens for d in again]
    assert [d.confidences for d in first] == [d.confidences for d in again]
    for state, (token, hidden, memory) in zip(states, held, strict=True):
        assert state.token == token
        assert np.array_equal(state.hidden, hidden) and np.array_equal(state.memory, memory)


def test_nothing_committed_or_no_window_gives_an_empty_draft(recurrent: tuple[Predictor, PredictorDrafter]) -> None:
    _, drafter = recurrent
    fresh = drafter.open(prompt(), features(4))
    assert drafter.propose([fresh, begin(drafter, 20, 4)], [5, 0], 0.0) == [Draft("predictor"), Draft("predictor")]
    assert drafter.propose([], [], 0.0) == []
    assert drafter.plan([fresh]).tolist() == [[0.0, 0.0, 0.0, 0.0]]


def test_the_hidden_state_is_copied(recurrent: tuple[Predictor, PredictorDrafter]) -> None:
    _, drafter = recurrent
    state = drafter.open(prompt(), None)
    hidden = features(1)
    state.commit([20], hidden)
    (before,) = drafter.propose([state], [3], 0.0)
    hidden[:] = 0
    assert drafter.propose([state], [3], 0.0)[0].tokens == before.tokens
    state.commit([], hidden[:0])
    assert state.token == 20


def test_the_plan_is_what_torch_plans(recurrent: tuple[Predictor, PredictorDrafter]) -> None:
    predictor, drafter = recurrent
    found = drafter.plan([begin(drafter, 20, 0), begin(drafter, 21, 0)])
    assert found.shape == (2, 4) and (found > 0).all() and (found < 1).all()
    with torch.no_grad():
        for row, token in enumerate((20, 21)):
            hidden = torch.from_numpy(np.random.default_rng([0, token]).normal(size=(2, HIDDEN)).astype("f")[1:])
            zeros = torch.zeros(1, 1, 32)
            step = predictor.step(torch.zeros(1, 32), hidden, torch.tensor([token]), zeros, torch.tensor([0]))
            np.testing.assert_allclose(found[row], step.modules.sigmoid()[0].numpy(), atol=1e-5)


def test_a_draft_ends_with_the_answer(recurrent: tuple[Predictor, PredictorDrafter]) -> None:
    predictor, drafter = recurrent
    (whole,) = drafter.propose([begin(drafter, 21, 4)], [5], 0.0)
    cut = whole.tokens[: whole.tokens.index(whole.tokens[2]) + 1]
    drafter = PredictorDrafter(*engines(predictor, ends=whole.tokens[2:3]), HIDDEN)
    states = [begin(drafter, 21, 4), begin(drafter, 20, 0)]
    draft, other = drafter.propose(states, [5, 5], 0.0)
    assert draft.tokens == cut
    assert other.tokens == PredictorDrafter(*engines(predictor), HIDDEN).propose(states[1:], [5], 0.0)[0].tokens


def test_int8_drafts_nearly_the_same(recurrent: tuple[Predictor, PredictorDrafter]) -> None:
    predictor, exact = recurrent
    rounded = PredictorDrafter(*engines(predictor, precision="int8"), HIDDEN)
    same = 0
    for token in range(20, 60):
        (draft,), (wanted,) = (d.propose([begin(d, token, 9)], [1], 0.0) for d in (rounded, exact))
        same += draft.tokens == wanted.tokens
        assert abs(draft.confidences[0] - wanted.confidences[0]) < 0.15
    assert same >= 30


def test_many_shapes_of_batch(recurrent: tuple[Predictor, PredictorDrafter]) -> None:
    """More kinds of buffers than are kept; every batch still equals its rows."""
    _, drafter = recurrent
    counts: Sequence[int] = (0, 3, 65, 130, 200)
    states = [begin(drafter, 20 + i, count) for i, count in enumerate(counts)]
    alone = [drafter.propose([state], [3], 0.0)[0] for state in states]
    for size in range(1, 6):
        for start in range(6 - size):
            part = slice(start, start + size)
            for draft, single in zip(drafter.propose(states[part], [3] * size, 0.0), alone[part], strict=True):
                equal(draft, single)


def test_graphs_take_what_they_promise(tmp_path: Path) -> None:
    step, image = engines(make_predictor())
    assert {name: spec.shape for name, spec in step.inputs.items()} == {
        "hidden": ("rows", HIDDEN),
        "token": ("rows",),
        "memory": ("rows", "features", 32),
        "lengths": ("rows",),
        "window": (),
        "threshold": (),
    }
    assert {name: spec.shape for name, spec in step.outputs.items()} == {
        "next_token": ("window", "rows"),
        "confidence": ("window", "rows"),
        "next_hidden": ("window", "rows", HIDDEN),
        "mod_probs": ("rows", 4),
    }
    assert image is not None and image.outputs["memory"].shape == ("features", 32)
