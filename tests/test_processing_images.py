"""Images that are damaged, too large or no images are refused before anything is decoded."""

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from speceyes.engines.errors import ImageError
from speceyes.runtime.processing import Processor
from speceyes.runtime.processing.images import FORMATS, open_image

from .processors import bundle, picture

LIMIT = 100_000


def png(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    picture(width, height).save(stream, format="PNG")
    return stream.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (png(64, 64)[:700], r"field \(700 bytes\) is damaged or truncated"),
        (b"GIF89a", r"field \(6 bytes\) is"),
        (b"not an image at all", rf"field \(19 bytes\) is not an image; allowed formats: {', '.join(FORMATS)}"),
        (b"", r"field \(0 bytes\) is not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
        (png_header(500, 400), r"is 500x400 = 200000 pixels; at most 100000 are allowed \(max_image_pixels\)"),
        ("no/such/file.png", "field is 'no/such/file.png', which is not a file"),
        (".", "which is not a file"),
        ("https://example.org/a.png", "addresses are not fetched: pass a path or the image's bytes"),
        (42, "field is a int; allowed: a path, bytes, a PIL image or a uint8 array"),
        (np.zeros((8, 8, 3), np.float32), r"array of float32 \[8, 8, 3\]; allowed: uint8 \[height, width\]"),
        (np.zeros((3, 8, 8), np.uint8), r"array of uint8 \[3, 8, 8\]"),
        (np.zeros((8,), np.uint8), r"array of uint8 \[8\]"),
        (np.zeros((0, 8, 3), np.uint8), "field is 8x0 pixels; an image has at least 1x1"),
        (np.zeros((400, 500), np.uint8), "is 500x400 = 200000 pixels"),
        (Image.new("L", (500, 400)), "is 500x400 = 200000 pixels"),
        (Image.new("RGB", (0, 5)), "is 0x5 pixels"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_refused(source: object, said: str) -> None:
    with pytest.raises(ImageError, match=said):
        open_image(source, "field", LIMIT)  # type: ignore[arg-type]


def test_pillow_bomb_is_an_image_error() -> None:
    with pytest.raises(ImageError, match="larger than Pillow allows"):
        open_image(png_header(40_000, 40_000), "field", 1 << 28)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ImageError, match="larger than Pillow allows"):
            open_image(png_header(10_000, 10_000), "field", 1 << 28)


def test_file_names_are_in_the_message(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(png(64, 64)[:700])
    with pytest.raises(ImageError, match=r"field \(photo\.png\) is damaged or truncated"):
        open_image(path, "field", LIMIT)
    with pytest.raises(ImageError, match=r"field is a damaged or closed PIL image"):
        open_image(Image.open(path), "field", LIMIT)


def test_limit_is_inclusive() -> None:
    assert open_image(png(200, 50), "field", 10_000).size == (200, 50)
    with pytest.raises(ImageError, match="at most 9999 are allowed"):
        open_image(png(200, 50), "field", 9_999)


def test_pillow_settings_stay_as_they_are() -> None:
    before = Image.MAX_IMAGE_PIXELS
    open_image(png(8, 8), "field", 1 << 28)
    assert before == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize(("name", "what"), [("llava_clip", "resized from 40000x1"), ("llava_padded", "padded from")])
def test_long_strip_would_grow_beyond_the_limit(name: str, what: str) -> None:
    with pytest.raises(ImageError, match=rf"images\[0\] {what}.*at most 100000000 are allowed"):
        Processor.load(bundle(name)).prepare("what?", images=[Image.new("RGB", (40_000, 1))])


def test_ratio_that_qwen_cannot_take() -> None:
    with pytest.raises(ImageError, match=r"images\[0\] is 402x2; one edge may be at most 200 times the other"):
        Processor.load(bundle("qwen2_vl")).prepare("what?", images=[picture(402, 2)])
    assert Processor.load(bundle("qwen2_vl")).prepare("what?", images=[picture(400, 2)]).images == 1


def test_errors_name_the_image() -> None:
    ours = Processor.load(bundle("idefics3"))
    with pytest.raises(ImageError, match=r"images\[1\] \(3 bytes\) is not an image"):
        ours.prepare("what?", images=[picture(8, 8), b"abc"])
    messages = [{"role": "user", "content": [{"type": "image", "image": b"abc"}]}]
    with pytest.raises(ImageError, match=r"messages\[0\]\.content\[0\]\.image \(3 bytes\) is not an image"):
        ours.prepare(messages)
