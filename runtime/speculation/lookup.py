"""The drafter that needs no training: what followed the same words before, in this request or in past answers."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..processing.prompt import Prompt
from . import suffix_tree
from .drafter import Draft, DraftState, Floats
from .suffix_tree import Cursor, SuffixTree

NAME = "lookup"
CONTEXT = 8


class History:
    """Past answers of one model, each after the end of its prompt, in a suffix tree of at most `budget` tokens.

    The oldest are forgotten.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tree = SuffixTree()
        self._answers: deque[tuple[int, ...]] = deque()
        self._lock = threading.Lock()

    def add(self, tokens: Sequence[int]) -> None:
        """Remember an answer."""
        if not 0 < len(tokens) <= self.budget:
            return
        with self._lock:
            self._answers.append(tuple(tokens))
            if self.tree.size + len(tokens) <= self.budget:
                self.tree.add(tokens)
                return
            # Half is kept, so that the tree is rebuilt once in half a budget of tokens.
            kept = sum(map(len, self._answers))
            while kept > self.budget // 2 and len(self._answers) > 1:
                kept -= len(self._answers.popleft())
            tree = SuffixTree()
            for answer in self._answers:
                tree.add(answer)
            self.tree = tree


@dataclass
class LookupState:
    """A request's text, prompt and answer, in a tree of its own, and its place in the tree of past answers."""

    own: suffix_tree.Sequence
    past: Cursor
    context: list[int]
    begun: bool = False

    def commit(self, tokens: Sequence[int], hidden: Floats) -> None:
        self.own.extend(tokens)
        self.past.extend(tokens)
        self.context.extend(tokens)
        self.begun = True

    def close(self) -> None:
        """The tree goes with the state."""


def context_of(prompt: Prompt) -> list[int]:
    """The last text tokens of a prompt, which tell what kind of answer follows."""
    text: list[int] = prompt.token_ids[prompt.feature_index < 0][-CONTEXT:].tolist()
    return text


class LookupDrafter:
    """Continues the longest ends of the text that occurred before; the likeliest of the continuations is the draft."""

    name = NAME

    def __init__(self, history: History, candidates: int = 2) -> None:
        self.history, self._candidates = history, candidates

    def open(self, prompt: Prompt, features: Floats | None) -> LookupState:
        own = suffix_tree.Sequence(SuffixTree())
        own.extend(prompt.token_ids[prompt.feature_index < 0].tolist())
        context = context_of(prompt)
        return LookupState(own, Cursor(self.history.tree, context), context)

    def propose(self, states: Sequence[DraftState], windows: Sequence[int], confidence: float) -> list[Draft]:
        drafts = []
        for state, window in zip(states, windows, strict=True):
            assert isinstance(state, LookupState)
            drafts.append(self._propose(state, window) if window and state.begun else Draft(NAME))
        return drafts

    def _propose(self, state: LookupState, window: int) -> Draft:
        if state.past.tree is not self.history.tree:
            state.past = Cursor(self.history.tree, state.context)
        best = Draft(NAME)
        for place in (state.past, state.own):
            for length, node in place.matches(self._candidates):
                tokens, shares = place.tree.follow(node, window)
                confidences, cumulative = [], 1.0
                for known, share in enumerate(shares, length):
                    # A continuation is the surer, the longer the text that it continues.
                    cumulative *= share * known / (known + 1)
                    confidences.append(cumulative)
                if sum(confidences) > sum(best.confidences):
                    best = Draft(NAME, tuple(tokens), tuple(confidences))
        return best
