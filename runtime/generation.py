"""The decode loop: prefill every row, then step all unfinished rows together until each has ended."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..engines.engine import Buffer
from .decoder import Cache, Decoder, Ids, Logits
from .options import Options
from .processing.prompt import Prompt
from .processing.stream import StopMatcher, TextStream
from .processing.text import Tokenizer
from .results import FinishReason, Result, Statistics
from .sampling import choose
from .vision import Vision


@dataclass(frozen=True)
class Engines:
    """What the loop runs on. `prefill_chunk` bounds the activations of a long prompt."""

    decoder: Decoder
    vision: Vision | None
    tokenizer: Tokenizer
    eos: frozenset[int]
    prefill_chunk: int = 512


class Row:
    """One request on its way: what was asked, what was chosen so far, and the text that may leave."""

    def __init__(self, prompt: Prompt, options: Options, engines: Engines) -> None:
        self.prompt, self.options, self._eos = prompt, options, engines.eos
        self.seed = secrets.randbits(63) if options.seed is None else options.seed
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.finish: FinishReason | None = None
        self.stats = Statistics(len(prompt.token_ids), int((prompt.feature_index >= 0).sum()), len(prompt.tiles))
        self._text = TextStream(engines.tokenizer)
        self._stop = StopMatcher(options.stop)
        self._seen = np.zeros(engines.decoder.model.vocabulary, np.bool_)
        self._seen[prompt.token_ids] = True

    def accept(self, logits: Logits) -> str:
        """Choose the next token from `logits` [vocabulary]; give the text that is settled by it."""
        token = choose(logits, self.options, self._seen, self.seed, len(self.tokens))
        self.tokens.append(token)
        self._seen[token] = True
        self.stats.new_tokens += 1
        if token in self._eos:
            return self.end("stop")
        piece, stopped = self._stop.push(self._text.push(token))
        if stopped:
            self.finish = "stop"
        self.pieces.append(piece)
        if not stopped and len(self.tokens) == self.options.max_new_tokens:
            return piece + self.end("length")
        return piece

    def end(self, reason: FinishReason) -> str:
        """Close the row; give the text that was held back."""
        piece, stopped = self._stop.push(self._text.finish())
        if not stopped:
            piece += self._stop.finish()
        self.finish = reason
        self.pieces.append(piece)
        return piece

    @property
    def position(self) -> int:
        """Position of the last chosen token, which the next pass appends."""
        return self.prompt.next_position + len(self.tokens) - 1

    def result(self) -> Result:
        return Result("".join(self.pieces), tuple(self.tokens), self.finish or "cancelled", self.seed, self.stats)


def generate(engines: Engines, rows: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Answer all rows; yields (row, text) whenever text of a row is settled. Closing the iterator cancels."""
    decoder = engines.decoder
    longest = max(len(row.prompt.token_ids) + row.options.max_new_tokens for row in rows)
    cache = decoder.open(len(rows), longest)
    try:
        for slot, row in enumerate(rows):
            row.stats.cache_bytes = cache.nbytes // len(rows)
            yield row, row.accept(_prefill(engines, cache, slot, row))
        yield from _decode(cache, list(rows))
    finally:
        for row in rows:
            if row.finish is None:
                row.end("cancelled")


def _prefill(engines: Engines, cache: Cache, slot: int, row: Row) -> Logits:
    prompt, began = row.prompt, time.perf_counter()
    features: Buffer | None = None
    if prompt.tiles and engines.vision is not None:
        features = engines.vision.encode(prompt.tiles)
        began = _clock(row, "vision", began)
    logits, _ = cache.prefill(
        slot, prompt.token_ids, prompt.position_ids, prompt.feature_index, features, engines.prefill_chunk
    )
    _clock(row, "prefill", began)
    return logits


def _decode(cache: Cache, active: list[Row]) -> Iterator[tuple[Row, str]]:
    mrope = active[0].prompt.position_ids.ndim == 2
    began = time.perf_counter()
    while _drop_finished(cache, active):
        ids: Ids = np.array([[row.tokens[-1]] for row in active])
        positions: Ids = np.array([[row.position] for row in active])
        if mrope:
            positions = np.broadcast_to(positions, (3, *positions.shape))
        logits, _ = cache.forward(ids, positions, np.ones(len(active), np.int64))
        pieces = [(row, row.accept(logits[slot])) for slot, row in enumerate(active)]
        now = time.perf_counter()
        for row in active:
            row.stats.add("decode", now - began)
        began = now
        yield from pieces


def _drop_finished(cache: Cache, active: list[Row]) -> bool:
    """Fill the slots of finished rows with the last ones, so that a pass runs unfinished rows alone."""
    for slot in reversed(range(len(active))):
        if active[slot].finish is not None:
            last = active.pop()
            if slot < len(active):
                active[slot] = last
                cache.move(len(active), slot)
    return bool(active)


def _clock(row: Row, stage: str, began: float) -> float:
    now = time.perf_counter()
    row.stats.add(stage, now - began)
    return now
