"""What is asked, and an answer as it comes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .processing import ImageSource
from .results import Result
from .row import Row

Messages = str | Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Request:
    """One item of a batch: see `Model.generate` for the meaning of the fields."""

    messages: Messages | None = None
    prompt: str | None = None
    images: Sequence[ImageSource] = ()
    options: dict[str, Any] = field(default_factory=dict)


class Stream:
    """Pieces of an answer as they are settled, each of whole characters. Closing it cancels the request."""

    def __init__(self, row: Row, pieces: Iterator[str]) -> None:
        self._row, self._pieces = row, pieces

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def result(self) -> Result:
        """The whole answer; reads what is left of it."""
        for _ in self._pieces:
            pass
        return self._row.result()

    def close(self) -> None:
        """Stop generating; `result` then has what was settled so far and the finish reason `cancelled`."""
        self._pieces.close()  # type: ignore[attr-defined]

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
