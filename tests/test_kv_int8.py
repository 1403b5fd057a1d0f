"""The decoder over an int8 cache: near the fp32 one, the same bits at every width, the memory as allocated."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from speceyes.compile.lowering.int8_cache import CHUNK
from speceyes.engines.errors import LoweringError

from .checkpoints import MAKERS, exported
from .lowered import logits, lowered

FAMILIES = list(MAKERS)
LENGTHS = (21, 9, 14)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_int8_cache_costs_less_than_int8_weights(family: str) -> None:
    exact = np.concatenate(logits(family, "fp32", LENGTHS, [4, 2, 8]))
    cache, weights = (
        np.linalg.norm(np.concatenate(logits(family, precision, LENGTHS, [4, 2, 8], kv=kv)) - exact)
        for precision, kv in (("fp32", "int8"), ("int8", "fp32"))
    )
    assert 0 < cache < 0.75 * weights


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_width_gives_the_same_bits(family: str, precision: str, threads: int) -> None:
    (alone,) = logits(family, precision, LENGTHS[:1], [LENGTHS[0]], seed=6, kv="int8")
    for seed, widths in enumerate([[2], [3, 5], [4], [8, 2, 16], [32]]):
        together = logits(family, precision, LENGTHS, widths, seed=seed, threads=threads, kv="int8")
        np.testing.assert_array_equal(together[0], alone)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2_sliding", "gemma3_text"])
def test_long_texts_keep_their_bits_across_chunks(family: str, threads: int) -> None:
    """Steps that reach from one chunk of slots into the next, with one or several heads of keys for the threads."""
    (narrow,) = logits(family, "int8", (3 * CHUNK - 20,), [2], seed=5, kv="int8")
    for widths in ([34], [7], [CHUNK]):
        wide = logits(family, "int8", (3 * CHUNK - 20, 30), widths, threads=threads, kv="int8")
        np.testing.assert_array_equal(wide[0], narrow)


@pytest.mark.parametrize("family", ["idefics3", "gemma3_text"])
def test_caches_are_int8_with_a_scale_for_each_token_and_head(family: str) -> None:
    model = lowered(family, "decoder", "int8", "int8")
    layers, kv_heads = exported(family).checkpoint.layers, None
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    assert not {"mask", "kv_length"} & set(inputs)
    for kind in "kv":
        for layer in range(layers):
            for held, name in ((inputs, f"cache_{kind}"), (outputs, f"present_{kind}")):
                codes, scales = held[f"{name}.{layer}"], held[f"{name}_scale.{layer}"]
                assert codes.dtype == ir.DataType.INT8 and scales.dtype == ir.DataType.FLOAT
                assert list(scales.shape[:3]) == list(codes.shape[:3]) and scales.shape[3] == 1
                kv_heads = codes.shape[1]
    assert isinstance(kv_heads, int)
    found = {node.op_type for node in model.graph}
    assert "MatMulIntegerToFloat" in found and "GroupQueryAttention" not in found


def test_another_cache_is_refused() -> None:
    with pytest.raises(LoweringError, match="kv: found 'int4'; allowed are fp32, int8"):
        lowered("llama", "decoder", "int8", "int4")
