"""Idefics3 and SmolVLM: square tiles row by row, then the whole image as a global tile."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from .config import Idefics3Config
from .pixels import normalize, resize
from .prompt import Ids, PreparedImage, Tile, count_positions

LARGEST_EDGE = 4096


def fit_longest_edge(height: int, width: int, longest: int) -> tuple[int, int]:
    """(height, width) with the longer edge at `longest` (at most 4096) and the other even, ratio kept."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > LARGEST_EDGE:
        width, height = LARGEST_EDGE, int(LARGEST_EDGE / ratio)
    elif height > width and height > LARGEST_EDGE:
        height, width = LARGEST_EDGE, int(LARGEST_EDGE * ratio)
    return max(height, 1), max(width, 1)


def fit_tiles(height: int, width: int, edge: int) -> tuple[int, int]:
    """(height, width) rounded up to whole tiles of `edge` pixels, the longer edge first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        height = math.ceil(int(width / ratio) / edge) * edge
    else:
        height = math.ceil(height / edge) * edge
        width = math.ceil(int(height * ratio) / edge) * edge
    return max(height, edge), max(width, edge)


class Idefics3Layout:
    """`prepare` gives rows x columns tiles and the global one, each pixel_values float32 [1, 3, edge, edge]."""

    def __init__(self, config: Idefics3Config) -> None:
        self.config = config
        self.token: str | None = config.token

    def prepare(self, image: Image.Image, field: str) -> PreparedImage:
        config = self.config
        edge = config.tile_edge
        if config.longest_edge is not None:
            image = resize(image, fit_longest_edge(image.height, image.width, config.longest_edge), config.pixels)
        if not config.split:
            return self._assemble([], (0, 0), resize(image, (edge, edge), config.pixels))
        image = resize(image, fit_tiles(image.height, image.width, edge), config.pixels)
        rows, columns = image.height // edge, image.width // edge
        if rows == columns == 1:
            return self._assemble([], (0, 0), image)
        rgb = np.asarray(image)
        crops = [
            rgb[row * edge : (row + 1) * edge, column * edge : (column + 1) * edge]
            for row in range(rows)
            for column in range(columns)
        ]
        return self._assemble(crops, (rows, columns), resize(image, (edge, edge), config.pixels))

    def positions(self, is_feature: npt.NDArray[np.bool_], images: Sequence[PreparedImage]) -> tuple[Ids, int]:
        return count_positions(is_feature)

    def _assemble(self, crops: list[npt.NDArray[np.uint8]], grid: tuple[int, int], whole: Image.Image) -> PreparedImage:
        tiles = tuple(
            Tile({"pixel_values": normalize(crop, self.config.pixels)[None]}, self.config.tile_features)
            for crop in [*crops, np.asarray(whole)]
        )
        return PreparedImage(self._text(*grid), tiles, cut=grid)

    def _text(self, rows: int, columns: int) -> str:
        config = self.config
        tiles = "".join(
            "".join(
                f"{config.boundary_token}<row_{row + 1}_col_{column + 1}>{config.token}" for column in range(columns)
            )
            + "\n"
            for row in range(rows)
        )
        separator = "\n" if tiles else ""
        return f"{tiles}{separator}{config.boundary_token}{config.global_token}{config.token}{config.boundary_token}"
