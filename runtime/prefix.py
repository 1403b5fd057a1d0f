"""What stands in a row of the cache, token by token, and how much of it another prompt begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .processing.prompt import Ids, Prompt


@dataclass(frozen=True)
class Content:
    """A row's tokens: ids int64 [S], positions int64 [S] or [3, S], and for image rows the number of their tile, −1 for
    text, int64 [S]. `digests`: SHA-256 of what the tiles were encoded from; they are compared whole."""

    tokens: Ids
    positions: Ids
    tiles: Ids
    digests: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, prompt: Prompt) -> Content:
        """What a prompt puts into the cache."""
        ends = np.cumsum([tile.features for tile in prompt.tiles])
        tiles = np.where(prompt.feature_index < 0, -1, np.searchsorted(ends, prompt.feature_index, side="right"))
        digests = tuple(tile.digest for tile in prompt.tiles)
        return cls(prompt.token_ids, prompt.position_ids, tiles, digests)

    def followed_by(self, tokens: Sequence[int], position: int) -> Content:
        """With an answer's tokens behind it, at `position` and after."""
        places = np.arange(position, position + len(tokens))
        return Content(
            np.concatenate([self.tokens, np.array(tokens, np.int64)]),
            np.concatenate([self.positions, np.broadcast_to(places, (*self.positions.shape[:-1], len(tokens)))], -1),
            np.concatenate([self.tiles, np.full(len(tokens), -1)]),
            self.digests,
        )

    def cut(self, length: int) -> Content:
        """The first `length` tokens."""
        if length >= len(self):
            return self
        return Content(self.tokens[:length], self.positions[..., :length], self.tiles[:length], self.digests)

    def shared(self, other: Content) -> int:
        """How many of the first tokens are the same in both."""
        length = min(len(self), len(other))
        same = (self.tokens[:length] == other.tokens[:length]) & (self.tiles[:length] == other.tiles[:length])
        same &= np.atleast_2d(self.positions[..., :length] == other.positions[..., :length]).all(0)
        if not same.all():
            length = int(same.argmin())
        for number, pair in enumerate(zip(self.digests, other.digests, strict=False)):
            if pair[0] != pair[1] and (found := np.flatnonzero(self.tiles[:length] == number)).size:
                return int(found[0])
        return length
