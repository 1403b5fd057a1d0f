"""The caches of a pack are fp32; an engine over int8 caches takes them rounded and gives them back widened."""

from collections.abc import Mapping

import numpy as np

from ...engines.engine import Array, TensorSpec
from ...plugins.int8_attention.operator import CHUNK
from ...plugins.int8_attention.quantise import Packed, dequantise, quantise

SCALE = "_scale."
"""In the name of the tensor with an int8 cache's scales."""


def round_caches(feed: Mapping[str, Array], inputs: Mapping[str, TensorSpec]) -> dict[str, Array]:
    """`feed` with codes and scales where `inputs` has int8 caches, which have whole chunks of slots."""
    found = dict(feed)
    for name in inputs:
        if SCALE in name:
            cache = name.replace(SCALE, ".")
            values = feed[cache].astype(np.float32)
            packed = quantise(np.pad(values, ((0, 0), (0, 0), (0, -values.shape[2] % CHUNK), (0, 0))))
            found |= {cache: packed.codes, name: packed.scales}
    return found


def widen_caches(outputs: Mapping[str, Array], feed: Mapping[str, Array]) -> dict[str, Array]:
    """`outputs` with float32 caches in place of codes and scales, of as many slots as those of `feed`."""
    found = {name: array for name, array in outputs.items() if SCALE not in name}
    for name, scales in outputs.items():
        if SCALE in name:
            cache = name.replace(SCALE, ".")
            slots = feed[cache.replace("present_", "cache_")].shape[2]
            packed = Packed(outputs[cache].view(np.int8), scales.view(np.float32))
            found[cache] = dequantise(packed)[:, :, :slots]
    return found
