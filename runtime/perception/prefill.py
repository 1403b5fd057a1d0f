"""The beginning of a prompt in the cache before the prompt is complete."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ..cache import Cache
from ..generation import Engines, open_cache
from ..prefix import Content
from ..row import Row


@dataclass(frozen=True)
class _Span:
    """Tokens `start` to `stop` took so many seconds."""

    start: int
    stop: int
    seconds: float


class Prefill:
    """Runs a growing, changing prompt through the decoder, a chunk at a time; what turns out wrong is rolled back."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._cache: Cache | None = None
        self._content: Content | None = None
        self._spans: list[_Span] = []
        self.wasted_seconds = 0.0

    def length(self, content: Content) -> int:
        """How many of the first tokens of `content` are in the cache."""
        if self._cache is None or self._content is None:
            return 0
        return self._usable(min(self._content.shared(content), self._cache.lengths[0]))

    def wants(self, content: Content, limit: int) -> bool:
        """Whether a chunk can be run towards the first `limit` tokens."""
        decoder = self._engines.decoder
        return decoder.remembers and self.length(content) < limit and limit >= max(decoder.seams, default=0)

    def advance(self, row: Row, limit: int) -> bool:
        """Run the next chunk of the prompt of `row`, up to its token `limit`; False when features that it needs are no
        longer kept."""
        prompt, content, began = row.prompt, row.content, time.perf_counter()
        cache = self._open(row)
        start = cache.lengths[0]
        part = slice(start, min(limit, start + self._engines.prefill_chunk))
        index = prompt.feature_index[part]
        buffer = None
        if (index >= 0).any():
            needed = np.unique(content.tiles[part])
            vision = self._engines.vision
            features = vision.recall(prompt.tiles, needed[needed >= 0].tolist()) if vision else None
            if features is None:
                return False
            buffer = features.buffer
        ids, positions = prompt.token_ids[part], prompt.position_ids[..., part]
        cache.prefill(0, ids, positions, index, buffer, self._engines.prefill_chunk)
        self._content = content.cut(part.stop)
        self._spans.append(_Span(part.start, part.stop, time.perf_counter() - began))
        return True

    def hand_over(self, row: Row) -> tuple[Cache, float]:
        """A cache for `row`, with what is there of its prompt, and the seconds that this took before."""
        decoder = self._engines.decoder
        with decoder.lock:
            self.close(keep=len(row.content) - 1, content=row.content)
            return open_cache(self._engines, [row]), sum(span.seconds for span in self._spans)

    def close(self, keep: int = 0, content: Content | None = None) -> None:
        """Give the cache back; other requests may begin alike. `keep`, `content`: of what is useful now."""
        useful = min(self.length(content), keep) if content else 0
        if self._cache is not None:
            held = {0: self._content.cut(self._cache.lengths[0])} if self._content else {}
            self._engines.decoder.close(self._cache, held)
            self._cache = None
        self._waste(useful)

    def _open(self, row: Row) -> Cache:
        """The cache, with the most of the row's prompt in it and nothing else."""
        needed = len(row.content) + self._engines.speculator.settings.window_size
        if self._cache is not None and needed > self._cache.capacity:
            self.close(len(row.content), row.content)
        if self._cache is None:
            self._cache = open_cache(self._engines, [row], spare=_ROOM)
            self._content = row.content.cut(self._cache.lengths[0])
            return self._cache
        length = self.length(row.content)
        if length < self._cache.lengths[0]:
            self._cache.rewind(0, length)
            self._waste(length)
        return self._cache

    def _usable(self, length: int) -> int:
        """Tokens of an earlier first step have the bits of a fresh prefill only from beyond the last seam."""
        return length if length >= max(self._engines.decoder.seams, default=0) else 0

    def _waste(self, length: int) -> None:
        """Only the first `length` tokens were of use."""
        kept = []
        for span in self._spans:
            useful = min(max(length - span.start, 0), span.stop - span.start)
            seconds = span.seconds * useful / (span.stop - span.start)
            self.wasted_seconds += span.seconds - seconds
            if useful:
                kept.append(_Span(span.start, span.start + useful, seconds))
        self._spans = kept


_ROOM = 512
"""Tokens that a prompt may grow by, and be answered with, before a larger cache is needed."""
