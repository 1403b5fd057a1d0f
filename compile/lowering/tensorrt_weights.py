"""Linear layers with int8 weights, in the QuantizeLinear and DequantizeLinear nodes that TensorRT fuses.

w8a16: the weights alone, one scale per output channel; the product is in half precision.
w8a8: the rows as well. A row is divided by its own largest magnitude a and rounded to n/127: y = a * (Q(x / a) @ W).
The scale inside the product is a constant and no scale is shared between rows, so a token's result does not depend on
the tokens computed beside it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .graph import add_constant, emit, replace
from .int8_rows import TINY
from .linear import Floats, Linear, linear_layers

LEAST = np.array(1e-12, np.float32)
"""A row of smaller magnitudes counts as zeros."""


def quantize_weights(model: ir.Model) -> None:
    """w8a16 for every linear layer."""
    for layer in linear_layers(model.graph):
        _replace(layer, emit(layer.node, "MatMul", [layer.rows, _weight(layer)], like=layer.node.outputs[0]))


def quantize_weights_and_rows(model: ir.Model) -> None:
    """w8a8 for every linear layer; layers that read the same rows share the quantised rows."""
    quantized: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    for layer in linear_layers(model.graph):
        node, product = layer.node, layer.node.outputs[0]
        if layer.rows not in quantized:
            quantized[layer.rows] = _quantize_rows(node, layer.rows)
        largest, rows = quantized[layer.rows]
        unit = emit(node, "MatMul", [_dequantize(node, rows, _step(node)), _weight(layer)], like=product)
        _replace(layer, emit(node, "Mul", [unit, largest], like=product))


def round_channels(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """[inputs, outputs] -> (int8 of the same shape, scale [outputs]), symmetric, rounded to the nearest."""
    largest = np.maximum(weight.max(axis=0, initial=0), -weight.min(axis=0, initial=0))
    scale = (np.maximum(largest, TINY) / 127).astype(np.float32)
    steps = weight / scale
    np.rint(steps, out=steps).clip(-127, 127, out=steps)
    return steps.astype(np.int8), scale


def _weight(layer: Linear) -> ir.Value:
    integers, scale = round_channels(layer.weight)
    scales = add_constant(layer.node, f"{layer.name}.scale", scale)
    return _dequantize(layer.node, add_constant(layer.node, f"{layer.name}.int8", integers), scales, axis=1)


def _quantize_rows(node: ir.Node, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(a float32 [..., 1], Q(x / a) int8)."""
    last_axis = add_constant(node, "lowering.last_axis", np.array([-1], np.int64))
    magnitude = emit(node, "Abs", [rows], like=rows)
    largest = emit(node, "ReduceMax", [magnitude, last_axis], {"keepdims": 1})
    largest = emit(node, "Max", [largest, add_constant(node, "lowering.least", LEAST)])
    unit = emit(node, "Div", [rows, largest], like=rows)
    return largest, emit(node, "QuantizeLinear", [unit, _step(node), _zero(node)])


def _dequantize(node: ir.Node, integers: ir.Value, scale: ir.Value, axis: int | None = None) -> ir.Value:
    value = emit(node, "DequantizeLinear", [integers, scale], {} if axis is None else {"axis": axis})
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), integers.shape
    return value


def _replace(layer: Linear, value: ir.Value) -> None:
    """The new product keeps the old one's name, under which its range is known."""
    name = layer.node.outputs[0].name
    replace(layer.node, [value])
    value.name = name


def _step(node: ir.Node) -> ir.Value:
    return add_constant(node, "lowering.int8_step", np.array(1 / 127, np.float32))


def _zero(node: ir.Node) -> ir.Value:
    return add_constant(node, "lowering.int8_zero", np.array(0, np.int8))
