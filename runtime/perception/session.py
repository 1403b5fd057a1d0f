"""A request that arrives piece by piece: images while they are uploaded, text while it is typed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ...engines.errors import RequestError, SpecEyesError
from ..generation import generate
from ..options import Options
from ..processing.prompt import ImageSource, Tile
from ..requests import Stream
from ..results import Result
from ..row import Row
from .arrival import PushedImage
from .background import Background, Unit
from .order import encoding_order
from .prefill import Prefill

if TYPE_CHECKING:
    from ..session import Model

_LOG = logging.getLogger(__name__)
ENDINGS = ("x", " 1", "\n")
"""What might be typed next: tokens that all of these leave as they are will stay."""


class Session:
    """One user turn that is put together by and by, then answered; the next turn may follow.

    From the first piece on, images are decoded and encoded and the prompt's settled beginning is prefilled in the
    background. The answer's tokens are those of the same request made at once: the images in the order in which they
    were pushed, then the text. One thread at a time may use a session.
    """

    def __init__(
        self, model: Model, history: Sequence[dict[str, Any]] = (), images: Sequence[ImageSource] = ()
    ) -> None:
        self._model = model
        self._history = list(history)
        self._earlier = [PushedImage(f"images[{number}]", source) for number, source in enumerate(images)]
        self._images: list[PushedImage] = []
        self._text = ""
        self._pushed = 0
        self._begin()

    def push_image(self, source: ImageSource) -> PushedImage:
        """Add an image behind those before it: path, bytes, PIL image or uint8 array."""
        return self._add(PushedImage(self._field(), source))

    def open_image(self) -> PushedImage:
        """Add an image whose bytes arrive in pieces: `push` them, then `close` it.

        What is no image, or too large, is refused as soon as its first bytes tell.
        """
        return self._add(PushedImage(self._field(), None, self._model.processor.config.max_image_pixels))

    def retract_image(self, image: PushedImage) -> None:
        """Take an image out again. Raises RequestError for one that is not there."""
        with self._background.lock:
            if image not in self._images:
                raise RequestError(f"{image.field}: it is not in the session any more")
            self._images.remove(image)
            self._change()

    def push_text(self, text: str) -> None:
        """Add to the text."""
        self.replace_text(self._text + text)

    def replace_text(self, text: str) -> None:
        """The text is this, whatever it was."""
        if not isinstance(text, str):
            raise RequestError(f"text: found a {type(text).__name__}; a str is expected")
        with self._background.lock:
            self._text = text
            self._change()

    def commit(self, **options: Any) -> Result:
        """Answer. Options are the fields of `Options`. Raises what the same request made at once would raise."""
        return self.stream(**options).result

    def stream(self, **options: Any) -> Stream:
        """As `commit`, giving the text piece by piece."""
        chosen = Options.make(options)
        began = time.perf_counter()
        self._background.stop()
        for image in (*self._earlier, *self._images):
            image.prepare(self._model.processor)
        turn = self._turn(self._text)
        (row,) = self._rows([turn], chosen, [*self._earlier, *self._images])
        row.stats.add("process", time.perf_counter() - began)
        cache, hidden = self._prefill.hand_over(row)
        self._tell(row, hidden)
        images, self._images, self._text, self._pushed = self._images, [], "", 0

        def pieces() -> Iterator[str]:
            with closing(generate(self._model.engines, [row], cache=cache)) as answering:
                yield from (piece for _, piece in answering if piece)
            self._history += [turn, {"role": "assistant", "content": row.result().text}]
            self._earlier += images

        self._begin()
        return Stream(row, pieces())

    def settle(self) -> None:
        """Wait until there is nothing left to do ahead."""
        self._background.settle()

    def cancel(self) -> None:
        """Forget the turn. Work in the background ends with the tile or chunk at hand."""
        self._background.stop()
        self._prefill.close()
        self._images, self._text, self._pushed = [], "", 0
        self._begin()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def _begin(self) -> None:
        self._background = Background(self._find, self._fail)
        self._prefill = Prefill(self._model.engines)
        self._goal: tuple[Row, int] | None = None
        self._stale = self._halted = False
        self._encoded: dict[bytes, float] = {}
        self._started: float | None = None
        self._first_tile: float | None = None

    def _field(self) -> str:
        self._pushed += 1
        return f"images[{self._pushed - 1 + len(self._earlier)}]"

    def _add(self, image: PushedImage) -> PushedImage:
        with self._background.lock:
            image.changed = self._change
            self._images.append(image)
            self._change()
        return image

    def _change(self) -> None:
        """The request is another one now."""
        with self._background.lock:
            self._started = self._started or time.perf_counter()
            self._stale, self._halted = True, False
            self._background.wake()

    def _fail(self, fault: Exception) -> None:
        """Whoever commits meets the fault again; until the request changes there is nothing to be done."""
        with self._background.lock:
            self._halted = True
        if not isinstance(fault, SpecEyesError):
            _LOG.warning("work ahead of a request failed", exc_info=fault)

    def _find(self) -> Unit | None:
        """What to do next: prepare images, encode tiles, tokenise, prefill what is settled."""
        images = [*self._earlier, *self._images]
        idle = not images and not self._text and not self._history
        if self._halted or idle or not self._model.pool.budget:
            return None
        for image in images:
            if image.whole and not image.prepared:
                return lambda image=image: image.prepare(self._model.processor)  # type: ignore[misc]
        if tile := self._next_tile(images):
            return lambda: self._encode(tile)
        if not all(image.prepared for image in images):
            return None
        if self._stale:
            return self._aim
        if self._goal is not None:
            row, limit = self._goal
            if self._prefill.wants(row.content, limit):
                return lambda: self._advance(row, limit)
        return None

    def _next_tile(self, images: Sequence[PushedImage]) -> Tile | None:
        if not self._model.sees:
            return None
        for image in images:
            prepared = image.prepared
            for number in encoding_order(prepared) if prepared else ():
                if prepared and prepared.tiles[number].digest not in self._encoded:
                    return prepared.tiles[number]
        return None

    def _encode(self, tile: Tile) -> None:
        vision, began = self._model.engines.vision, time.perf_counter()
        ran = vision is not None and vision.encode_ahead(tile)
        now = time.perf_counter()
        with self._background.lock:
            self._encoded[tile.digest] = now - began if ran else 0.0
            if self._first_tile is None and self._started is not None:
                self._first_tile = now - self._started

    def _aim(self) -> None:
        """Find out which beginning of the prompt will stay."""
        with self._background.lock:
            text, images, self._stale = self._text, [*self._earlier, *self._images], False
            if not all(image.prepared for image in images):
                return
            turns = [self._turn(text + ending) for ending in ENDINGS]
        rows = self._rows(turns, Options(max_new_tokens=1), images)
        with self._background.lock:
            self._goal = rows[0], min(rows[0].content.shared(row.content) for row in rows[1:])

    def _advance(self, row: Row, limit: int) -> None:
        if not self._prefill.advance(row, limit):
            with self._background.lock:
                self._halted = True

    def _rows(self, turns: Sequence[dict[str, Any]], options: Options, images: Sequence[PushedImage]) -> list[Row]:
        """The request with each of `turns` as its last message."""
        known = [image.prepared for image in images if image.prepared is not None]
        prompts = [self._model.processor.compose([*self._history, turn], known) for turn in turns]
        return [self._model.begin(prompt, options) for prompt in prompts]

    def _turn(self, text: str) -> dict[str, Any]:
        parts: list[dict[str, Any]] = [{"type": "image"} for _ in self._images]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}

    def _tell(self, row: Row, prefilled: float) -> None:
        """What was done ahead, and what of it was of no use."""
        used = {tile.digest for tile in row.prompt.tiles}
        useful = sum(seconds for digest, seconds in self._encoded.items() if digest in used)
        row.stats.hidden_seconds = useful + prefilled
        row.stats.wasted_seconds = sum(self._encoded.values()) - useful + self._prefill.wasted_seconds
        row.stats.first_tile_seconds = self._first_tile
