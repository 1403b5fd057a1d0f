"""How wide the next round is: the window and the branches that give the most tokens per second."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .drafter import Draft
from .prefix import agreement

Seconds = Callable[[int, int], float]
"""Seconds of a pass over so many rows of so many tokens."""


@dataclass(frozen=True)
class Candidate:
    """A draft and the estimated probability that all its tokens up to each one are accepted."""

    draft: Draft
    chances: tuple[float, ...]

    def cut(self, confidence: float) -> "Candidate":
        """Without the tokens from the first on whose chance is below `confidence`."""
        length = next((i for i, chance in enumerate(self.chances) if chance < confidence), len(self.chances))
        return Candidate(self.draft.cut(length), self.chances[:length])

    def gain(self, window: int, start: int = 0) -> float:
        """Expected accepted tokens among those from `start` up to `window`."""
        return sum(self.chances[start:window])


@dataclass(frozen=True)
class Plan:
    """One round: the branches of each request (none: a plain step), the tokens that it should emit for all of them,
    and the seconds that its pass should take; `drafting`: seconds that each drafter took for it."""

    branches: tuple[tuple[Draft, ...], ...]
    expected: float
    seconds: float
    drafting: Mapping[str, float] = field(default_factory=dict)


def plan_round(candidates: Sequence[Sequence[Candidate]], seconds: Seconds, max_parallel: int, adaptive: bool) -> Plan:
    """Choose window and branches for requests that are verified together.

    With `adaptive`, the window maximises expected tokens per second, each request with its best draft; then further
    drafts become branches, the most promising first, as long as the rate rises. Without, every draft is verified whole.
    """
    rows = len(candidates)
    longest = max((len(c.draft.tokens) for row in candidates for c in row), default=0)
    windows = range(longest + 1) if adaptive else (longest,)
    window = max(windows, key=lambda w: (rows + _best_gain(candidates, w)) / seconds(rows, w + 1))
    chosen = [[_best(row, window)] if row and window else [] for row in candidates]
    expected = rows + _best_gain(candidates, window)
    best = expected / seconds(rows, window + 1)
    total = rows
    for gain, row, candidate in _others(candidates, chosen, window) if max_parallel > 1 and window else ():
        rate = (expected + gain) / seconds(total + 1, window + 1)
        if len(chosen[row]) < max_parallel and (rate > best or not adaptive):
            chosen[row].append(candidate)
            expected, best, total = expected + gain, rate, total + 1
    branches = tuple(tuple(c.draft.cut(window) for c in row if c.draft.tokens) for row in chosen)
    return Plan(branches, expected, seconds(total, window + 1))


def _best(row: Sequence[Candidate], window: int) -> Candidate:
    return max(row, key=lambda candidate: candidate.gain(window))


def _best_gain(candidates: Sequence[Sequence[Candidate]], window: int) -> float:
    return sum(max((c.gain(window) for c in row), default=0.0) for row in candidates)


def _others(
    candidates: Sequence[Sequence[Candidate]], chosen: Sequence[Sequence[Candidate]], window: int
) -> list[tuple[float, int, Candidate]]:
    """Drafts that differ from the chosen one: what each adds, its request, and itself; the best first."""
    found = []
    for number, row in enumerate(candidates):
        for candidate in row:
            tokens = candidate.draft.tokens[:window]
            shared = max((agreement(tokens, c.draft.tokens[:window]) for c in chosen[number]), default=0)
            if shared < len(tokens):
                found.append((candidate.gain(window, shared), number, candidate))
    return sorted(found, key=lambda item: -item[0])
