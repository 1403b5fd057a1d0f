"""How far results may be apart, derived: int8 from exact attention, and one form of the operator from another."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .quantise import LEVELS, Floats, Packed, dequantise, quantise

Half = Literal["fp16", "bf16"]

UNITS = {"fp16": 2.0**-11, "bf16": 2.0**-8}
UNIT = 2.0**-24
"""The largest relative error of one rounding to fp32."""

EXP = 8
"""Relative error of an fp32 exp in UNITs: 4 units in the last place, more than numpy, MLAS and CUDA document."""


def error_bound(query: Floats, keys: Floats, values: Floats, scale: float, groups: int = 1) -> float:
    """How far a channel of one token and head may be from attention over the exact `keys` and `values`.

    `query` [head_dim]; `keys`, less their center, and `values` [seen, head_dim]. Holds for exact sums; those of fp32
    add `rounding_bound`.

    - Rounding moves a channel of a key by at most half its scale s, and roundings of fp32 (x − center, then x / s) add
      less than 2 · 127 · UNIT · s. A score so moves by at most E = |scale| · max Σ |q| s (1/2 + 254 UNIT).
    - Weights p are then p' with |ln(p'/p)| within E before they are normalised, so they differ by at most
      Σ |p' − p| / 2 ≤ tanh(E / 2). As both sum to 1, the result moves by at most tanh(E / 2) · (max v − min v).
    - Rounded values move it by at most s (1/2 + 254 UNIT) of the value more.

    For small E the bound is reached, by two keys that are rounded in opposite directions along the query.
    """
    step = 0.5 + 2 * LEVELS * UNIT
    channels = query.shape[-1] // groups
    key_steps, value_steps = (step * np.repeat(quantise(x, groups).scales, channels, -1) for x in (keys, values))
    moved = abs(scale) * float((np.abs(query) * key_steps).sum(-1).max())
    spread = float((values.max(0) - values.min(0)).max())
    return float(np.tanh(moved / 2) * spread + value_steps.max())


def rounding_bound(
    query: Floats, keys: Packed, values: Packed, mask: NDArray[np.bool_], scale: float, half: Half | None = None
) -> NDArray[np.float64]:
    """How far a form may be from exact sums over the same codes, [batch, width, heads]; two forms twice as far.

    Arguments as of the operator, `keys` and `values` being its present codes and scales. With u = UNIT, D channels,
    n slots seen, S the largest |scale| · Σ |q| |k| and V the largest |v| among them:

    - A score takes D + 2 roundings, of terms that sum to S; the highest is subtracted once, and differences of running
      maxima, which only rise, sum to 2 S at most: 4 u S. Each of at most n + 1 exps is off by EXP u. The logarithm of a
      weight is off by L = (D + 6) u S + (n + 1) EXP u, alike above and below the fraction line, which moves the result
      by at most 2 V tanh(L / 2), as in `error_bound`.
    - n additions, n products with what a higher maximum shrinks, 2 with a value and its scale, above and below, and one
      division: a factor within exp(±2 R), R = (2 n + 4) u, so at most (exp(2 R) − 1) V.

    With `half`, of unit h, keys, values and scores pass through that type, and sums stay in fp32. The standard
    multiplies both query and key with √scale, so L has 8 h S more: 2 roundings of √scale, 2 of those products, the
    key's own and the score's, and that of the highest, subtracted, 2 h S. R has 5 h more: the value, the weight, their
    sum, the quotient and the result.
    """
    head_dim = keys.codes.shape[-1]
    batch, width, _ = query.shape
    asked = np.abs(query.astype(np.float64)).reshape(batch, width, keys.codes.shape[1], -1, head_dim)
    seen = mask[:, 0, :, None, None]
    scores = np.einsum("bwhed,bhsd->bwhes", asked, np.abs(dequantise(keys)))
    largest = abs(scale) * np.where(seen, scores, 0).max(-1)
    tallest = np.where(seen, np.abs(dequantise(values)).max(-1)[:, None, :, None], 0).max(-1)
    count = seen.sum(-1)
    unit = UNITS[half] if half else 0.0
    logarithm = (head_dim + 6) * UNIT * largest + (count + 1) * EXP * UNIT + 8 * unit * largest
    factor = (2 * count + 4) * UNIT + 5 * unit
    bound: NDArray[np.float64] = tallest * (2 * np.tanh(logarithm / 2) + np.expm1(2 * factor))
    return bound.reshape(batch, width, -1)
