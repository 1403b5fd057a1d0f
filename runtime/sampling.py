"""From logits to a token: penalties, temperature, top-k, top-p, and a random number keyed by request and position."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..engines.errors import RequestError

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the defaults are greedy. The order of steps is that of transformers' `generate`.

    `temperature` 0 takes the likeliest token. `top_k` 0 and `top_p` 1 keep everything. `repetition_penalty` above 1
    makes tokens of prompt and answer less likely. `seed` fixes the random stream; None draws one for each request.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        temperature, penalty = self.temperature, self.repetition_penalty
        _require(math.isfinite(temperature) and temperature >= 0, "temperature", temperature, "0 or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(math.isfinite(penalty) and penalty > 0, "repetition_penalty", penalty, "above 0; 1 is off")
        _require(self.seed is None or 0 <= self.seed < 2**64, "seed", self.seed, "0 to 2^64 − 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def choose(logits: Logits, sampling: Sampling, seen: NDArray[np.bool_], seed: int, position: int) -> int:
    """The next token for one row.

    `logits` float32 [vocabulary], not modified; `seen` bool [vocabulary], tokens of prompt and answer; `seed` and
    `position` (tokens before this one in the answer) key the random number, so that the choice depends on nothing else.
    """
    if sampling.repetition_penalty != 1:
        logits = penalise(logits, seen, sampling.repetition_penalty)
    if sampling.greedy:
        return int(logits.argmax())
    tokens, probabilities = distribution(logits, sampling)
    cumulative = probabilities.cumsum()
    drawn = uniform(seed, position) * cumulative[-1]
    return int(tokens[min(int(cumulative.searchsorted(drawn, side="right")), len(tokens) - 1)])


def distribution(logits: Logits, sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Kept tokens, likeliest first (ties by id), and their probabilities, which sum to 1."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = _largest(scaled, sampling.top_k) if sampling.top_k else np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[order] - scaled[order[0]])
    weights /= weights.sum()
    if sampling.top_p < 1:
        keep = int(weights.cumsum().searchsorted(sampling.top_p)) + 1
        order, weights = order[:keep], weights[:keep]
        weights /= weights.sum()
    return order, weights


def penalise(logits: Logits, seen: NDArray[np.bool_], penalty: float) -> Logits:
    """Divide positive and multiply negative logits of `seen` tokens by `penalty` (CTRL, arXiv 1909.05858)."""
    adjusted = np.where(logits > 0, logits / np.float32(penalty), logits * np.float32(penalty))
    return np.where(seen, adjusted, logits)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone: Philox, a counter-based generator."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    threshold = np.partition(values, -count)[-count]
    kept = np.flatnonzero(values >= threshold)
    return kept[np.argsort(-values[kept], kind="stable")]


def _require(fits: bool, field: str, value: object, allowed: str) -> None:
    if not fits:
        raise RequestError(f"{field}: found {value}; allowed: {allowed}")
