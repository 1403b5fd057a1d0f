"""What a drafted token costs."""

import time

import numpy as np

from ...engines.engine import Engine
from ..measure import milliseconds
from ..recipe import Measure

ROWS = (1, 2, 4)
_SIZES = {"window": 8, "features": 64}


def measure_predictor(engine: Engine, measure: Measure) -> dict[str, float]:
    """Milliseconds of a drafted token by rows (requests drafted for at once), in drafts of 8 beside 64 features."""
    found = {}
    for rows in ROWS:
        sizes = {"rows": rows, **_SIZES}
        buffers = {
            name: engine.allocate([size if isinstance(size, int) else sizes[size] for size in spec.shape], spec.dtype)
            for name, spec in {**engine.inputs, **engine.outputs}.items()
        }
        buffers["window"].array[...] = np.array(_SIZES["window"])
        if "lengths" in buffers:
            buffers["lengths"].array[:] = np.full(rows, _SIZES["features"])
        step, seconds = engine.bind(buffers), []
        for repeat in range(measure.repeats + 1):
            began = time.perf_counter()
            step.run()
            if repeat:
                seconds.append((time.perf_counter() - began) / _SIZES["window"])
        found[str(rows)] = milliseconds(seconds)
    return found
