"""What a drafted token costs."""

import time

import numpy as np

from ...engines.engine import Engine
from ..measure import milliseconds
from ..recipe import Measure

ROWS = (1, 2, 4)
_FEATURES = 64


def measure_predictor(engine: Engine, measure: Measure) -> dict[str, float]:
    """Milliseconds of one drafted token by rows (requests drafted for at once), with 64 image features each."""
    found = {}
    for rows in ROWS:
        sizes = {"rows": rows, "features": _FEATURES}
        buffers = {
            name: engine.allocate([size if isinstance(size, int) else sizes[size] for size in spec.shape], spec.dtype)
            for name, spec in {**engine.inputs, **engine.outputs}.items()
        }
        if "lengths" in buffers:
            buffers["lengths"].array[:] = np.full(rows, _FEATURES)
        step, seconds = engine.bind(buffers), []
        for repeat in range(measure.repeats + 1):
            began = time.perf_counter()
            step.run()
            if repeat:
                seconds.append(time.perf_counter() - began)
        found[str(rows)] = milliseconds(seconds)
    return found
