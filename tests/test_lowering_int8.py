"""The arithmetic of quantised layers: against integers in numpy, within the bounds of rounding, at the extremes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from speceyes.compile.lowering import lower
from speceyes.compile.lowering.embedding import quantize_blocks, quantize_embedding
from speceyes.compile.lowering.fuse_projections import fuse_projections
from speceyes.compile.lowering.int8_rows import quantize_channels
from speceyes.compile.lowering.nbits import BLOCK, quantize_int4

from .lowered import Session, layer_graph

SHAPES = [(64, 48), (63, 7), (200, 33), (576, 96)]
ROWS = [1, 2, 5, 8, 64, 129]


def weights(inputs: int, outputs: int, seed: int = 0) -> np.ndarray:
    """Normal weights with some outliers and one channel of zeros."""
    rng = np.random.default_rng(seed)
    weight: np.ndarray = rng.standard_normal((inputs, outputs)) * rng.choice([0.02, 0.5], (1, outputs))
    weight[rng.random(weight.shape) < 0.01] *= 8
    weight[:, 1] = 0
    return weight.astype(np.float32)


def states(rows: int, inputs: int, seed: int = 1) -> np.ndarray:
    """Rows of very different size, one of them zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs)) * np.exp(2 * rng.standard_normal((rows, 1)))
    x[rows // 2 + 1 :: 7] = 0
    return x.astype(np.float32)


def run_layer(
    weight: np.ndarray, x: np.ndarray, part: str, precision: str, bias: np.ndarray | None = None
) -> np.ndarray:
    rows = "tiles" if part == "vision" and len(x) == 1 else "rows"
    return Session(lower(layer_graph(weight, bias, rows=rows), part, precision)).run(None, {"x": x})[0]


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 4)), elements=st.floats(-4, 4, width=32)))
def test_pairs_of_int8_weights_cannot_saturate_16_bits(weight: np.ndarray) -> None:
    integers, scale = quantize_channels(weight)
    padded = np.vstack([integers, np.zeros_like(integers[:1])]).astype(int)[: len(integers) + len(integers) % 2]
    assert np.abs(padded[0::2] + padded[1::2]).max() * 255 <= 32767
    assert np.abs(integers.astype(int)).max() <= 127
    assert (np.abs(integers * scale - weight) <= scale * 0.5001).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_rows_are_the_integer_product(shape: tuple[int, int]) -> None:
    weight, bias = weights(*shape), np.linspace(-1, 1, shape[1], dtype=np.float32)
    integers, scale = quantize_channels(weight)
    for rows in ROWS:
        x = states(rows, shape[0])
        magnitude = np.abs(x).max(axis=1, keepdims=True)
        unit = np.divide(x, magnitude, out=np.zeros_like(x), where=magnitude > 0)
        codes = np.rint(unit / np.float32(1 / 127)).astype(np.int64)
        exact = (codes @ integers.astype(np.int64)) / 127 * scale * magnitude + bias
        actual = run_layer(weight, x, "decoder", "int8", bias)
        # a quotient that falls on a tie may round to either neighbour
        tolerance = 1e-5 * np.abs(exact).max(axis=1, keepdims=True) + magnitude / 127 * np.abs(integers * scale).max()
        assert (np.abs(actual - exact) <= tolerance).all()
        assert np.mean(np.abs(actual - exact) <= 1e-5 * (1 + np.abs(exact))) > 0.95


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_rows_stay_within_the_bound_of_rounding(shape: tuple[int, int]) -> None:
    """|Δy| ≤ Σ |Δx||w| + |x||Δw| + |Δx||Δw| with |Δx| half a step of the row, |Δw| half a step of the channel."""
    weight = weights(*shape)
    _, scale = quantize_channels(weight)
    x = states(40, shape[0])
    half_x = np.abs(x).max(axis=1, keepdims=True) / 254
    half_w = scale[None] / 2
    bound = half_x * np.abs(weight).sum(0) + np.abs(x).sum(1, keepdims=True) * half_w + half_x * half_w * shape[0]
    exact = x.astype(np.float64) @ weight
    actual = run_layer(weight, x, "decoder", "int8")
    assert (np.abs(actual - exact) <= 1.0001 * bound + 1e-6).all()
    assert (actual[np.abs(x).max(axis=1) == 0] == 0).all()


@pytest.mark.parametrize("part", ["decoder", "vision"])
@pytest.mark.parametrize("weight", ["ones", "pairs", "alternating"])
def test_extremes_are_exact_on_every_processor(weight: str, part: str) -> None:
    """Full-range weights under full-range rows: without VNNI plain int8 weights give about half the sum here."""
    matrix = np.ones((576, 64), np.float32)
    if weight == "pairs":
        matrix[0::4] = matrix[3::4] = 1 / 127
    if weight == "alternating":
        matrix[1::2] = -1
    matrix[:, 1::2] *= -1
    for rows in (1, 2, 8, 64):
        for sign in (1, -1):
            x = np.full((rows, 576), sign * 3.0, np.float32)
            expected = x @ matrix
            tolerance = 0.01 * np.abs(x).sum(1).max()
            np.testing.assert_allclose(run_layer(matrix, x, part, "int8"), expected, rtol=0, atol=tolerance)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_int8_table_rows_round_to_half_a_step(seed: int) -> None:
    table = np.random.default_rng(seed).standard_normal((5, 64)).astype(np.float32)
    table[2, :32] = 0
    integers, scale = quantize_blocks(table)
    values = (integers.astype(np.float32) - 128) * scale.repeat(32, axis=1)
    assert (np.abs(values - table) <= scale.repeat(32, axis=1) * 0.5001).all()


@pytest.mark.parametrize(("hidden", "operator"), [(96, "GatherBlockQuantized"), (48, "Gather")])
def test_the_embedding_reads_the_table(hidden: int, operator: str) -> None:
    """A hidden size that is no multiple of 32 keeps its fp32 table."""
    table = weights(20, hidden)
    tape = ir.tape.Tape()
    ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "width"])
    out = tape.op("Gather", [tape.initializer(ir.tensor(table, name="table")), ids], {"axis": 0})
    out.name, out.dtype, out.shape = "out", ir.DataType.FLOAT, ir.Shape(["batch", "width", hidden])
    graph = ir.Graph(
        [ids], [out], nodes=tape.nodes, initializers=tape.initializers, opset_imports={"": 24}, name="table"
    )
    model = ir.Model(graph, ir_version=11)
    quantize_embedding(model)
    assert [node.op_type for node in model.graph] == [operator]
    wanted = np.array([[3, 19, 0], [7, 7, 1]])
    found = Session(model).run(None, {"input_ids": wanted})[0]
    np.testing.assert_allclose(found, table[wanted], rtol=0, atol=np.abs(table[wanted]).max() / 253)


@pytest.mark.parametrize("shape", [(64, 48), (96, 7), (576, 96)])
def test_int4_is_the_product_with_its_unpacked_weights(shape: tuple[int, int]) -> None:
    """Activations are rounded to int8 in blocks of 32 inside the operator; the weights carry the larger error."""
    weight = weights(*shape)
    packed, scale = quantize_int4(weight)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(shape[1], -1, BLOCK).astype(np.float32) - 8
    unpacked = (codes * scale[:, :, None]).reshape(shape[1], -1)[:, : shape[0]].T
    half = np.abs(scale).repeat(BLOCK, axis=1)[:, : shape[0]].T
    assert (np.abs(unpacked - weight) <= half * 1.0001).all()
    assert np.mean(np.abs(unpacked - weight) <= half * 0.5001) > 0.97
    x = states(6, shape[0])
    half_x = np.abs(x).max(axis=1, keepdims=True) / 254
    bound = 1.01 * half_x * np.abs(unpacked).sum(0) + 1e-5
    assert (np.abs(run_layer(weight, x, "decoder", "int4") - x @ unpacked) <= bound).all()


def test_int4_leaves_blocks_cut_short_to_int8() -> None:
    model = lower(layer_graph(weights(63, 8)), "decoder", "int4")
    assert [node.op_type for node in model.graph].count("MatMulIntegerToFloat") == 1


def test_layers_with_common_rows_become_one_and_keep_their_results() -> None:
    tape = ir.tape.Tape()
    x = ir.val("x", ir.DataType.FLOAT, ["rows", 64])
    sizes, outputs = {"q": 48, "k": 16, "v": 32}, []
    for seed, (name, size) in enumerate(sizes.items()):
        matrix = tape.initializer(ir.tensor(weights(64, size, seed), name=f"{name}.weight"))
        vector = tape.initializer(ir.tensor(np.full(size, seed, np.float32), name=f"{name}.bias"))
        y = tape.op("Add", [vector, tape.op("MatMul", [x, matrix])])
        y.name, y.dtype, y.shape = name, ir.DataType.FLOAT, ir.Shape(["rows", size])
        outputs.append(y)
    graph = ir.Graph([x], outputs, nodes=tape.nodes, initializers=tape.initializers, opset_imports={"": 24}, name="qkv")
    model = ir.Model(graph, ir_version=11)
    fused = model.clone()
    fuse_projections(fused)
    assert [node.op_type for node in fused.graph] == ["MatMul", "Add", "Split"]
    feeds = {"x": states(9, 64)}
    for before, after in zip(Session(model).run(None, feeds), Session(fused).run(None, feeds), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
