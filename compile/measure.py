"""What a step costs: the decoder by token rows, the vision part by tile."""

import time

import numpy as np

from ..engines.engine import Engine
from ..engines.manifest import ModelEntry
from ..runtime.clock import QUANTILE, time_passes
from ..runtime.decoder import Decoder
from ..runtime.processing.prompt import Tile
from ..runtime.vision import Vision
from .recipe import Measure


def measure_decoder(engine: Engine, model: ModelEntry, measure: Measure) -> dict[str, float]:
    """Milliseconds of one step by width, all logits wanted, after `past` tokens (fewer if the context is short)."""
    past = min(measure.past, model.context_length - max(measure.widths))
    seconds = time_passes(Decoder(engine, model, min_width=1), measure.widths, past, measure.repeats)
    return {str(width): round(found * 1e3, 4) for width, found in seconds.items()}


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
