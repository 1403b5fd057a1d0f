"""Graphs lowered for TensorRT: strong types, and what they compute beside the canonical fp32 graph."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from speceyes.compile.lowering.tensorrt import PARTS, PRECISIONS, lower_for_tensorrt, precisions
from speceyes.compile.lowering.tensorrt_precision import EXACT, HALF_ONLY, HALVES
from speceyes.compile.lowering.tensorrt_weights import round_channels
from speceyes.engines.errors import LoweringError

from .checkpoints import MAKERS, exported
from .lowered import logits as reference_logits
from .lowered import session as reference_session
from .lowered import texts
from .stepper import Stepper, walk
from .tensorrt_graphs import CAPACITY, Session, lowered
from .test_export_vision import FAMILIES as VISION
from .test_export_vision import SIZES, encoded

LENGTHS, WIDTHS = (21, 9, 14), [4, 2, 8]
FLOATS = (ir.DataType.FLOAT, *HALVES.values())

# Relative error of all logits or features. Rounding to fp16 is off by at most 2^-11 of an element, to bf16 by 2^-8; up
# to three layers add up some sixty of these at random, and a root of sixty is eight. A weight rounded to int8 is off by
# half a step of 1/127 of its channel's largest, 2^-8, which is three times the typical one or more.
TOLERANCE = {"fp16": 8 * 2.0**-11, "bf16": 8 * 2.0**-8, "int8": 8 * 3 * 2.0**-8}


def tolerance(precision: str) -> float:
    half, _, weights = precision.partition("-")
    return TOLERANCE[half] + (TOLERANCE["int8"] if weights else 0)


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", MAKERS)
def test_decoders_give_the_canonical_logits_in_ragged_steps(family: str, precision: str) -> None:
    expected = reference_logits(family, None, LENGTHS, WIDTHS)
    checkpoint, features = exported(family).checkpoint, None
    if checkpoint.family.has_vision:
        features = np.random.default_rng(3).standard_normal((3, checkpoint.hidden)).astype(np.float32)
    session = Session(lowered(family, "decoder", precision))
    found = walk(Stepper(session, texts(family, LENGTHS), CAPACITY, features), [8, 3, 2, 1])
    error = distance(np.concatenate(found), np.concatenate(expected))
    assert 0 < error < tolerance(precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", VISION)
def test_vision_gives_the_canonical_features(family: str, precision: str) -> None:
    session = Session(lowered(family, "vision", precision))
    calls = [call for size in SIZES for call in encoded(family, size).calls]
    expected = np.concatenate([reference_session(family, "vision", None).run(None, call)[0] for call in calls])
    found = np.concatenate([session.run(None, call)[0] for call in calls])
    error = distance(found, expected)
    assert 0 < error < tolerance(precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", MAKERS)
def test_no_node_mixes_types_and_exact_operators_are_fp32(family: str, precision: str) -> None:
    half = HALVES[precision.partition("-")[0]]
    for part in exported(family).parts:
        for node in lowered(family, part, precision).graph:
            found = {v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype in FLOATS}
            if node.op_type == "Cast":
                continue
            assert len(found) <= 1, node.name
            if node.op_type in EXACT and found:
                assert found == {ir.DataType.FLOAT}, node.name
            if node.op_type in HALF_ONLY:
                assert found == {half}, node.name


@pytest.mark.parametrize("half", HALVES)
def test_inputs_and_outputs_are_fp32_but_for_the_cache(half: str) -> None:
    graph = lowered("idefics3", "decoder", half).graph
    canonical = exported("idefics3").parts["decoder"].graph
    assert [v.name for v in graph.inputs] == [v.name for v in canonical.inputs if v.name not in ("mask", "kv_length")]
    assert [v.name for v in graph.outputs] == [v.name for v in canonical.outputs]
    for value in (*graph.inputs, *graph.outputs):
        cache = str(value.name).startswith(("cache", "present"))
        assert value.dtype in ((HALVES[half],) if cache else (ir.DataType.FLOAT, ir.DataType.INT64)), value.name
        if cache:
            assert list(value.shape or ()) == ["batch", 2, CAPACITY, 16]


def test_the_products_of_the_layers_are_halves_and_the_head_is_not() -> None:
    products = [n for n in lowered("llama", "decoder", "fp16").graph if n.op_type in ("MatMul", "Gemm")]
    types = Counter(node.outputs[0].dtype for node in products)
    assert types == {ir.DataType.FLOAT16: 14, ir.DataType.FLOAT: 1}
    assert products[-1].outputs[0].name == "logits"


@pytest.mark.parametrize("weights", ["w8a16", "w8a8"])
def test_every_layer_keeps_its_weight_in_int8(weights: str) -> None:
    graph = lowered("llama", "decoder", f"bf16-{weights}").graph
    matrices = [v for v in graph.initializers.values() if len(v.shape or ()) == 2]
    assert Counter(v.dtype for v in matrices) == {ir.DataType.INT8: 15, ir.DataType.BFLOAT16: 1}
    found = Counter(node.op_type for node in graph)
    # Query, key and value share their rows, and so do gate and up: 4 rounded rows a layer, and those of the head.
    assert found["QuantizeLinear"] == (9 if weights == "w8a8" else 0)


def test_int8_weights_round_to_half_a_step() -> None:
    weight = np.random.default_rng(0).standard_normal((33, 7)).astype(np.float32)
    weight[:, 3], weight[0, 4] = 0, -9.0
    integers, scale = round_channels(weight)
    assert (integers[:, 3] == 0).all() and integers[0, 4] == -127
    assert (np.abs(integers * scale - weight) <= scale * 0.5001).all()


def test_a_row_of_zeros_gives_zeros() -> None:
    """w8a8 divides a row by its largest magnitude."""
    session = Session(lowered("idefics3", "vision", "fp16-w8a8"))
    (made,) = session.run(None, {"pixel_values": np.zeros((1, 3, 32, 32), np.float32)})
    assert np.isfinite(made).all()


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    session = Session(lowered("idefics3", "vision", "fp16-w8a8"))
    tile = np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)
    (alone,) = session.run(None, {"pixel_values": tile})
    (together,) = session.run(None, {"pixel_values": np.concatenate([tile, 5 * tile])})
    np.testing.assert_allclose(together[: len(alone)], alone, rtol=0, atol=1e-3 * float(np.abs(alone).max()))


def test_what_is_lifted_is_made_and_read_in_fp32() -> None:
    model = exported("llama").parts["decoder"].clone()
    name = "text_model.layers.0.mlp.down_proj/MatMul"
    lower_for_tensorrt(model, "decoder", "fp16", capacity=CAPACITY, lifted=[name])
    (node,) = (node for node in model.graph if node.outputs[0].name == name)
    assert node.outputs[0].dtype == ir.DataType.FLOAT
    readers = [use.node for use in node.outputs[0].uses()]
    assert [(n.op_type, n.outputs[0].dtype) for n in readers] == [("Add", ir.DataType.FLOAT)]
    before = Counter(n.outputs[0].dtype for n in lowered("llama", "decoder", "fp16").graph if n.op_type == "MatMul")
    after = Counter(n.outputs[0].dtype for n in model.graph if n.op_type == "MatMul")
    assert after[ir.DataType.FLOAT] == before[ir.DataType.FLOAT] + 1


def test_attention_cannot_be_lifted() -> None:
    model = exported("llama").parts["decoder"].clone()
    name = "text_model.layers.0.self_attn.v_proj/MatMul"
    with pytest.raises(LoweringError, match=r"CachedAttention.*rule range.*half precision alone; choose bf16"):
        lower_for_tensorrt(model, "decoder", "fp16", capacity=CAPACITY, lifted=[name])


def test_lowering_is_deterministic() -> None:
    again = lower_for_tensorrt(exported("llama").parts["decoder"].clone(), "decoder", "bf16-w8a8", capacity=CAPACITY)
    first, second = (
        ir.serde.serialize_model(m).SerializeToString() for m in (lowered("llama", "decoder", "bf16-w8a8"), again)
    )
    assert first == second


@pytest.mark.parametrize(
    ("part", "precision"),
    [("decoder", "fp32"), ("vision", "int8"), ("predictor", "fp16-w8a8"), ("audio", "fp16")],
)
def test_unknown_parts_and_precisions_are_refused(part: str, precision: str) -> None:
    with pytest.raises(LoweringError, match="allowed"):
        lower_for_tensorrt(exported("llama").parts["decoder"].clone(), part, precision, capacity=CAPACITY)


def test_unknown_attributes_are_refused() -> None:
    model = exported("llama").parts["decoder"].clone()
    node = next(node for node in model.graph if node.op_type == "CachedAttention")
    node.attributes["sinks"] = ir.AttrInt64("sinks", 4)
    with pytest.raises(LoweringError, match=r"CachedAttention.*write_out_attention.*'sinks'"):
        lower_for_tensorrt(model, "decoder", "fp16", capacity=CAPACITY)


def test_operators_without_a_rule_are_refused() -> None:
    model = exported("idefics3").parts["vision"].clone()
    node = next(node for node in model.graph if node.op_type == "Gelu")
    node.domain = "speceyes"
    with pytest.raises(LoweringError, match=r"Gelu.*speceyes::Gelu.*TensorRT"):
        lower_for_tensorrt(model, "vision", "fp16")


def test_parts_have_precisions() -> None:
    assert {part: len(precisions(part)) for part in PARTS} == {
        "decoder": 6,
        "vision": 6,
        "predictor": 2,
        "predictor_image": 2,
    }
