"""Which tokens a verified round emits: pure functions of branches, logits and the random stream."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..sampling import Logits, Sampling, choose

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Acceptance:
    """`tokens`: what the round emits, the last one not drafted; `branch`: a branch that holds all but that one.

    `approximated` counts the tokens that are not the model's own choice.
    """

    branch: int
    tokens: tuple[int, ...]
    approximated: int = 0

    @property
    def accepted(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Chooser:
    """All that decides a token beside its logits: sampling, tokens seen, and the (seed, position) of the stream.

    `seen` bool [vocabulary]; `position` is that of the round's first token in the answer.
    """

    sampling: Sampling
    seen: NDArray[np.bool_]
    seed: int
    position: int

    @property
    def independent(self) -> bool:
        """Whether every choice is the best token of its logits, whatever came before."""
        return self.sampling.greedy and self.sampling.repetition_penalty == 1

    def choose(self, logits: Logits, before: Sequence[int]) -> int:
        """The token after `before`, the tokens that this round has emitted already."""
        seen = self.seen
        if before and self.sampling.repetition_penalty != 1:
            seen = seen.copy()
            seen[list(before)] = True
        return choose(logits, self.sampling, seen, self.seed, self.position + len(before))


@dataclass(frozen=True)
class Tolerance:
    """Approximate acceptance: `found` and `foreseen` hidden states of each branch, float32 [length, hidden]; a drafted
    token passes when their relative L2 deviation is at most `most`."""

    most: float
    found: Sequence[Floats]
    foreseen: Sequence[Floats]

    def passes(self, branch: int, depth: int) -> bool:
        if depth >= len(self.foreseen[branch]):
            return False
        return deviation(self.foreseen[branch][depth], self.found[branch][depth]) <= self.most


def accept(
    branches: Sequence[Sequence[int]],
    logits: Sequence[Logits],
    chooser: Chooser,
    tolerance: Tolerance | None = None,
) -> Acceptance:
    """Walk down the branches by the model's own choices; the first choice that no branch holds ends the round.

    `branches`: one at least, perhaps empty; `logits[b]` float32 [len(branches[b]) + 1, vocabulary]. With one random
    number per position the emitted text is the one of plain decoding, whatever was drafted.
    """
    alive = list(range(len(branches)))
    tokens: list[int] = []
    best = [rows.argmax(-1).tolist() for rows in logits] if chooser.independent else None
    approximated = 0
    while True:
        depth = len(tokens)
        token = best[alive[0]][depth] if best else chooser.choose(logits[alive[0]][depth], tokens)
        heirs = [b for b in alive if depth < len(branches[b]) and branches[b][depth] == token]
        if not heirs and tolerance is not None:
            heirs = [b for b in alive if depth < len(branches[b]) and tolerance.passes(b, depth)][:1]
            if heirs:
                token = branches[heirs[0]][depth]
                approximated += 1
        tokens.append(token)
        if not heirs:
            return Acceptance(alive[0], tuple(tokens), approximated)
        alive = heirs


def accept_sampled(
    draft: Sequence[int], proposed: NDArray[np.float64], wanted: NDArray[np.float64], uniforms: NDArray[np.float64]
) -> tuple[int, ...]:
    """Tokens of a round whose draft was sampled: min(1, p / q), then the residual (arXiv 2211.17192, 2302.01318).

    `draft[i]` was drawn from `proposed[i]`; `proposed` [w, vocabulary] and `wanted` [w + 1, vocabulary] are
    distributions; `uniforms` [w + 1, 2] in [0, 1). The emitted tokens are distributed as `wanted` says.
    """
    tokens: list[int] = []
    for depth, token in enumerate(draft):
        p, q = wanted[depth], proposed[depth]
        if uniforms[depth, 0] * q[token] < p[token]:
            tokens.append(token)
            continue
        residual = np.maximum(p - q, 0)
        return (*tokens, _draw(residual, uniforms[depth, 1]))
    return (*tokens, _draw(wanted[len(draft)], uniforms[len(draft), 1]))


def deviation(foreseen: Floats, found: Floats) -> float:
    """Relative L2 distance of a foreseen hidden state from the real one."""
    return float(np.linalg.norm(foreseen - found) / max(float(np.linalg.norm(found)), 1e-12))


def _draw(weights: NDArray[np.float64], uniform: float) -> int:
    cumulative = weights.cumsum()
    return min(int(cumulative.searchsorted(uniform * cumulative[-1], side="right")), len(weights) - 1)
