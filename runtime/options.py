"""Options of a request."""

from dataclasses import dataclass, fields
from typing import Any

from ..engines.errors import RequestError
from ..engines.schema import nearest
from .sampling import Sampling


@dataclass(frozen=True)
class Options(Sampling):
    """Everything that a request may set beside its messages and images.

    `max_new_tokens`: the most tokens an answer may have. `stop`: texts that end the answer; they are not part of it.
    `speculate`: False decodes plainly, which gives the same tokens.
    """

    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    speculate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens: found {self.max_new_tokens}; allowed: 1 or more")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop: found {self.stop!r}; a list of texts that are not empty is expected")
        object.__setattr__(self, "stop", stop)

    @classmethod
    def make(cls, values: dict[str, Any]) -> "Options":
        """Options from keyword arguments. Raises RequestError for an unknown name or a value out of range."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise RequestError(f"{name}: unknown option; {nearest(name, known)}")
        try:
            return cls(**values)
        except TypeError as fault:
            raise RequestError(f"options: {fault}") from None
