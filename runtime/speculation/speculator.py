"""Speculation of one model (drafters, costs, calibrations, totals) and of one request (states, fall-back)."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...engines.schema import decode, encode
from ..processing.prompt import Prompt
from .ahead import Ahead
from .calibration import Calibration
from .costs import Average, Costs
from .drafter import Draft, Drafter, DraftState, Floats
from .lookup import History, context_of
from .policy import Candidate, Plan, plan_round
from .prefix import agreement
from .settings import Speculation
from .statistics import SpeculationStatistics
from .worth import Worth

PATIENCE = 12
FADE = 0.95
LOSS = 1.02
PAUSE, LONGEST_PAUSE = 16, 256


@dataclass
class RequestSpeculation:
    """What speculation remembers of one request.

    `candidates`: what was drafted for the round at hand, `asked` whether a draft was wanted; `ahead`: what was drafted
    for it while the last round was verified. `pause`: tokens still to be decoded plainly after a fall-back; `spent` and
    `plain`: fading sums of the seconds that drafting rounds took and that plain steps would have taken for the same
    tokens.
    """

    prompt: Prompt
    warmup: int
    states: dict[str, DraftState] = field(default_factory=dict)
    statistics: SpeculationStatistics = field(default_factory=SpeculationStatistics)
    candidates: tuple[Candidate, ...] = ()
    asked: bool = False
    ahead: Draft | None = None
    pause: int = 0
    next_pause: int = PAUSE
    drafting_rounds: int = 0
    spent: float = 0.0
    plain: float = 0.0
    over: bool = False

    def commit(self, tokens: Sequence[int], hidden: Floats) -> None:
        """Tell every drafter what was chosen."""
        for state in self.states.values():
            state.commit(tokens, hidden)

    def judge(self, seconds: float, plain_seconds: float) -> int:
        """After a drafting round: tokens to decode plainly, or 0 to go on. A second fall-back in a row lasts longer."""
        self.drafting_rounds += 1
        self.spent = self.spent * FADE + seconds
        self.plain = self.plain * FADE + plain_seconds
        if self.drafting_rounds < PATIENCE:
            return 0
        if self.spent <= LOSS * self.plain:
            self.next_pause = PAUSE
            return 0
        self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, LONGEST_PAUSE)
        self.drafting_rounds, self.spent, self.plain = 0, 0.0, 0.0
        return self.pause


class Speculator:
    """Shared by all requests of a model; what it learns of costs and acceptance steers speed, never text."""

    def __init__(
        self,
        settings: Speculation,
        drafters: Iterable[Drafter],
        costs: Mapping[str, float],
        min_width: int,
        history: History,
    ) -> None:
        self.settings = settings
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self.costs = Costs(costs, min_width)
        self.history = history
        self.totals = SpeculationStatistics()
        self._calibrations: dict[str, Calibration] = defaultdict(Calibration)
        self._worths: dict[str, Worth] = defaultdict(Worth)
        self._token_seconds: dict[str, Average] = defaultdict(Average)
        self._lock = threading.Lock()

    def configure(self, **changes: Any) -> None:
        """Change settings from the next round on. Raises ConfigError for an unknown name or a value not allowed."""
        self.settings = decode(Speculation, {**encode(self.settings), **changes}, "speculation")

    def open(self, prompt: Prompt, features: Floats | None) -> RequestSpeculation:
        """Begin a request."""
        warmup = self.settings.warmup(len(prompt.token_ids))
        states: dict[str, DraftState] = {}
        for name, drafter in self.drafters.items():
            if not self.settings.adaptive or self._worths[name].opens():
                began = time.perf_counter()
                state = drafter.open(prompt, features)
                if state is not None:
                    states[name] = state
                self._worths[name].learn(began - time.perf_counter())
        return RequestSpeculation(prompt, warmup, states)

    def plan(
        self,
        requests: Sequence[RequestSpeculation | None],
        room: Sequence[int],
        done: Sequence[int],
        window: int,
        branches: int,
    ) -> Plan:
        """Draft for all requests and choose the round, of at most `window` drafted tokens and `branches` branches.

        None is a request that does not speculate. `room`: tokens that each answer may still have; `done`: those it has.
        """
        settings, windows = self.settings, []
        for request, left, have in zip(requests, room, done, strict=True):
            live = settings.enabled and request is not None and not request.pause
            # The token after a draft comes for nothing, so a draft of all that is left would waste its last one.
            most = min(settings.window_size, window, left - 1) if live else 0
            windows.append(min(most, 1) if request is not None and have < request.warmup else most)
        found, drafting = self._draft(requests, windows)
        issued: list[list[Candidate]] = []
        any_warm = False
        for request, asked, have, candidates in zip(requests, windows, done, found, strict=True):
            warm = request is not None and have >= request.warmup
            any_warm = any_warm or warm
            if request is not None:
                request.candidates, request.asked = tuple(candidates), warm and asked > 0 and bool(drafting)
            cut = [candidate.cut(settings.confidence_thresh) for candidate in candidates]
            issued.append([candidate for candidate in cut if candidate.draft.tokens] if warm else [])
        plan = plan_round(issued, self.costs.seconds, min(settings.max_parallel, branches), settings.adaptive)
        return replace(plan, drafting=drafting if any_warm else {})

    def draft_ahead(
        self, requests: Sequence[RequestSpeculation | None], verified: Sequence[Sequence[Draft]]
    ) -> Ahead | None:
        """With `double_buffer`, let the first drafter go on behind the first branches while they are verified."""
        if not self.settings.double_buffer or not self.drafters:
            return None
        name, drafter = next(iter(self.drafters.items()))
        if not all(request is not None and name in request.states for request in requests):
            return None
        first = [branches[0] for branches in verified]
        if not any(draft.tokens and draft.drafter == name for draft in first):
            return None
        states = [request.states[name] for request in requests if request is not None]
        return Ahead(drafter, states, first, self.settings.window_size)

    def _draft(
        self, requests: Sequence[RequestSpeculation | None], windows: Sequence[int]
    ) -> tuple[list[list[Candidate]], dict[str, float]]:
        """What each drafter proposes for the requests with a window, with chances; and the seconds each one took."""
        found: list[list[Candidate]] = [[] for _ in requests]
        drafting: dict[str, float] = {}
        for place, (name, drafter) in enumerate(self.drafters.items() if any(windows) else ()):
            followed = [
                (number, request)
                for number, request in enumerate(requests)
                if request is not None and windows[number] and name in request.states
            ]
            if not followed or (self.settings.adaptive and not self._worths[name].due()):
                continue
            began = time.perf_counter()
            asked: list[tuple[int, DraftState]] = []
            drafts: list[tuple[int, Draft]] = []
            for number, request in followed:
                if place == 0 and request.ahead is not None:
                    drafts.append((number, request.ahead.cut(windows[number])))
                else:
                    asked.append((number, request.states[name]))
            if asked:
                wanted = [windows[number] for number, _ in asked]
                least = self._least_confidence(name, len(requests))
                proposed = drafter.propose([state for _, state in asked], wanted, least)
                drafts += zip([number for number, _ in asked], proposed, strict=True)
                longest = max(len(draft.tokens) for draft in proposed)
                self._token_seconds[name].add((time.perf_counter() - began) / (longest + 1))
            for number, draft in drafts:
                if draft.tokens:
                    chances = self._calibrations[draft.drafter].cumulative(draft.confidences)
                    found[number].append(Candidate(draft, tuple(chances)))
            drafting[name] = time.perf_counter() - began
        return found, drafting

    def _least_confidence(self, drafter: str, rows: int) -> float:
        """The confidence below which one more drafted token costs more than it is expected to save."""
        if not self.settings.adaptive:
            return self.settings.confidence_thresh
        wide = max(self.settings.window_size, 1)
        plain = self.costs.seconds(rows, 1)
        wider = max(self.costs.seconds(rows, wide + 1) - plain, 0.0) / wide
        break_even = (self._token_seconds[drafter].value + wider) / plain
        return min(max(self.settings.confidence_thresh, break_even), 0.95)

    def learn(self, request: RequestSpeculation, tokens: Sequence[int]) -> None:
        """Compare all that was drafted for a round, verified or not, with the tokens that came."""
        for candidate in request.candidates:
            draft = candidate.draft
            hits = agreement(draft.tokens, tokens)
            trials = min(hits + 1, len(draft.tokens), len(tokens))
            self._calibrations[draft.drafter].learn(draft.confidences, hits, trials)

    def appraise(self, plan: Plan, winners: Sequence[tuple[str, int]], seconds: float) -> None:
        """What each drafter saved in a round whose pass took `seconds`.

        `winners`: for each request the drafter of the best branch and its accepted tokens. What the pass took beyond a
        plain one is shared among the drafters of its branches.
        """
        plain = self.costs.seconds(len(winners), 1)
        issued = {draft.drafter for branches in plan.branches for draft in branches}
        for name, drafting in plan.drafting.items():
            gained = sum(accepted for drafter, accepted in winners if drafter == name) * plain / len(winners)
            extra = max(seconds - plain, 0.0) / len(issued) if name in issued else 0.0
            self._worths[name].learn(gained - extra - drafting)

    def close(self, request: RequestSpeculation, tokens: Sequence[int]) -> None:
        """A request has ended with this answer."""
        self.history.add([*context_of(request.prompt), *tokens])
        self.release(request)

    def release(self, request: RequestSpeculation) -> None:
        """A request is over, answered or cancelled: its drafters' states end, and what it did counts, once."""
        if request.over:
            return
        request.over = True
        for state in request.states.values():
            state.close()
        with self._lock:
            self.totals.add(request.statistics)
