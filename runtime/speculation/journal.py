"""What the rounds of one call did, as typed events in a bounded ring; enough to draft the same again."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from ...engines.schema import decode
from ..processing.prompt import Prompt
from .drafter import Draft, DraftState, Floats


@dataclass(frozen=True)
class Propose:
    """A branch of `request`, whose answer has `at` tokens, goes into verification."""

    round: int
    request: int
    at: int
    drafter: str
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]


@dataclass(frozen=True)
class Verify:
    """One pass over so many rows (branches) and tokens of each."""

    round: int
    rows: int
    width: int


@dataclass(frozen=True)
class Accept:
    """Of branch `branch` the first `accepted` tokens were right; `tokens` are committed."""

    round: int
    request: int
    branch: int
    accepted: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Rewind:
    """The cache of a request goes back to `length` tokens."""

    round: int
    request: int
    length: int


@dataclass(frozen=True)
class FallBack:
    """A request decodes plainly for `tokens` tokens, since speculation lost time."""

    round: int
    request: int
    tokens: int


Event = Propose | Verify | Accept | Rewind | FallBack
_KINDS = {kind.__name__: kind for kind in (Propose, Verify, Accept, Rewind, FallBack)}


class Journal:
    """The last `limit` events, oldest first. Requests are numbered as in the call."""

    def __init__(self, limit: int = 4096) -> None:
        self.events: deque[Event] = deque(maxlen=limit)

    def add(self, event: Event) -> None:
        self.events.append(event)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def dumps(self) -> str:
        """One JSON object a line."""
        return "".join(json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n" for event in self.events)


def loads(text: str) -> Journal:
    """The inverse of `Journal.dumps`."""
    journal = Journal()
    for line in text.splitlines():
        values = json.loads(line)
        kind: type[Event] = _KINDS[values.pop("event")]
        journal.add(decode(kind, values, "journal"))
    return journal


@dataclass
class ReplayState:
    """How far the answer is."""

    request: int
    at: int = 0

    def commit(self, tokens: Sequence[int], hidden: Floats) -> None:
        self.at += len(tokens)

    def close(self) -> None:
        """Nothing is held."""


class ReplayDrafter:
    """Drafts what a journal says was drafted, first branches alone; requests are opened in the order of the call."""

    name = "replay"

    def __init__(self, journal: Journal) -> None:
        self._opened = 0
        self._drafts: dict[tuple[int, int], Draft] = {}
        for event in journal:
            if isinstance(event, Propose):
                draft = Draft(event.drafter, event.tokens, event.confidences)
                self._drafts.setdefault((event.request, event.at), draft)

    def open(self, prompt: Prompt, features: Floats | None) -> ReplayState:
        self._opened += 1
        return ReplayState(self._opened - 1)

    def propose(self, states: Sequence[DraftState], windows: Sequence[int], confidence: float) -> list[Draft]:
        drafts = []
        for state, window in zip(states, windows, strict=True):
            assert isinstance(state, ReplayState)
            drafts.append(self._drafts.get((state.request, state.at), Draft(self.name)).cut(window))
        return drafts
