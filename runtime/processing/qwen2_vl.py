"""Qwen2-VL and Qwen2.5-VL: a grid of patches in merge order, windows, and positions in time, height and width."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from ...engines.errors import ImageError
from .config import Qwen2VLConfig
from .pixels import Floats, normalize, resize
from .prompt import Ids, PreparedImage, Tile

LARGEST_RATIO = 200


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) divisible by `factor`, their product within the two bounds, ratio kept as nearly as possible."""
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        scale = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height, new_width


def patchify(planes: Floats, patch: int, merge: int, frames: int) -> Floats:
    """[3, height, width] -> [patches, 3 * frames * patch * patch] in merge order, the frame repeated."""
    _, height, width = planes.shape
    rows, columns = height // patch, width // patch
    blocks = planes.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
    blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6)
    patches = np.empty((*blocks.shape[:5], frames, patch, patch), dtype=np.float32)
    patches[...] = blocks[:, :, :, :, :, None]
    return patches.reshape(rows * columns, -1)


def rotary_positions(rows: int, columns: int, merge: int) -> Ids:
    """(row, column) of each patch in merge order: int64 [rows * columns, 2]."""
    grid = np.indices((rows, columns), dtype=np.int64)
    blocks = grid.reshape(2, rows // merge, merge, columns // merge, merge)
    return np.ascontiguousarray(blocks.transpose(1, 3, 2, 4, 0).reshape(-1, 2))


def windows(rows: int, columns: int, window: int, merge: int) -> tuple[Ids, Ids]:
    """Order of merged groups by window, and each patch's window in that order.

    `rows`, `columns` and `window` count merged groups.
    Returns window_index int64 [rows * columns] and window_id int64 [rows * columns * merge * merge].
    """
    row, column = np.indices((rows, columns), dtype=np.int64)
    number = (row // window * math.ceil(columns / window) + column // window).reshape(-1)
    order = np.argsort(number, kind="stable")
    return order, np.repeat(number[order], merge * merge)


def mrope_positions(is_feature: npt.NDArray[np.bool_], grids: Sequence[tuple[int, int]]) -> tuple[Ids, int]:
    """Positions int64 [3, S] (time, height, width) and the next one.

    `is_feature` bool [S] marks image rows; `grids` are the images' (rows, columns) of features, in order.
    Text goes on by one; an image starts there in all three and takes max(rows, columns) positions.
    """
    positions = np.empty((3, len(is_feature)), dtype=np.int64)
    feature_rows = np.flatnonzero(is_feature)
    cursor = position = taken = 0
    for rows, columns in grids:
        start = int(feature_rows[taken])
        positions[:, cursor:start] = np.arange(position, position + start - cursor)
        position += start - cursor
        cursor = start + rows * columns
        positions[0, start:cursor] = position
        positions[1:, start:cursor] = np.indices((rows, columns)).reshape(2, -1) + position
        position += max(rows, columns)
        taken += rows * columns
    positions[:, cursor:] = np.arange(position, position + len(is_feature) - cursor)
    return positions, position + len(is_feature) - cursor


class Qwen2VLLayout:
    """`prepare` gives one tile: pixel_values, rotary_positions and, for 2.5, window_index and window_id."""

    def __init__(self, config: Qwen2VLConfig) -> None:
        self.config = config
        self.token: str | None = config.token

    def prepare(self, image: Image.Image, field: str) -> PreparedImage:
        config = self.config
        if max(image.size) > LARGEST_RATIO * min(image.size):
            raise ImageError(
                f"{field} is {image.width}x{image.height}; one edge may be at most {LARGEST_RATIO} times the other"
            )
        merge, patch = config.merge_size, config.patch_size
        size = smart_resize(image.height, image.width, patch * merge, config.min_pixels, config.max_pixels)
        planes = normalize(np.asarray(resize(image, size, config.pixels)), config.pixels)
        rows, columns = size[0] // patch, size[1] // patch
        inputs: dict[str, npt.NDArray[np.generic]] = {
            "pixel_values": patchify(planes, patch, merge, config.temporal_patch_size),
            "rotary_positions": rotary_positions(rows, columns, merge),
        }
        grid = rows // merge, columns // merge
        if config.window_size is not None:
            window = config.window_size // merge // patch
            inputs["window_index"], inputs["window_id"] = windows(*grid, window, merge)
        return PreparedImage(config.token, (Tile(inputs, grid[0] * grid[1]),), grid)

    def positions(self, is_feature: npt.NDArray[np.bool_], images: Sequence[PreparedImage]) -> tuple[Ids, int]:
        return mrope_positions(is_feature, [image.grid for image in images if image.grid is not None])
