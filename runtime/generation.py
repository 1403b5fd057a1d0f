"""From rows to answers: encode the images and prefill every row, then decode them together."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..engines.engine import Buffer
from .decoder import PREFILL_CHUNK, Cache, Decoder, Logits, Output
from .rounds import Rounds
from .row import Row
from .speculation.acceptance import accept
from .speculation.journal import Journal
from .speculation.speculator import Speculator
from .vision import Vision


@dataclass(frozen=True)
class Engines:
    """What the loop runs on. `prefill_chunk` bounds the activations of a long prompt."""

    decoder: Decoder
    vision: Vision | None
    speculator: Speculator
    prefill_chunk: int = PREFILL_CHUNK


def generate(engines: Engines, rows: Sequence[Row], journal: Journal | None = None) -> Iterator[tuple[Row, str]]:
    """Answer all rows; yields (row, text) whenever text of a row is settled. Closing the iterator cancels."""
    settings = engines.speculator.settings
    branches = settings.max_parallel if settings.enabled else 1
    longest = max(len(row.prompt.token_ids) + row.options.max_new_tokens for row in rows)
    cache = engines.decoder.open(branches * len(rows), longest + settings.window_size)
    try:
        for number, row in enumerate(rows):
            row.number = number
            row.stats.cache_bytes = cache.nbytes // len(rows)
            logits, hidden = _prefill(engines, cache, number, row)
            first = accept([()], [logits[None]], row.chooser())
            yield row, row.commit(first.tokens, hidden[None]).text
        yield from Rounds(cache, list(rows), engines.speculator, journal or Journal(), settings.window_size).run()
    finally:
        for row in rows:
            if row.finish is None:
                row.end("cancelled")
                if row.speculation is not None:
                    engines.speculator.count(row.speculation)
        engines.decoder.close(cache)


def score(engines: Engines, row: Row, answer: Sequence[int]) -> Logits:
    """Logits float32 [vocabulary] after the prompt of `row` and the tokens of `answer`."""
    cache = engines.decoder.open(1, len(row.prompt.token_ids) + len(answer) + 1)
    try:
        logits = _prefill(engines, cache, 0, row).logits
        for index, token in enumerate(answer):
            logits = cache.advance([[token]], [row.prompt.next_position + index]).logits[0]
        return logits.copy()
    finally:
        engines.decoder.close(cache)


def _prefill(engines: Engines, cache: Cache, slot: int, row: Row) -> Output:
    prompt, began = row.prompt, time.perf_counter()
    features: Buffer | None = None
    if prompt.tiles and engines.vision is not None:
        features = engines.vision.encode(prompt.tiles)
        began = _clock(row, "vision", began)
    output = cache.prefill(
        slot, prompt.token_ids, prompt.position_ids, prompt.feature_index, features, engines.prefill_chunk
    )
    if row.options.speculate and engines.speculator.settings.enabled:
        row.follow(engines.speculator.open(prompt, None if features is None else features.array.view(np.float32)))
    _clock(row, "prefill", began)
    return output


def _clock(row: Row, stage: str, began: float) -> float:
    now = time.perf_counter()
    row.stats.add(stage, now - began)
    return now
