"""What a pass of the decoder takes, by its tokens."""

import time
from collections.abc import Sequence

import numpy as np

from .decoder import Decoder

BLOCK = 5
QUANTILE = 0.25


def time_passes(
    decoder: Decoder, widths: Sequence[int], past: int, repeats: int, budget: float = float("inf")
) -> dict[int, float]:
    """Seconds of a pass over one sequence, all logits wanted, by width, with `past` tokens of zeros in the cache.

    Passes of a width follow each other in blocks, as plain decoding's do, and find the processor's caches warm; the
    widths take turns, so that a busy moment of the machine falls on all of them alike. The lower quartile is taken:
    what else the machine does only ever adds time. Once `budget` seconds are spent, each width has one more run at
    most.
    """
    cache = decoder.open(1, past + max(widths))
    cache.lengths[0] = past
    found: dict[int, list[float]] = {width: [] for width in widths}
    start = time.perf_counter()
    for first in range(0, repeats, BLOCK):
        for width in widths:
            cache.advance([[0] * width], [past], every=True)
            cache.rewind(0, past)
            for _ in range(min(BLOCK, repeats - first)):
                began = time.perf_counter()
                if found[width] and began - start > budget:
                    break
                cache.advance([[0] * width], [past], every=True)
                found[width].append(time.perf_counter() - began)
                cache.rewind(0, past)
        if time.perf_counter() - start > budget:
            break
    return {width: float(np.quantile(seconds, QUANTILE)) for width, seconds in found.items()}
