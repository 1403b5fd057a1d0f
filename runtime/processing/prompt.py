"""What processing hands to the engines, and what every image layout promises."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

Ids = npt.NDArray[np.int64]
ImageSource = str | os.PathLike[str] | bytes | Image.Image | npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Tile:
    """One call of the vision engine: `inputs` are exactly its inputs, `features` the rows it yields."""

    inputs: dict[str, npt.NDArray[Any]]
    features: int

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the inputs: names, types, shapes and every byte."""
        found = hashlib.sha256()
        for name, values in sorted(self.inputs.items()):
            found.update(f"{name} {values.dtype.str} {values.shape}\n".encode())
            found.update(np.ascontiguousarray(values).data)
        return found.digest()


@dataclass(frozen=True)
class Prompt:
    """A request ready for the engines; S tokens, placeholders expanded to one image token per feature row.

    token_ids      int64 [S]
    feature_index  int64 [S], -1 for text, else the row in the concatenated features of `tiles`, in order
    position_ids   int64 [S], or [3, S] (time, height, width) for M-RoPE
    next_position  position of the first generated token (all three components are equal for M-RoPE)
    """

    token_ids: Ids
    feature_index: Ids
    position_ids: Ids
    next_position: int
    tiles: tuple[Tile, ...]
    images: int


@dataclass(frozen=True)
class PreparedImage:
    """One image: `text` stands for its placeholder and holds the image token once per tile, in order.

    `grid` is the (rows, columns) of its features where positions need them (M-RoPE). `cut` is the (rows, columns) of
    tiles that it was cut into; a last tile shows it whole. (0, 0) where it was not cut.
    """

    text: str
    tiles: tuple[Tile, ...]
    grid: tuple[int, int] | None = None
    cut: tuple[int, int] = (0, 0)


class Layout(Protocol):
    """How a family cuts images into tiles and numbers the positions."""

    @property
    def token(self) -> str | None:
        """The image token; None for models that read text alone."""

    def prepare(self, image: Image.Image, field: str) -> PreparedImage:
        """Tiles of an RGB image. Raises ImageError naming `field` when the family cannot take such an image."""

    def positions(self, is_feature: npt.NDArray[np.bool_], images: Sequence[PreparedImage]) -> tuple[Ids, int]:
        """Position ids of a prompt whose image rows are marked in `is_feature` [S], and the next position."""


def count_positions(is_feature: npt.NDArray[np.bool_]) -> tuple[Ids, int]:
    """Positions 0, 1, 2, … for families whose images take the positions of their tokens."""
    return np.arange(len(is_feature), dtype=np.int64), len(is_feature)
