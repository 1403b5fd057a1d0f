"""What speculation did for a request, and for all requests of a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .drafter import Draft
from .prefix import agreement


@dataclass
class DrafterStatistics:
    """Of one drafter: rounds in which it was asked, drafts and tokens that were verified, tokens accepted, and drafts
    whose first token was right."""

    asked: int = 0
    issued: int = 0
    drafted: int = 0
    accepted: int = 0
    first: int = 0

    def add(self, other: "DrafterStatistics") -> None:
        for name in vars(other):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class SpeculationStatistics:
    """Counts and seconds of rounds.

    `rounds`: passes of the model after the prefill, `plain` those without a draft. `drafted`, `accepted`: tokens of the
    drafts verified (with several branches, the best one's). `emitted`: tokens of all rounds, the bonus token counted.
    `rollbacks`: rounds that rejected something. `fallbacks`: times that a request went back to plain decoding.
    `approximated`: tokens that plain decoding would not have chosen there (approximate mode alone).
    `issued_at`, `accepted_at`: drafted and accepted tokens by position in the draft. `plain_seconds`: what the emitted
    tokens would have taken at the measured cost of plain steps; `seconds`: what the rounds took, by stage (`draft`,
    `verify`, `commit`). `foreseen_plain_seconds`, `foreseen_seconds`: both as the policy expected them when it had the
    drafts.
    """

    rounds: int = 0
    plain: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    rollbacks: int = 0
    fallbacks: int = 0
    approximated: int = 0
    issued_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    drafters: dict[str, DrafterStatistics] = field(default_factory=dict)
    plain_seconds: float = 0.0
    foreseen_plain_seconds: float = 0.0
    foreseen_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_round(self) -> float:
        """Tokens emitted per pass of the model; plain decoding gives 1."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def coverage(self) -> float:
        """Share of the rounds that had a draft."""
        return 1 - self.plain / self.rounds if self.rounds else 0.0

    @property
    def precision(self) -> float:
        """Share of the drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def first_acceptance(self) -> float:
        """Share of the drafts whose first token was right."""
        return self.accepted_at[0] / self.issued_at[0] if self.issued_at else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted over issued drafted tokens, by position in the draft."""
        return [hit / issued for hit, issued in zip(self.accepted_at, self.issued_at, strict=True)]

    @property
    def observed_speedup(self) -> float:
        """Estimated time of plain decoding over the time taken; 0 where nothing was measured."""
        taken = sum(self.seconds.values())
        return self.plain_seconds / taken if taken else 0.0

    @property
    def predicted_speedup(self) -> float:
        """The same ratio as the policy foresaw it."""
        return self.foreseen_plain_seconds / self.foreseen_seconds if self.foreseen_seconds else 0.0

    def drafter(self, name: str) -> DrafterStatistics:
        return self.drafters.setdefault(name, DrafterStatistics())

    def count_round(self, branches: Sequence[Draft], tokens: Sequence[int]) -> None:
        """A round verified `branches`, one at least (empty: a plain step), and emitted `tokens`."""
        self.rounds += 1
        self.emitted += len(tokens)
        right = [agreement(branch.tokens, tokens) for branch in branches]
        best = max(range(len(branches)), key=right.__getitem__)
        self.plain += not branches[best].tokens
        self._count_draft(len(branches[best].tokens), right[best])
        for branch, accepted in zip(branches, right, strict=True):
            if branch.tokens:
                counts = self.drafter(branch.drafter)
                counts.issued += 1
                counts.drafted += len(branch.tokens)
                counts.accepted += accepted
                counts.first += accepted > 0

    def _count_draft(self, length: int, accepted: int) -> None:
        self.drafted += length
        self.accepted += accepted
        self.rollbacks += accepted < length
        missing = max(length - len(self.issued_at), 0)
        self.issued_at += [0] * missing
        self.accepted_at += [0] * missing
        for index in range(length):
            self.issued_at[index] += 1
            self.accepted_at[index] += index < accepted

    def count_time(self, draft: float, verify: float, commit: float) -> None:
        """A round took so many seconds."""
        for stage, seconds in (("draft", draft), ("verify", verify), ("commit", commit)):
            self._time(stage, seconds)

    def _time(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def add(self, other: "SpeculationStatistics") -> None:
        """Add another request's."""
        for name, value in vars(other).items():
            if isinstance(value, int | float):
                setattr(self, name, getattr(self, name) + value)
        for mine, theirs in ((self.issued_at, other.issued_at), (self.accepted_at, other.accepted_at)):
            mine += [0] * (len(theirs) - len(mine))
            for index, count in enumerate(theirs):
                mine[index] += count
        for name, counts in other.drafters.items():
            self.drafter(name).add(counts)
        for stage, seconds in other.seconds.items():
            self._time(stage, seconds)
