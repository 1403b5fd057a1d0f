"""Double buffering: while a window is verified, the next one is drafted on another core as if all of it were right."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from .drafter import Draft, Drafter, DraftState

_WORKER = ThreadPoolExecutor(1, thread_name_prefix="speceyes-draft")


class Ahead:
    """The drafts that go on where those under verification end.

    A drafter asked for a window, the token that the model adds to it, and a second window, gives them all; the second
    window is used when the model has chosen everything before it.
    """

    def __init__(self, drafter: Drafter, states: Sequence[DraftState], verified: Sequence[Draft], window: int) -> None:
        self._verified = verified
        windows = [len(draft.tokens) + 1 + window for draft in verified]
        self._future: Future[list[Draft]] = _WORKER.submit(drafter.propose, states, windows, 0.0)

    def wait(self) -> None:
        """Let the drafting end, before its states change."""
        self._future.result()

    def next(self, number: int, tokens: Sequence[int]) -> Draft | None:
        """The draft that follows `tokens`, committed for the request of that number, if they are as foreseen."""
        length = len(self._verified[number].tokens) + 1
        draft = self._future.result()[number]
        if len(draft.tokens) <= length or tuple(tokens) != draft.tokens[:length]:
            return None
        known = draft.confidences[length - 1] or 1.0
        return Draft(
            draft.drafter,
            draft.tokens[length:],
            tuple(min(confidence / known, 1.0) for confidence in draft.confidences[length:]),
            draft.hidden[length:],
        )
