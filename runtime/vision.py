"""The vision engine: tiles in, rows of image features out, one tile at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..engines.engine import Buffer, Engine
from .perception.features import FeatureStore, Floats
from .processing.prompt import Tile


@dataclass(frozen=True)
class Features:
    """Image features float32 [features, hidden] on the engine's side, and how many tiles were `found`, not encoded."""

    buffer: Buffer
    found: int

    @property
    def array(self) -> Floats:
        """As the host sees them."""
        return self.buffer.array.view(np.float32)


class Vision:
    """The vision engine of a bundle; `hidden` is the width of a feature row. `store` keeps what was encoded."""

    def __init__(self, engine: Engine, hidden: int, store: FeatureStore | None = None) -> None:
        self._engine, self._hidden, self._store = engine, hidden, store

    def encode(self, tiles: Sequence[Tile]) -> Features:
        """Features of all tiles in order.

        Tiles run one by one: int8 scales then never depend on a neighbour, and batching gains nothing on a CPU.
        """
        buffer = self._engine.allocate((sum(tile.features for tile in tiles), self._hidden), np.float32)
        start = found = 0
        for tile in tiles:
            rows = buffer.row(start, start + tile.features)
            known = self._store.find(tile) if self._store else None
            if known is None:
                self._run(tile, rows)
            else:
                rows.array[...] = known
                found += 1
            start += tile.features
        return Features(buffer, found)

    def recall(self, tiles: Sequence[Tile], needed: Sequence[int] | None = None) -> Features | None:
        """Features of the tiles with the numbers `needed` (of all when None), in their places; the others are zeros.

        Nothing is run: None when one of them is not kept.
        """
        buffer = self._engine.allocate((sum(tile.features for tile in tiles), self._hidden), np.float32)
        ends = np.cumsum([tile.features for tile in tiles])
        numbers = range(len(tiles)) if needed is None else needed
        for number in numbers:
            known = self._store.find(tiles[number]) if self._store else None
            if known is None:
                return None
            buffer.array[ends[number] - len(known) : ends[number]] = known
        return Features(buffer, len(numbers))

    def encode_ahead(self, tile: Tile) -> bool:
        """Encode a tile into the store, unless it is there; whether it was run."""
        if self._store is None or self._store.find(tile) is not None:
            return False
        self._run(tile, self._engine.allocate((tile.features, self._hidden), np.float32))
        return True

    def _run(self, tile: Tile, rows: Buffer) -> None:
        buffers = {"image_features": rows}
        for name, values in tile.inputs.items():
            buffers[name] = self._engine.allocate(values.shape, values.dtype)
            buffers[name].array[...] = values
        self._engine.bind(buffers).run()
        if self._store is not None:
            rows.array[...] = self._store.keep(tile, rows.array.view(np.float32))
