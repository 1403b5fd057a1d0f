"""The drafter that needs no training: what followed the same words before, in this request or in past answers."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..processing.prompt import Prompt
from . import suffix_tree
from .drafter import Draft, DraftState, Floats
from .suffix_tree import SuffixTree

NAME = "lookup"
CONTEXT = 16


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
                self.tree.sequence().extend(tokens)
                return
            # Half is kept, so that the tree is rebuilt once in half a budget of tokens.
            kept = sum(map(len, self._answers))
            while kept > self.budget // 2 and len(self._answers) > 1:
                kept -= len(self._answers.popleft())
            tree = SuffixTree()
            for answer in self._answers:
                tree.sequence().extend(answer)
            self.tree = tree


@dataclass
class LookupState:
    """A request's text, prompt and answer, as a sequence in a tree of its own; `context` is what past answers are
    asked with."""

    own: suffix_tree.Sequence
    tree: SuffixTree
    context: list[int]
    begun: bool = False

    def commit(self, tokens: Sequence[int], hidden: Floats) -> None:
        self.own.extend(tokens)
        self.context.extend(tokens)
        self.begun = True


def context_of(prompt: Prompt) -> list[int]:
    """The last text tokens of a prompt, which tell what kind of answer follows."""
    text: list[int] = prompt.token_ids[prompt.feature_index < 0][-CONTEXT:].tolist()
    return text


class LookupDrafter:
    """Continues the longest ends of the text that occurred before; the likeliest of the continuations is the draft."""

    name = NAME

    def __init__(self, history: History, shortest: int = 1, candidates: int = 3) -> None:
        self.history, self._shortest, self._candidates = history, shortest, candidates

    def open(self, prompt: Prompt, features: Floats | None) -> LookupState:
        tree = SuffixTree()
        own = tree.sequence()
        own.extend(prompt.token_ids[prompt.feature_index < 0].tolist())
        return LookupState(own, tree, context_of(prompt))

    def propose(self, states: Sequence[DraftState], windows: Sequence[int], confidence: float) -> list[Draft]:
        drafts = []
        for state, window in zip(states, windows, strict=True):
            assert isinstance(state, LookupState)
            drafts.append(self._propose(state, window, confidence) if window and state.begun else Draft(NAME))
        return drafts

    def _propose(self, state: LookupState, window: int, confidence: float) -> Draft:
        past = self.history.tree
        found = [(length, past, node) for length, node in past.matches(state.context)[: self._candidates]]
        found += [(length, state.tree, node) for length, node in state.own.matches()[: self._candidates]]
        best = Draft(NAME)
        for length, tree, node in found:
            if length < self._shortest:
                continue
            tokens, shares = tree.follow(node, window)
            confidences, cumulative = [], 1.0
            for depth, share in enumerate(shares):
                cumulative *= share ** (1 / (length + depth))
                if cumulative < confidence:
                    break
                confidences.append(cumulative)
            if sum(confidences) > sum(best.confidences):
                best = Draft(NAME, tuple(tokens[: len(confidences)]), tuple(confidences))
        return best
