"""What proposes tokens: the protocol of drafters."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..processing.prompt import Prompt

Floats = NDArray[np.float32]
NO_HIDDEN: Floats = np.zeros((0, 0), np.float32)


@dataclass(frozen=True)
class Draft:
    """Tokens proposed to follow the committed ones.

    `confidences[i]`: estimated probability that the model chooses all of `tokens[: i + 1]`, not increasing.
    `hidden`: the hidden states that it foresees, float32 [len(tokens), hidden], or empty where it foresees none.
    """

    drafter: str
    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    hidden: Floats = field(default_factory=lambda: NO_HIDDEN, compare=False)

    def cut(self, length: int) -> "Draft":
        """The first `length` tokens of it."""
        return Draft(self.drafter, self.tokens[:length], self.confidences[:length], self.hidden[:length])


class DraftState(Protocol):
    """A drafter's memory of one request. It holds committed tokens alone, so nothing in it is ever rolled back."""

    def commit(self, tokens: Sequence[int], hidden: Floats) -> None:
        """Tokens that the model has chosen, in order; `hidden` float32 [len(tokens), hidden] chose them, one by one.

        `hidden` is valid during the call only.
        """
        ...

    def close(self) -> None:
        """The request has ended: give back what it held."""
        ...


class Drafter(Protocol):
    """Proposes continuations for several requests at once."""

    @property
    def name(self) -> str: ...

    def open(self, prompt: Prompt, features: Floats | None) -> DraftState | None:
        """Begin a request; `features` float32 [features, hidden] are those of its images, None where they are not at
        hand. None when there is no memory to follow it."""
        ...

    def propose(self, states: Sequence[DraftState], windows: Sequence[int], confidence: float) -> list[Draft]:
        """A draft for each request: at most `windows[i]` tokens. Those whose confidence falls below `confidence` are
        not used, so a drafter for which they cost time ends before them.

        A state without a committed token, or a window of 0, gives an empty draft. Changes no state.
        """
        ...
