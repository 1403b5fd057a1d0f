"""Every shape of pass that requests will need, run before they come: captured where the backend has graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..engines.engine import GraphCounts
from .cache import Cache
from .decoder import Decoder

RUNS = 3
"""A first run, the one that captures, and the first that replays."""


@dataclass(frozen=True)
class Shape:
    """A pass over the first `rows` of a cache, each of `width` tokens."""

    rows: int
    width: int

    @property
    def label(self) -> str:
        return f"{self.rows}×{self.width}"


@dataclass(frozen=True)
class Rehearsal:
    """`shapes` were run; of them `captured` are replayed from now on.

    `refused`: captures that failed, by shape, with the reason; `differing`: shapes whose runs differed in a byte.
    """

    shapes: tuple[str, ...]
    captured: int
    refused: dict[str, str]
    differing: tuple[str, ...]


def rehearse(
    decoder: Decoder,
    batches: Sequence[int],
    branches: int,
    window: int,
    tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rehearsal:
    """Run every pass that `batches` requests at once can come to, with up to `branches` rows each and drafts of up to
    `window` tokens, in caches of `tokens` tokens, which the decoder keeps for requests to come.

    The largest comes first, so that what it needs serves the others.
    """
    plans = {batch: _shapes(decoder, batch * branches, window) for batch in sorted(set(batches), reverse=True)}
    total = sum(map(len, plans.values()))
    graphs = decoder.engine.graphs or GraphCounts()
    before = graphs.captured
    labels: list[str] = []
    differing: list[str] = []
    refused: dict[str, str] = {}
    for batch, shapes in plans.items():
        cache = decoder.open(batch * branches, tokens + window)
        for shape in shapes:
            known = set(graphs.refused)
            if not _same(cache, shape):
                differing.append(shape.label)
            for label in graphs.refused.keys() - known:
                refused[shape.label] = graphs.refused[label]
            labels.append(shape.label)
            progress(len(labels), total)
        decoder.close(cache)
    return Rehearsal(tuple(labels), graphs.captured - before, refused, tuple(differing))


def _shapes(decoder: Decoder, rows: int, window: int) -> list[Shape]:
    """Widths as the decoder pads them and no wider than it may take, a plain step among them; the largest first."""
    widest = min(window + 1, decoder.max_width or window + 1)
    widths = sorted({decoder.pad(width) for width in range(2, widest + 1)} | {1}, reverse=True)
    return [Shape(count, width) for count in range(rows, 0, -1) for width in widths]


def _same(cache: Cache, shape: Shape) -> bool:
    found = set()
    for _ in range(RUNS):
        output = cache.advance([[0] * shape.width] * shape.rows, [0] * shape.rows, every=shape.width > 1)
        found.add(output.logits.tobytes())
        for row in range(shape.rows):
            cache.rewind(row, 0)
    return len(found) == 1
