"""Open an image from any source as 8-bit RGB, bounded in size before anything is decoded."""

import io
import os
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from ...engines.errors import ImageError
from .prompt import ImageSource

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


def open_image(source: ImageSource, field: str, max_pixels: int) -> Image.Image:
    """The source as an RGB image, as transformers would see it.

    Paths and bytes are read as transformers' `load_image` does: EXIF orientation applied, alpha channel dropped. PIL
    images and arrays (uint8 [height, width] or [height, width, 1 | 3 | 4]) are converted as its image processors do:
    orientation left alone, alpha blended onto white.
    Raises ImageError naming `field` when the source is no image, is damaged, or has more than `max_pixels` pixels.
    """
    if isinstance(source, Image.Image):
        return _convert(source, field, max_pixels)
    if isinstance(source, np.ndarray):
        return _from_array(source, field, max_pixels)
    if isinstance(source, bytes | bytearray | memoryview):
        return _decode(io.BytesIO(source), f"{field} ({len(source)} bytes)", max_pixels)
    if isinstance(source, str | os.PathLike):
        return _open_path(source, field, max_pixels)
    raise ImageError(f"{field} is a {type(source).__name__}; allowed: a path, bytes, a PIL image or a uint8 array")


def check_pixels(width: int, height: int, field: str, max_pixels: int) -> None:
    """Raise ImageError unless the size is positive and at most `max_pixels`."""
    if width < 1 or height < 1:
        raise ImageError(f"{field} is {width}x{height} pixels; an image has at least 1x1")
    if width * height > max_pixels:
        raise ImageError(
            f"{field} is {width}x{height} = {width * height} pixels; at most {max_pixels} are allowed "
            "(max_image_pixels): scale the image down"
        )


def _open_path(source: str | os.PathLike[str], field: str, max_pixels: int) -> Image.Image:
    name = os.fspath(source)
    if name.startswith(("http://", "https://", "data:")):
        raise ImageError(f"{field} is {name[:60]!r}; addresses are not fetched: pass a path or the image's bytes")
    path = Path(name)
    if not path.is_file():
        raise ImageError(f"{field} is {name[:200]!r}, which is not a file")
    try:
        with path.open("rb") as stream:
            return _decode(stream, f"{field} ({path.name})", max_pixels)
    except OSError as error:
        raise ImageError(f"{field} is {name[:200]!r}, which cannot be read: {error.strerror}") from error


def _decode(stream: IO[bytes], field: str, max_pixels: int) -> Image.Image:
    try:
        image = Image.open(stream, formats=FORMATS)
        check_pixels(*image.size, field, max_pixels)
        image.load()
        check_pixels(*image.size, field, max_pixels)
        ImageOps.exif_transpose(image, in_place=True)
        return _blend(image if image.mode == "RGB" else image.convert("RGB"))
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(f"{field} is not an image; allowed formats: {', '.join(FORMATS)}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"{field} is larger than Pillow allows (at most {max_pixels} pixels here): {error}") from error
    except Exception as error:  # decoders raise anything on damaged data
        raise ImageError(f"{field} is damaged or truncated: {error}; save the image again") from error


def _convert(image: Image.Image, field: str, max_pixels: int) -> Image.Image:
    check_pixels(*image.size, field, max_pixels)
    try:
        image.load()
        return _blend(image)
    except Exception as error:  # a lazily opened file is decoded here
        raise ImageError(f"{field} is a damaged or closed PIL image: {error}") from error


def _blend(image: Image.Image) -> Image.Image:
    """The image as RGB, on white where it is transparent; itself when there is nothing to convert."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        layer = image.convert("RGBA")
        background = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(background, layer).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_array(array: npt.NDArray[np.uint8], field: str, max_pixels: int) -> Image.Image:
    channels = 1 if array.ndim == 2 else array.shape[-1] if array.ndim == 3 else 0
    if array.dtype != np.uint8 or channels not in (1, 3, 4):
        raise ImageError(
            f"{field} is an array of {array.dtype} {list(array.shape)}; "
            "allowed: uint8 [height, width] or [height, width, 1 | 3 | 4]"
        )
    height, width = array.shape[:2]
    check_pixels(width, height, field, max_pixels)
    if channels == 1:
        return Image.fromarray(np.repeat(array.reshape(height, width, 1), 3, axis=2))
    if channels == 4:
        return Image.fromarray(_blend_onto_white(array))
    return Image.fromarray(np.ascontiguousarray(array))


def _blend_onto_white(rgba: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Rounded alpha * color + (1 - alpha) * 255; no sum is half way between two integers, as 255 is odd."""
    alpha = rgba[..., 3:].astype(np.uint32)
    blended = (alpha * rgba[..., :3] + (255 - alpha) * 255 + 127) // 255
    return blended.astype(np.uint8)
