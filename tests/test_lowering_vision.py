"""Lowered vision towers against the canonical graphs, on real pixel tensors of every family."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from speceyes.compile.lowering import PRECISIONS, lower
from speceyes.compile.lowering.int8_rows import quantize_channels

from .checkpoints import exported
from .lowered import Session, layer_graph, lowered, session
from .test_export_vision import FAMILIES, SIZES, encoded

PROJECTIONS = {"idefics3": 9, "llava": 10, "llava_siglip": 14, "qwen2_vl": 15, "qwen2_5_vl": 15}


def features(family: str, precision: str | None) -> np.ndarray:
    """[features, hidden] of both test images, tile by tile."""
    calls = [call for size in SIZES for call in encoded(family, size).calls]
    return np.concatenate([session(family, "vision", precision).run(None, call)[0] for call in calls])


def operators(family: str, precision: str) -> Counter[str]:
    return Counter(node.op_type for node in lowered(family, "vision", precision).graph)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_equals_the_canonical_graph(family: str) -> None:
    expected = features(family, None)
    np.testing.assert_allclose(features(family, "fp32"), expected, rtol=0, atol=1e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_keeps_the_direction_of_every_feature(family: str) -> None:
    actual, expected = features(family, "int8"), features(family, None)
    norms = np.linalg.norm(actual, axis=1) * np.linalg.norm(expected, axis=1)
    cosine = (actual * expected).sum(axis=1) / norms
    assert 0.98 < cosine.min() < 0.999999


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_without_a_mask_becomes_one_operator(family: str) -> None:
    """Windowed layers carry a mask and keep the standard operator."""
    before = [node for node in exported(family).parts["vision"].graph if node.op_type == "Attention"]
    masked = sum(len(node.inputs) > 3 for node in before)
    assert masked == (2 if family == "qwen2_5_vl" else 0)
    found = operators(family, "fp32")
    assert (found["MultiHeadAttention"], found["Attention"]) == (len(before) - masked, masked)


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_leaves_no_fp32_product(family: str) -> None:
    found = operators(family, "int8")
    assert found["MatMul"] == 0
    assert found["MatMulIntegerToFloat"] == PROJECTIONS[family]


def test_int8_takes_one_tile_a_call() -> None:
    """One scale serves the whole call, so tiles that shared one would change each other."""
    (pixels,) = lowered("idefics3", "vision", "int8").graph.inputs
    assert list(pixels.shape or ()) == [1, 3, 32, 32]
    (pixels,) = lowered("idefics3", "vision", "fp32").graph.inputs
    assert str(pixels.shape) == "[tiles,3,32,32]"


def test_int8_layer_stays_within_the_bound_of_rounding() -> None:
    """As for rows, with |Δx| one step: half for the value, half for the zero point."""
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((96, 40)).astype(np.float32), rng.standard_normal(40).astype(np.float32)
    x = rng.standard_normal((50, 96)).astype(np.float32)
    _, scale = quantize_channels(weight)
    step, half_w = (x.max() - x.min()) / 255, scale[None] / 2
    bound = step * np.abs(weight).sum(0) + np.abs(x).sum(1, keepdims=True) * half_w + step * half_w * 96
    model = lower(layer_graph(weight, bias), "vision", "int8")
    assert [node.op_type for node in model.graph] == ["DynamicQuantizeLinear", "MatMulIntegerToFloat"]
    assert (np.abs(Session(model).run(None, {"x": x})[0] - (x @ weight + bias)) <= bound).all()


@pytest.mark.parametrize("precision", PRECISIONS["vision"])
def test_lowering_is_deterministic(precision: str) -> None:
    again = lower(exported("llava").parts["vision"].clone(), "vision", precision)
    models = (lowered("llava", "vision", precision), again)
    first, second = (ir.serde.serialize_model(model).SerializeToString() for model in models)
    assert first == second
