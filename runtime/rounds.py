"""The decode loop: draft, verify all drafts in one pass, accept, commit or roll back; until every row has ended."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .cache import Cache, Output
from .prefix import Content
from .row import Row
from .speculation.acceptance import Acceptance, Tolerance, accept
from .speculation.branches import BranchRows
from .speculation.drafter import Draft
from .speculation.journal import Accept, FallBack, Journal, Propose, Rewind, Verify
from .speculation.policy import Plan
from .speculation.prefix import agreement
from .speculation.speculator import RequestSpeculation, Speculator

NO_DRAFT = Draft("none")


@dataclass(frozen=True)
class Branch:
    """A draft in a row of the pass."""

    row: int
    draft: Draft


@dataclass(frozen=True)
class Clock:
    """Rows and width of a round's pass, and the seconds of its stages."""

    rows: int
    width: int
    draft: float
    verify: float
    commit: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.commit


class Rounds:
    """Rounds over `active` rows, which lie in the first rows of `cache`; it has room for windows of `window` tokens."""

    def __init__(self, cache: Cache, active: list[Row], speculator: Speculator, journal: Journal, window: int) -> None:
        self._cache, self._active, self._speculator, self._journal = cache, active, speculator, journal
        self._window, self._branches = window, len(cache.lengths) // len(active)
        self._copies = BranchRows(cache)
        self._number = 0
        self._left: dict[int, tuple[Row, int]] = {}

    def run(self) -> Iterator[tuple[Row, str]]:
        """Yields (row, text) for every row after every round. A failure leaves the journal in the settings' folder."""
        try:
            while self._drop_finished():
                yield from self._round()
        except Exception as fault:
            self._dump(fault)
            raise

    def held(self) -> dict[int, Content]:
        """What stands in the cache's rows: of requests that ended and whose rows were not used again, and of those that
        go on."""
        now = {slot: (row, self._cache.lengths[slot]) for slot, row in enumerate(self._active)}
        return {slot: row.content_in(length) for slot, (row, length) in {**self._left, **now}.items()}

    def _round(self) -> list[tuple[Row, str]]:
        active = self._active
        began = time.perf_counter()
        requests = [row.speculation for row in active]
        speculating = any(request is not None for request in requests)
        plan = self._plan(requests) if speculating else Plan(((),) * len(active), len(active), 0.0)
        drafted = time.perf_counter()
        branches = self._lay_out(plan)
        before = self._cache.lengths[: len(active)]
        ahead = self._speculator.draft_ahead(requests, [[branch.draft for branch in own] for own in branches])
        output, rows, width = self._verify(branches)
        if ahead is not None:
            ahead.wait()
        verified = time.perf_counter()
        pieces, emitted, winners = [], [], []
        for slot, row in enumerate(active):
            acceptance = _accept(row, branches[slot], output, self._speculator)
            taken = row.commit(acceptance.tokens, output.hidden[branches[slot][acceptance.branch].row])
            self._settle(slot, before[slot], branches[slot], acceptance, taken.tokens)
            if row.speculation is not None:
                row.speculation.ahead = ahead.next(slot, taken.tokens) if ahead is not None else None
            pieces.append((row, taken.text))
            emitted.append(len(taken.tokens))
            winners.append((branches[slot][acceptance.branch].draft.drafter, len(taken.tokens) - 1))
        clock = Clock(rows, width, drafted - began, verified - drafted, time.perf_counter() - verified)
        for row in active:
            row.stats.add("decode", clock.total)
        if speculating:
            self._speculator.appraise(plan, winners, clock.verify)
            self._learn(plan, clock, emitted)
        self._number += 1
        return pieces

    def _plan(self, requests: Sequence[RequestSpeculation | None]) -> Plan:
        active = self._active
        room, done = [row.room for row in active], [len(row.tokens) for row in active]
        window = min(self._window, self._cache.widest(len(active)) - 1)
        return self._speculator.plan(requests, room, done, window, self._branches)

    def _lay_out(self, plan: Plan) -> list[list[Branch]]:
        """Give every branch a row: the first its request's own, further ones copies behind the active rows."""
        laid, free = [], len(self._active)
        for slot, (row, drafts) in enumerate(zip(self._active, plan.branches, strict=True)):
            branches: list[Branch] = []
            for draft in drafts or (NO_DRAFT,):
                place = slot
                if branches:
                    place, free = free, free + 1
                    self._left.pop(place, None)
                    self._copies.lend(place, slot, row.number)
                if draft.tokens:
                    event = Propose(
                        self._number, row.number, len(row.tokens), draft.drafter, draft.tokens, draft.confidences
                    )
                    self._journal.add(event)
                branches.append(Branch(place, draft))
            laid.append(branches)
        return laid

    def _verify(self, branches: Sequence[Sequence[Branch]]) -> tuple[Output, int, int]:
        """One pass over all branches; gives its output [rows, width, …], its rows and its width."""
        tokens: list[list[int]] = [[] for own in branches for _ in own]
        starts = [0] * len(tokens)
        for row, own in zip(self._active, branches, strict=True):
            for branch in own:
                tokens[branch.row] = [row.tokens[-1], *branch.draft.tokens]
                starts[branch.row] = row.position
        width = max(map(len, tokens))
        output = self._cache.advance(tokens, starts, every=width > 1)
        self._journal.add(Verify(self._number, len(tokens), width))
        if width == 1:
            output = Output(output.logits[:, None], output.hidden[:, None])
        return output, len(tokens), width

    def _settle(
        self, slot: int, before: int, branches: Sequence[Branch], acceptance: Acceptance, tokens: Sequence[int]
    ) -> None:
        """Keep in the cache what was committed: `tokens`, of which the last is not in it yet."""
        cache, row = self._cache, self._active[slot]
        length = before + len(tokens)
        winner = branches[acceptance.branch].row
        if winner != slot:
            cache.copy(winner, slot, before, length)
        for branch in branches[1:]:
            right = agreement(branch.draft.tokens, tokens)
            self._copies.keep(branch.row, min(before + 1 + right, length))
        if cache.lengths[slot] != length:
            self._journal.add(Rewind(self._number, row.number, length))
        cache.rewind(slot, length)
        self._journal.add(Accept(self._number, row.number, acceptance.branch, acceptance.accepted, tuple(tokens)))
        if row.speculation is not None:
            row.speculation.statistics.approximated += acceptance.approximated
            row.speculation.statistics.count_round([branch.draft for branch in branches], tokens)

    def _learn(self, plan: Plan, clock: Clock, emitted: Sequence[int]) -> None:
        """Account for a round; requests for which drafting lost time fall back. Rows of a batch share its time."""
        costs, rows = self._speculator.costs, len(self._active)
        costs.observe(clock.rows, clock.width, clock.verify)
        plain = costs.seconds(rows, 1)
        for row, count in zip(self._active, emitted, strict=True):
            request = row.speculation
            if request is None:
                continue
            request.statistics.count_time(clock.draft / rows, clock.verify / rows, clock.commit / rows)
            plainly = count * plain + clock.commit
            request.statistics.plain_seconds += plainly / rows
            request.statistics.foreseen_plain_seconds += (plan.expected / rows * plain + clock.commit) / rows
            request.statistics.foreseen_seconds += (clock.draft + plan.seconds + clock.commit) / rows
            for name in plan.drafting if request.asked else ():
                request.statistics.drafter(name).asked += 1
            self._speculator.learn(request, row.tokens[-count:])
            request.pause = max(request.pause - count, 0)
            if request.asked and (pause := request.judge(clock.total, plainly)):
                request.statistics.fallbacks += 1
                self._journal.add(FallBack(self._number, row.number, pause))

    def _drop_finished(self) -> bool:
        """Fill the rows of finished requests with the last ones, so that a pass runs unfinished ones alone."""
        active = self._active
        for slot in reversed(range(len(active))):
            if active[slot].finish is not None:
                self._left[slot] = active[slot], self._cache.lengths[slot]
                if (done := active[slot].speculation) is not None:
                    self._speculator.close(done, active[slot].tokens)
                last = active.pop()
                self._copies.forget(len(active))
                if slot < len(active):
                    active[slot] = last
                    self._left.pop(slot)
                    self._cache.copy(len(active), slot, 0, self._cache.lengths[len(active)])
        return bool(active)

    def _dump(self, fault: Exception) -> None:
        if folder := self._speculator.settings.journal:
            path = Path(folder) / f"journal-{time.strftime('%Y%m%d-%H%M%S')}-{id(self):x}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._journal.dumps())
            fault.add_note(f"the rounds' journal is in {path}")


def _accept(row: Row, branches: Sequence[Branch], output: Output, speculator: Speculator) -> Acceptance:
    tolerance = None
    if speculator.settings.mode == "approximate":
        found = [output.hidden[branch.row] for branch in branches]
        tolerance = Tolerance(speculator.settings.fallback_thresh, found, [branch.draft.hidden for branch in branches])
    return accept(
        [branch.draft.tokens for branch in branches],
        [output.logits[branch.row] for branch in branches],
        row.chooser(),
        tolerance,
    )
