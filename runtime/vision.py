"""The vision engine: tiles in, rows of image features out, one tile at a time."""

from collections.abc import Sequence

import numpy as np

from ..engines.engine import Buffer, Engine
from .processing.prompt import Tile


class Vision:
    """The vision engine of a bundle; `hidden` is the width of a feature row."""

    def __init__(self, engine: Engine, hidden: int) -> None:
        self._engine, self._hidden = engine, hidden

    def encode(self, tiles: Sequence[Tile]) -> Buffer:
        """Features of all tiles in order, float32 [features, hidden].

        Tiles run one by one: int8 scales then never depend on a neighbour, and batching gains nothing on a CPU.
        """
        features = self._engine.allocate((sum(tile.features for tile in tiles), self._hidden), np.float32)
        start = 0
        for tile in tiles:
            buffers: dict[str, Buffer] = {"image_features": features.row(start, start + tile.features)}
            for name, values in tile.inputs.items():
                buffers[name] = self._engine.allocate(values.shape, values.dtype)
                buffers[name].array[...] = values
            self._engine.bind(buffers).run()
            start += tile.features
        return features
