"""LLaVA: one tile per image, prepared as CLIP, SigLIP or LLaVA's own padding processor does."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from .config import LlavaConfig
from .images import check_pixels
from .pixels import normalize, resize
from .prompt import Ids, PreparedImage, Tile, count_positions


def fit_shortest_edge(height: int, width: int, shortest: int) -> tuple[int, int]:
    """(height, width) with the shorter edge at `shortest`, ratio kept, the longer one rounded down."""
    longer = int(shortest * max(height, width) / min(height, width))
    return (longer, shortest) if width <= height else (shortest, longer)


class LlavaLayout:
    """`prepare` gives one tile, pixel_values float32 [1, 3, height, width]."""

    def __init__(self, config: LlavaConfig, max_pixels: int) -> None:
        self.config = config
        self.max_pixels = max_pixels
        self.token: str | None = config.token

    def prepare(self, image: Image.Image, field: str) -> PreparedImage:
        config = self.config
        if config.pad_color is not None:
            image = self._pad_to_square(image, config.pad_color, field)
        if config.shortest_edge is not None:
            image = self._resize(image, field, *fit_shortest_edge(image.height, image.width, config.shortest_edge))
        elif config.resize is not None:
            image = self._resize(image, field, *config.resize)
        if config.crop is not None:
            image = _center_crop(image, *config.crop)
        patches = (image.height // config.patch_size) * (image.width // config.patch_size)
        pixel_values = normalize(np.asarray(image), config.pixels)[None]
        return PreparedImage(
            config.token, (Tile({"pixel_values": pixel_values}, patches + config.additional_features),)
        )

    def positions(self, is_feature: npt.NDArray[np.bool_], images: Sequence[PreparedImage]) -> tuple[Ids, int]:
        return count_positions(is_feature)

    def _resize(self, image: Image.Image, field: str, height: int, width: int) -> Image.Image:
        check_pixels(width, height, f"{field} resized from {image.width}x{image.height}", self.max_pixels)
        return resize(image, (height, width), self.config.pixels)

    def _pad_to_square(self, image: Image.Image, color: tuple[int, ...], field: str) -> Image.Image:
        edge = max(image.size)
        if image.width == image.height:
            return image
        check_pixels(edge, edge, f"{field} padded from {image.width}x{image.height}", self.max_pixels)
        square = Image.new("RGB", (edge, edge), color)
        square.paste(image, ((edge - image.width) // 2, (edge - image.height) // 2))
        return square


def _center_crop(image: Image.Image, height: int, width: int) -> Image.Image:
    """The middle of the image; what lies outside of it is black."""
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
