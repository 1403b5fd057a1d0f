"""An image of a session: whole at once, or bytes that arrive in pieces."""

from __future__ import annotations

import io
from collections.abc import Callable

from PIL import Image, UnidentifiedImageError

from ...engines.errors import ImageError
from ..processing.images import FORMATS, check_pixels
from ..processing.processor import Processor
from ..processing.prompt import ImageSource, PreparedImage

ENOUGH = 1 << 16
"""Bytes within which an image's header stands, or it is none."""
MOST_BYTES_A_PIXEL = 16


class PushedImage:
    """`prepared` are its tiles, once it is `whole` and was prepared; `size` is known from its first bytes on.

    Pillow decodes PNG, JPEG and WebP in one go, so pieces are only looked at as far as the header; decoding begins when
    the last byte is there.
    """

    def __init__(self, field: str, source: ImageSource | None, max_pixels: int = 0) -> None:
        self.field = field
        self.prepared: PreparedImage | None = None
        self.size: tuple[int, int] | None = None
        self.changed: Callable[[], None] = lambda: None
        self._source, self._max_pixels = source, max_pixels
        self._data = bytearray()

    @property
    def whole(self) -> bool:
        """Whether all of it has arrived."""
        return self._source is not None

    def push(self, piece: bytes) -> None:
        """Add bytes. Raises ImageError for what is no image, is too large, or was closed."""
        if self.whole:
            raise ImageError(f"{self.field}: found {len(piece)} bytes behind its end; open another image")
        self._data += piece
        if self.size is None:
            self.size = self._look()
        if self.size and len(self._data) > MOST_BYTES_A_PIXEL * self.size[0] * self.size[1] + ENOUGH:
            raise ImageError(
                f"{self.field} is {self.size[0]}x{self.size[1]} and already {len(self._data)} bytes long; "
                "no format needs so many"
            )

    def close(self) -> None:
        """All bytes are there."""
        if not self.whole:
            self._source = bytes(self._data)
            self._data.clear()
            self.changed()

    def prepare(self, processor: Processor) -> None:
        """Decode it and cut it into tiles, once. Raises ImageError."""
        if self._source is None:
            raise ImageError(f"{self.field}: {len(self._data)} bytes and no end; close it, or retract it")
        if self.prepared is None:
            prepared = processor.prepare_image(self._source, self.field)
            # Here and not where they are looked up first, which is with the session's lock held.
            for tile in prepared.tiles:
                _ = tile.digest
            self.prepared = prepared

    def _look(self) -> tuple[int, int] | None:
        try:
            size = Image.open(io.BytesIO(self._data), formats=FORMATS).size
        except UnidentifiedImageError:
            if len(self._data) > ENOUGH:
                raise ImageError(f"{self.field} is not an image; allowed formats: {', '.join(FORMATS)}") from None
            return None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as fault:
            raise ImageError(
                f"{self.field} is larger than Pillow allows (at most {self._max_pixels} pixels here): {fault}"
            ) from fault
        except Exception:
            # A header of which a part is still to come fails in as many ways as there are formats.
            return None
        check_pixels(*size, self.field, self._max_pixels)
        return size
