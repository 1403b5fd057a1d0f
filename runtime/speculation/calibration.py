"""From a drafter's claimed confidence to what became of such claims."""

from collections.abc import Sequence

BINS = 10
PRIOR = 8.0
MEMORY = 2000.0


class Calibration:
    """Observed acceptance of drafted tokens by their claimed conditional confidence, in `BINS` bins.

    A token is a trial only when all tokens before it were accepted, so full acceptance, which hides how long the draft
    could have been, needs no correction. A claim counts as `PRIOR` trials; old trials fade after about `MEMORY`.
    """

    def __init__(self) -> None:
        self._trials = [0.0] * BINS
        self._hits = [0.0] * BINS

    def cumulative(self, confidences: Sequence[float]) -> list[float]:
        """Estimated probability that all tokens up to each one are accepted."""
        estimates, product, before = [], 1.0, 1.0
        for confidence in confidences:
            claim = confidence / before if before else 0.0
            before = confidence
            at = _bin(claim)
            product *= (self._hits[at] + PRIOR * claim) / (self._trials[at] + PRIOR)
            estimates.append(product)
        return estimates

    def learn(self, confidences: Sequence[float], hits: int, trials: int) -> None:
        """Of the first `trials` tokens of a draft the first `hits` were right."""
        before = 1.0
        for index in range(trials):
            claim = confidences[index] / before if before else 0.0
            before = confidences[index]
            at = _bin(claim)
            fade = 1 - 1 / MEMORY
            self._trials[at] = self._trials[at] * fade + 1
            self._hits[at] = self._hits[at] * fade + (index < hits)


def _bin(claim: float) -> int:
    return min(int(claim * BINS), BINS - 1)
