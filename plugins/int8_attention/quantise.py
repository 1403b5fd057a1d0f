"""Grouped symmetric int8: what the cache and the store of vision features keep."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.int8]

LEVELS = 127
SMALLEST = np.float32(LEVELS * np.finfo(np.float32).tiny)
"""Groups whose largest magnitude is below it count as zero: a scale must not be subnormal."""


class Packed(NamedTuple):
    """`codes` int8 [..., channels] and `scales` float32 [..., groups]; a value is its code times its group's scale."""

    codes: Codes
    scales: Floats

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def quantise(values: Floats, groups: int = 1) -> Packed:
    """Round `values` [..., channels] to int8, with one scale for each of `groups` equal parts of the last axis.

    With a the largest magnitude of a group: s = a / 127, or 1 for a group of zeros, and q = rint(x / s), half to even.
    The error is at most s / 2. Raises ValueError when the channels do not divide by `groups`, and for NaN or infinity.
    """
    channels = values.shape[-1]
    if groups < 1 or channels % groups:
        raise ValueError(f"quant_groups: found {groups}; a divisor of the {channels} channels is needed")
    if not np.isfinite(values).all():
        raise ValueError("values: found NaN or infinity, which int8 cannot hold; find where the model overflows")
    grouped = values.astype(np.float32).reshape(*values.shape[:-1], groups, channels // groups)
    largest = np.abs(grouped).max(-1, initial=0)
    scales = np.where(largest < SMALLEST, np.float32(1), largest / np.float32(LEVELS))
    codes = np.rint(grouped / scales[..., None]).clip(-LEVELS, LEVELS).astype(np.int8)
    return Packed(codes.reshape(values.shape), scales)


def dequantise(packed: Packed) -> Floats:
    """The values [..., channels] in float32."""
    codes, scales = packed
    grouped = codes.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None]
    values: Floats = grouped.reshape(codes.shape)
    return values
