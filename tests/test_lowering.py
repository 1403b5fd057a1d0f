"""Lowered decoders: numerics against the canonical graph, the same bits at every width, refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from speceyes.compile.export import save_graph
from speceyes.compile.lowering import MIN_WIDTH, PRECISIONS, lower
from speceyes.engines.errors import LoweringError
from speceyes.engines.onnxruntime import OnnxRuntimeEngine

from .checkpoints import MAKERS, exported
from .lowered import layer_graph, logits, lowered

FAMILIES = list(MAKERS)
TEXT = "llama"
LENGTHS = (21, 9, 14)


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def distance(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Relative error over all logits."""
    a, b = np.concatenate(actual), np.concatenate(expected)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_equals_the_canonical_graph_in_ragged_steps(family: str) -> None:
    expected = logits(family, None, LENGTHS, [4, 2, 8])
    for actual, reference in zip(logits(family, "fp32", LENGTHS, [8, 3, 2, 1]), expected, strict=True):
        np.testing.assert_allclose(actual, reference, rtol=0, atol=1e-5 * float(np.abs(reference).max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_is_near_and_int4_farther(family: str) -> None:
    expected = logits(family, None, LENGTHS, [8])
    int8 = distance(logits(family, "int8", LENGTHS, [8]), expected)
    int4 = distance(logits(family, "int4", LENGTHS, [8]), expected)
    assert 0 < int8 < 0.25 * int4
    assert int4 < 1


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS["decoder"])
@pytest.mark.parametrize("family", ["idefics3", "qwen2_sliding", "gemma3_text"])
def test_every_width_gives_the_same_bits(family: str, precision: str, threads: int) -> None:
    """Ragged batches with padding, and rows without a single real token, against one text alone in one step."""
    (alone,) = logits(family, precision, LENGTHS[:1], [LENGTHS[0]], seed=6)
    for seed, widths in enumerate([[2], [3, 5], [4], [8, 2, 16], [32]]):
        together = logits(family, precision, LENGTHS, widths, seed=seed, threads=threads)
        np.testing.assert_array_equal(together[0], alone)
    assert MIN_WIDTH["decoder"] == 2


@pytest.mark.parametrize("precision", PRECISIONS["decoder"])
def test_long_steps_of_even_width_give_the_same_bits(precision: str) -> None:
    (narrow,) = logits(TEXT, precision, (150,), [2])
    for widths in ([34], [64], [130]):
        np.testing.assert_array_equal(logits(TEXT, precision, (150,), widths, threads=2)[0], narrow)


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_has_no_fp32_product_left(family: str) -> None:
    model = lowered(family, "decoder", "int8")
    layers = exported(family).checkpoint.layers
    found = operators(model)
    assert found["GroupQueryAttention"] == layers
    assert found["MatMulIntegerToFloat"] == 4 * layers + 1
    assert found["GatherBlockQuantized"] == 1
    assert found["MatMul"] == found["Gemm"] == found["CachedAttention"] == 0
    matrices = [v for v in model.graph.initializers.values() if len(v.shape or ()) == 2]
    kept = [v.name for v in matrices if v.dtype == ir.DataType.FLOAT and "block_scale" not in str(v.name)]
    assert kept == (["text_model.wpe.weight"] if family == "gpt2" else [])


def test_int4_keeps_the_head_in_int8() -> None:
    found = operators(lowered(TEXT, "decoder", "int4"))
    assert found["MatMulNBits"] == 4 * exported(TEXT).checkpoint.layers
    assert found["MatMulIntegerToFloat"] == 1


def test_the_mask_goes_and_the_other_inputs_stay() -> None:
    before = [value.name for value in exported("idefics3").parts["decoder"].graph.inputs]
    for precision in PRECISIONS["decoder"]:
        after = [value.name for value in lowered("idefics3", "decoder", precision).graph.inputs]
        assert after == [name for name in before if name != "mask"]


@pytest.mark.parametrize("precision", PRECISIONS["decoder"])
def test_lowering_is_deterministic(precision: str) -> None:
    again = lower(exported(TEXT).parts["decoder"].clone(), "decoder", precision)
    first, second = (
        ir.serde.serialize_model(m).SerializeToString() for m in (lowered(TEXT, "decoder", precision), again)
    )
    assert first == second


@pytest.mark.parametrize("precision", PRECISIONS["decoder"])
def test_cache_buffers_bound_as_input_and_output_at_once(precision: str, tmp_path: Path) -> None:
    """The way the runtime works: present and past are one buffer, and only the new slots change."""
    engine = OnnxRuntimeEngine(
        save_graph(lowered(TEXT, "decoder", precision).clone(), tmp_path / "decoder.onnx"), threads=1
    )
    rng, rows, width, capacity = np.random.default_rng(0), 2, 4, 16
    sizes = {"batch": rows, "width": width, "capacity": capacity, "rows": rows * width}
    buffers = {}
    for name, spec in {**engine.inputs, **engine.outputs}.items():
        if not name.startswith("present"):
            buffers[name] = engine.allocate([d if isinstance(d, int) else sizes[d] for d in spec.shape], spec.dtype)
    buffers["input_ids"].array[:] = rng.integers(0, 300, (rows, width))
    buffers["position_ids"].array[:] = np.arange(width) + 5
    buffers["write_index"].array[:] = 5, 3
    buffers["kv_length"].array[:] = 9, 5
    buffers["logit_index"].array[:] = np.arange(rows * width)
    caches = [name for name in buffers if name.startswith("cache")]
    for name in caches:
        buffers[name].array[:] = rng.standard_normal(buffers[name].shape)
        buffers[name.replace("cache", "present")] = buffers[name]
    before = {name: buffers[name].array.copy() for name in caches}
    engine.bind(buffers).run()
    for name in caches:
        changed = (buffers[name].array != before[name]).any(axis=(1, 3))
        np.testing.assert_array_equal(np.flatnonzero(changed[0]), [5, 6, 7, 8])
        np.testing.assert_array_equal(np.flatnonzero(changed[1]), [3, 4, 5, 6])
    engine.close()


def test_attributes_without_a_counterpart_are_refused() -> None:
    model = exported(TEXT).parts["decoder"].clone()
    node = next(node for node in model.graph if node.op_type == "CachedAttention")
    node.attributes["sinks"] = ir.AttrInt64("sinks", 4)
    with pytest.raises(LoweringError, match=r"self_attn/CachedAttention.*rule attention.*'sinks'"):
        lower(model, "decoder", "fp32")


def test_operators_of_other_domains_are_refused() -> None:
    model = layer_graph(np.ones((4, 4), np.float32))
    model.graph[0].domain, model.graph[0].op_type, model.graph[0].name = "speceyes", "TreeAttention", "layer.7/tree"
    with pytest.raises(LoweringError, match=r"layer.7/tree.*speceyes::TreeAttention"):
        lower(model, "decoder", "fp32")


def test_a_scaled_head_is_refused() -> None:
    model = exported(TEXT).parts["decoder"].clone()
    head = next(node for node in model.graph if node.op_type == "Gemm")
    head.attributes["alpha"] = ir.AttrFloat32("alpha", 2.0)
    with pytest.raises(LoweringError, match=r"head/Gemm.*alpha.*2\.0"):
        lower(model, "decoder", "int8")


@pytest.mark.parametrize(("part", "precision"), [("decoder", "fp16"), ("vision", "int4"), ("audio", "fp32")])
def test_unknown_parts_and_precisions_are_refused(part: str, precision: str) -> None:
    with pytest.raises(LoweringError, match="allowed are"):
        lower(layer_graph(np.ones((4, 4), np.float32)), part, precision)
