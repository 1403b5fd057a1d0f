"""The golden image: pixels and ids that transformers gave at compile time, held against ours on this machine."""

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...engines.errors import AccuracyError, BundleError
from .config import PixelConfig
from .pixels import count_steps
from .processor import Processor
from .prompt import Tile

IMAGE_FILE = "accuracy/golden.png"
ARRAYS_FILE = "accuracy/golden.npz"
LARGEST_ARRAYS = 1 << 28


def verify_golden(folder: Path, processor: Processor | None = None) -> float:
    """Prepare the bundle's golden image and prompt; return the largest pixel difference in steps of 1/255.

    Raises AccuracyError when ids differ or a pixel is more than one step off, BundleError for unreadable files.
    """
    processor = processor if processor is not None else Processor.load(folder)
    arrays = _read_arrays(folder / ARRAYS_FILE)
    image = processor.config.image
    wanted = ("prompt", "token_ids") if image is None else ("prompt", "token_ids", "pixel_values")
    if missing := [name for name in wanted if name not in arrays]:
        raise BundleError(f"{ARRAYS_FILE} lacks {', '.join(missing)}; compile the bundle again")
    images = [folder / IMAGE_FILE] if image is not None else []
    prompt = processor.prepare(prompt=str(arrays["prompt"]), images=images)
    check_ids(prompt.token_ids, arrays["token_ids"], "the golden prompt")
    if image is None:
        return 0.0
    return check_pixels(prompt.tiles, arrays["pixel_values"], image.pixels, "the golden image")


def check_ids(ids: npt.NDArray[np.int64], reference: npt.NDArray[np.int64], what: str) -> None:
    """Raise AccuracyError naming the first difference unless both id sequences are equal."""
    if len(ids) == len(reference) and (ids == reference).all():
        return
    common = min(len(ids), len(reference))
    different = np.flatnonzero(ids[:common] != reference[:common])
    at = int(different[0]) if len(different) else common
    raise AccuracyError(
        f"{what}: {len(ids)} token ids, transformers gives {len(reference)}; they differ from position {at}: "
        f"{ids[at : at + 5].tolist()} against {reference[at : at + 5].tolist()}"
    )


def check_pixels(tiles: tuple[Tile, ...], reference: npt.NDArray[np.float32], pixels: PixelConfig, what: str) -> float:
    """Largest difference in steps of 1/255. Raises AccuracyError when the shapes differ or it is above one step."""
    values = np.concatenate([tile.inputs["pixel_values"] for tile in tiles])
    if values.shape != reference.shape:
        raise AccuracyError(f"{what}: pixels {list(values.shape)}, transformers gives {list(reference.shape)}")
    steps = count_steps(values, reference, pixels)
    if not steps <= 1.0:
        raise AccuracyError(
            f"{what}: a pixel is {steps:.2f} steps of 1/255 away from transformers' (at most 1 is allowed); "
            "this Pillow resizes differently: install the version the bundle was compiled with"
        )
    return steps


def _read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        data = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if (size := sum(entry.file_size for entry in archive.infolist())) > LARGEST_ARRAYS:
                raise BundleError(f"{ARRAYS_FILE} unpacks to {size} bytes; at most {LARGEST_ARRAYS} are read")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, MemoryError, zlib.error, zipfile.BadZipFile) as error:
        raise BundleError(f"{ARRAYS_FILE} cannot be read: {error}; compile the bundle again") from error
