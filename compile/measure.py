"""What a step costs: the decoder by token rows, the vision part by tile."""

import time

import numpy as np

from ..engines.engine import Engine
from ..engines.manifest import ModelEntry
from ..runtime.decoder import PREFILL_CHUNK, Decoder
from ..runtime.processing.prompt import Tile
from ..runtime.vision import Vision
from .recipe import Measure

# Below the median: what else the machine does only ever adds time.
QUANTILE = 0.25


def measure_decoder(engine: Engine, model: ModelEntry, measure: Measure) -> dict[str, float]:
    """Milliseconds of one step by width, all logits wanted, after `past` tokens (fewer if the context is short).

    The widths take turns, so that a busy moment of the machine falls on all of them alike.
    """
    past = min(measure.past, model.context_length - max(measure.widths))
    cache = Decoder(engine, model, min_width=1).open(1, past + max(measure.widths))
    components = (3,) if model.rope == "mrope" else ()
    if past:
        positions = np.broadcast_to(np.arange(past), (*components, past)).copy()
        cache.prefill(0, np.zeros(past, np.int64), positions, np.full(past, -1), None, chunk=PREFILL_CHUNK)
    seconds: dict[int, list[float]] = {width: [] for width in measure.widths}
    for repeat in range(measure.repeats + 1):
        for width in measure.widths:
            began = time.perf_counter()
            cache.advance([[0] * width], [past], every=True)
            if repeat:
                seconds[width].append(time.perf_counter() - began)
            cache.rewind(0, past)
    return {str(width): milliseconds(found) for width, found in seconds.items()}


def measure_vision(engine: Engine, model: ModelEntry, tile: Tile, measure: Measure) -> dict[str, float]:
    """Milliseconds of one tile, under the key "1"."""
    vision, seconds = Vision(engine, model.hidden), []
    for repeat in range(measure.tile_repeats + 1):
        began = time.perf_counter()
        vision.encode([tile])
        if repeat:
            seconds.append(time.perf_counter() - began)
    return {"1": milliseconds(seconds)}


def milliseconds(seconds: list[float]) -> float:
    """The lower quartile of measured seconds, in milliseconds."""
    return round(float(np.quantile(seconds, QUANTILE)) * 1e3, 4)
