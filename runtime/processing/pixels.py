"""Resizing and normalising, common to all layouts."""

import numpy as np
import numpy.typing as npt
from PIL import Image

from .config import PixelConfig

Floats = npt.NDArray[np.float32]


def resize(image: Image.Image, size: tuple[int, int], pixels: PixelConfig) -> Image.Image:
    """The image at `size` = (height, width); itself when it has that size already."""
    height, width = size
    if image.size == (width, height):
        return image
    return image.resize((width, height), resample=Image.Resampling[pixels.resample.upper()])


def normalize(rgb: npt.NDArray[np.uint8], pixels: PixelConfig) -> Floats:
    """uint8 [height, width, 3] -> float32 [3, height, width]: (value * rescale_factor - mean) / std.

    Dividing by 1 / rescale_factor (255 exactly, as a rule) gives the floats that transformers gets by way of float64.
    """
    planes = np.empty((3, *rgb.shape[:2]), dtype=np.float32)
    divisor = np.float32(1.0 / pixels.rescale_factor)
    for channel, (mean, std) in enumerate(zip(pixels.mean, pixels.std, strict=True)):
        plane = planes[channel]
        plane[...] = rgb[..., channel]
        if divisor != 1:
            plane /= divisor
        plane -= np.float32(mean)
        plane /= np.float32(std)
    return planes


def count_steps(values: Floats, reference: Floats, pixels: PixelConfig) -> float:
    """Largest difference, in 8-bit steps, of two normalised arrays [n, 3, …] (or patches [n, 3 * …])."""
    shape = (len(values), 3, -1)
    difference = np.abs(values.reshape(shape) - reference.reshape(shape)).max(axis=(0, 2))
    return float((difference * np.array(pixels.std) / pixels.rescale_factor).max())
