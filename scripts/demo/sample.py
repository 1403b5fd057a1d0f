"""What every task produces: pictures and the questions about them."""

from dataclasses import dataclass

from .canvas import Canvas


@dataclass(frozen=True)
class Turn:
    """A question, the answer expected, and its kind, such as "document/receipt"."""

    question: str
    answer: str
    kind: str


@dataclass(frozen=True)
class Sample:
    """One or more pictures (the frames of a clip, in order) and independent questions about them."""

    canvases: tuple[Canvas, ...]
    turns: tuple[Turn, ...]
