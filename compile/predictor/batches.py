"""Batches of a training: some answers, all their places, and what should be drafted from each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from .frozen import Frozen
from .settings import Form
from .traces import Traces


@dataclass(frozen=True)
class Goal:
    """What step i of the window should give at each place.

    exists   bool [places], whether the answer goes on that far
    token    int64 [places], its row in the slice, −1 outside
    full     int64 [places], its full id
    best, odds   int64, float32 [places, 20]: rows of the target's best tokens (−1 outside the slice), their logits
    hidden   float32 [places, hidden], the target's hidden state
    plan     float32 [places, 3], labels of the work plan but for the last, which the drafts themselves give
    final    bool [places], whether the token is the answer's last
    """

    exists: Tensor
    token: Tensor
    full: Tensor
    best: Tensor
    odds: Tensor
    hidden: Tensor
    plan: Tensor
    final: Tensor

    def take(self, rows: Tensor) -> "Goal":
        """The same of some places."""
        return Goal(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True)
class Batch:
    """Places of some answers: `hidden` [places, hidden] and `token` [places] of each; `request` [places] says whose
    `features` [requests, features, hidden] belong to it, of which the first `lengths` [requests] are real."""

    hidden: Tensor
    token: Tensor
    request: Tensor
    features: Tensor
    lengths: Tensor
    goals: tuple[Goal, ...]


class Batches:
    """Traces as tensors."""

    def __init__(self, traces: Traces, frozen: Frozen, window: int, form: Form) -> None:
        self.traces, self.frozen, self.window, self.form = traces, frozen, window, form
        inside = frozen.rows.clone()
        inside[inside == len(frozen.ids)] = -1
        self._inside = inside

    def epoch(self, split: str, size: int, seed: int | None = None) -> Iterator[Batch]:
        """Every answer of a split once, `size` answers a batch; shuffled when there is a seed."""
        numbers = np.array(self.traces.of(split))
        if seed is not None:
            np.random.default_rng(seed).shuffle(numbers)
        for start in range(0, len(numbers), size):
            yield self.make([int(number) for number in numbers[start : start + size]])

    def steps(self, split: str, size: int) -> int:
        """Batches of an epoch."""
        return -(-len(self.traces.of(split)) // size)

    def make(self, numbers: Sequence[int]) -> Batch:
        """The batch of these requests."""
        spans = [self.traces.span(number) for number in numbers]
        places = np.concatenate([np.arange(span.start, span.stop - 1) for span in spans])
        ends = np.concatenate([np.full(span.stop - span.start - 1, span.stop) for span in spans])
        request = np.concatenate([np.full(span.stop - span.start - 1, row) for row, span in enumerate(spans)])
        features, lengths = self._features(numbers)
        token = self.traces.tokens[places]
        if self.form == "document":
            token = self.traces.first[numbers][request]
        return Batch(
            hidden=torch.from_numpy(self.traces.hidden[places]).float(),
            token=torch.from_numpy(token).long(),
            request=torch.from_numpy(request),
            features=features,
            lengths=lengths,
            goals=tuple(self._goal(places + ahead, ends) for ahead in range(1, self.window + 1)),
        )

    def _features(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        spans = [self.traces.feature_span(number) for number in numbers]
        longest = max(1, *(span.stop - span.start for span in spans))
        features = torch.zeros(len(spans), longest, self.frozen.hidden)
        for row, span in enumerate(spans):
            features[row, : span.stop - span.start] = torch.from_numpy(self.traces.features[span]).float()
        return features, torch.tensor([span.stop - span.start for span in spans])

    def _goal(self, places: np.ndarray, ends: np.ndarray) -> Goal:
        exists = places < ends
        at = np.minimum(places, ends - 1)
        full = torch.from_numpy(self.traces.tokens[at]).long()
        ahead = np.minimum(at[:, None] + np.arange(self.window), ends[:, None] - 1)
        plan = [self.traces.copied[at], self.traces.visual[ahead].any(1), self.traces.visual[at]]
        return Goal(
            exists=torch.from_numpy(exists),
            token=self._inside[full],
            full=full,
            best=self._inside[torch.from_numpy(self.traces.best[at]).long()],
            odds=torch.from_numpy(self.traces.logits[at]).float(),
            hidden=torch.from_numpy(self.traces.hidden[at]).float(),
            plan=torch.from_numpy(np.stack(plan, 1)).float(),
            final=torch.from_numpy(at == ends - 1),
        )
