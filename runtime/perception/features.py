"""Features of tiles that were encoded before, found again by what the tile is made of."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...plugins.int8_attention.quantise import Packed, dequantise, quantise
from ..memory.pool import Pool
from ..processing.prompt import Tile

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class _Entry:
    """Arrays as they are kept, and the checksum that they had then."""

    arrays: tuple[NDArray[np.generic], ...]
    checksum: int

    @classmethod
    def of(cls, *arrays: NDArray[np.generic]) -> _Entry:
        return cls(arrays, _checksum(arrays))

    @property
    def intact(self) -> bool:
        return _checksum(self.arrays) == self.checksum

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def drop(self) -> None:
        pass


class FeatureStore:
    """Features by the SHA-256 of a tile's pixels, under the hash of the processor and the vision engine.

    `groups`: keep int8 with so many scales a row, None: as they are. With int8 the features of a tile are rounded when
    they are first encoded, so that a later answer is the same whether they were found or not.
    """

    def __init__(self, pool: Pool, owner: str, groups: int | None = None) -> None:
        self._pool, self._owner, self._groups = pool, owner, groups

    def find(self, tile: Tile) -> Floats | None:
        """Features [features, hidden] of a tile; None where they are not kept, or no longer what they were."""
        key = self._key(tile)
        entry = self._pool.find(key)
        if not isinstance(entry, _Entry):
            return None
        if not entry.intact:
            self._pool.remove(key)
            return None
        if self._groups is None:
            return entry.arrays[0].view(np.float32)
        return dequantise(Packed(entry.arrays[0].view(np.int8), entry.arrays[1].view(np.float32)))

    def keep(self, tile: Tile, features: Floats) -> Floats:
        """Keep what was encoded; gives what a later `find` will.

        NaN and infinity, which int8 cannot hold, are not kept.
        """
        if self._groups is None:
            entry, kept = _Entry.of(features.copy()), features
        else:
            try:
                packed = quantise(features, self._groups)
            except ValueError:
                return features
            entry, kept = _Entry.of(packed.codes, packed.scales), dequantise(packed)
        self._pool.store(self._key(tile), entry)
        return kept

    def _key(self, tile: Tile) -> tuple[str, bytes]:
        return self._owner, tile.digest


def _checksum(arrays: tuple[NDArray[np.generic], ...]) -> int:
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return found
