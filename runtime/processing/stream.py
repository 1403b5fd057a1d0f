"""Text from tokens as they come, and the stop strings that end it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...engines.errors import RequestError
from .decoders import Decoder, State

if TYPE_CHECKING:
    from .text import Tokenizer


class TextStream:
    """Whole characters from token ids; joined, the pieces equal `tokenizer.decode(ids)`.

    The state is an immutable tuple: `copy` costs nothing, and setting `state` back rewinds the stream.
    Work per token is bounded by the token's length, and by the run of byte tokens (`<0xE2>` …) it belongs to.
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._decoder: Decoder = tokenizer.decoder
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.state: State = self._decoder.initial

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character, or a run of byte tokens, is unfinished."""
        if token_id in self._skip:
            return ""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        self.state, text = self._decoder.push(self.state, token)
        return text

    def finish(self) -> str:
        """What is left when no token follows; bytes that are no character come out as U+FFFD."""
        text = self._decoder.finish(self.state)
        self.state = self._decoder.initial
        return text

    def copy(self) -> "TextStream":
        """A stream that goes on from here on its own."""
        other = object.__new__(TextStream)
        other.__dict__.update(self.__dict__)
        return other


class StopMatcher:
    """Holds back text that may begin a stop string; a stop string ends the text before it.

    The stop string that is complete first wins, the longest one when several end together, so the result does not
    depend on how the text is cut into pieces. `held` is the whole state: setting it back rewinds the matcher.
    Raises RequestError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError(f"stop: found {stops!r}; a list of texts that are not empty is expected")
        self._stops = tuple(dict.fromkeys(stops))
        self.held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is now certain to belong to the answer, and whether a stop string has ended it."""
        text = self.held + text
        self.held = ""
        if matches := [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]:
            return text[: min(matches)[1]], True
        certain = len(text) - self._count_held(text)
        self.held = text[certain:]
        return text[:certain], False

    def finish(self) -> str:
        """What was held back, when the text ends without a stop string."""
        text, self.held = self.held, ""
        return text

    def copy(self) -> "StopMatcher":
        """A matcher that goes on from here on its own."""
        other = object.__new__(StopMatcher)
        other.__dict__.update(self.__dict__)
        return other

    def _count_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max((len(stop) for stop in self._stops), default=1) - 1)
        for count in range(longest, 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0
