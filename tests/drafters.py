"""Drafters with a known character, for forcing what a round does."""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from speceyes.runtime.session import Model
from speceyes.runtime.speculation.drafter import Draft
from speceyes.runtime.speculation.lookup import History
from speceyes.runtime.speculation.settings import Speculation
from speceyes.runtime.speculation.speculator import Speculator


@dataclass
class State:
    """A request's number in the call and its committed tokens."""

    request: int
    tokens: list[int] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)
    closed: bool = False

    def commit(self, tokens, hidden):
        assert len(tokens) == len(hidden)
        self.tokens.extend(tokens)
        self.hidden.extend(hidden.copy())

    def close(self):
        assert not self.closed
        self.closed = True


class Scripted:
    """Drafts by `kind` from the known answers, numbered as the requests of the call.

    `right`: the answer itself; `wrong`: never right; `random`: any token; `mixed`: right at first, then wrong after a
    random length; `ragged`: right, of random length, sometimes nothing.
    """

    def __init__(self, kind: str, answers: Sequence[Sequence[int]], vocabulary: int, seed: int = 0) -> None:
        self.name, self.kind, self.answers, self.vocabulary = f"{kind}-{seed}", kind, answers, vocabulary
        self.generator = np.random.default_rng(seed)
        self.states: list[State] = []

    def open(self, prompt, features):
        self.states.append(State(len(self.states) % len(self.answers)))
        return self.states[-1]

    def propose(self, states, windows, confidence):
        return [self._draft(state, window) for state, window in zip(states, windows, strict=True)]

    def _draft(self, state: State, window: int) -> Draft:
        answer = self.answers[state.request]
        right = [int(token) for token in answer[len(state.tokens) : len(state.tokens) + window]]
        right += [0] * (window - len(right))
        wrong = [(token + 1) % self.vocabulary for token in right]
        tokens = {"right": right, "wrong": wrong}.get(self.kind)
        if self.kind == "random":
            tokens = self.generator.integers(0, self.vocabulary, window).tolist()
        elif self.kind == "mixed":
            cut = int(self.generator.integers(0, window + 1))
            tokens = right[:cut] + wrong[cut:]
        elif self.kind == "ragged":
            tokens = right[: int(self.generator.integers(0, window + 1))]
        assert tokens is not None
        return Draft(self.name, tuple(tokens), tuple(0.9 ** (i + 1) for i in range(len(tokens))))


@contextmanager
def speculating(model: Model, drafters: Sequence[object], **settings):
    """`model` with these drafters and settings; afterwards as before."""
    before = model._engines
    speculation = Speculation(**{"adaptive": False, "confidence_thresh": 0.0, **settings})
    costs = {str(width): 1.0 for width in (1, 2, 4, 8, 16)}
    speculator = Speculator(speculation, drafters, costs, before.decoder.min_width, History(0))
    model._engines = replace(before, speculator=speculator)
    try:
        yield speculator
    finally:
        model._engines = before
