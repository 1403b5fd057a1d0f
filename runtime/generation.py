"""From rows to answers: encode the images and prefill every row, then decode them together."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from .cache import Cache, Logits, Output
from .decoder import PREFILL_CHUNK, Decoder
from .rounds import Rounds
from .row import Row
from .speculation.acceptance import accept
from .speculation.journal import Journal
from .speculation.speculator import Speculator
from .vision import Features, Vision


@dataclass(frozen=True)
class Engines:
    """What the loop runs on. `prefill_chunk` bounds the activations of a long prompt."""

    decoder: Decoder
    vision: Vision | None
    speculator: Speculator
    prefill_chunk: int = PREFILL_CHUNK


def generate(
    engines: Engines, rows: Sequence[Row], journal: Journal | None = None, cache: Cache | None = None
) -> Generator[tuple[Row, str]]:
    """Answer all rows; yields (row, text) whenever text of a row is settled. Closing the iterator cancels.

    `cache`: one that `open_cache` made for these rows, with beginnings of their prompts in it.
    """
    cache = cache or open_cache(engines, rows)
    window = engines.speculator.settings.window_size
    rounds = Rounds(cache, list(rows), engines.speculator, journal or Journal(), window)
    try:
        for number, row in enumerate(rows):
            row.number = number
            row.stats.cache_bytes = cache.nbytes // len(rows)
            logits, hidden = _prefill(engines, cache, number, row)
            first = accept([()], [logits[None]], row.chooser())
            yield row, row.commit(first.tokens, hidden[None]).text
        yield from rounds.run()
    finally:
        held = rounds.held() if engines.decoder.remembers else {}
        for row in rows:
            if row.finish is None:
                row.end("cancelled")
            # One that ended with the last piece was not dropped yet.
            if row.speculation is not None:
                engines.speculator.release(row.speculation)
        engines.decoder.close(cache, held)


def open_cache(engines: Engines, rows: Sequence[Row], spare: int = 0) -> Cache:
    """A cache for these rows, their branches, and prompts that may still grow by `spare` tokens.

    It holds as much of the prompts as closed caches held.
    """
    settings = engines.speculator.settings
    branches = settings.max_parallel if settings.enabled else 1
    longest = max(len(row.prompt.token_ids) + row.options.max_new_tokens for row in rows)
    wanted = [row.content for row in rows] if engines.decoder.remembers else []
    return engines.decoder.open(branches * len(rows), longest + settings.window_size + spare, wanted)


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
    start = cache.lengths[slot]
    features: Features | None = None
    if prompt.tiles and engines.vision is not None:
        seen = bool((prompt.feature_index[start:] >= 0).any())
        features = engines.vision.encode(prompt.tiles) if seen else engines.vision.recall(prompt.tiles)
        row.stats.reused_tiles += features.found if features and seen else len(prompt.tiles)
        began = _clock(row, "vision", began)
    row.stats.reused_tokens = start
    buffer = features.buffer if features else None
    ids, index = prompt.token_ids[start:], prompt.feature_index[start:]
    output = cache.prefill(slot, ids, prompt.position_ids[..., start:], index, buffer, engines.prefill_chunk)
    if row.options.speculate and engines.speculator.settings.enabled:
        row.follow(engines.speculator.open(prompt, features.array if features else None))
    _clock(row, "prefill", began)
    return output


def _clock(row: Row, stage: str, began: float) -> float:
    now = time.perf_counter()
    row.stats.add(stage, now - began)
    return now
