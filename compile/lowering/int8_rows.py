"""Linear layers with int8 weights and int8 activations, scaled row by row.

A row x is divided by its own largest magnitude a, rounded to n/127, multiplied with weights that were rounded per
output channel, and scaled back: y = a * (Q(x / a) @ W). The scales inside the product are constants, so a row's result
does not depend on the rows computed beside it: the same bits at every width.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .graph import CONTRIB, add_constant, emit, replace
from .linear import Floats, Linear, linear_layers

TINY = np.float32(1e-30)
"""Magnitudes below it count as zero, so that no scale is zero or subnormal."""


def quantize_rows(model: ir.Model) -> None:
    """Turn every linear layer into its int8 form; layers that read the same rows share the quantised rows."""
    quantized: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    for layer in linear_layers(model.graph):
        node = layer.node
        if layer.rows not in quantized:
            quantized[layer.rows] = _quantize(node, layer.rows)
        magnitude, rows = quantized[layer.rows]
        weight, scale, zero = add_int8_weight(layer)
        inputs = [rows, weight, _step(node), scale, _middle(node), zero]
        product = emit(node, "MatMulIntegerToFloat", inputs, domain=CONTRIB, like=node.outputs[0])
        replace(node, [emit(node, "Mul", [product, magnitude], like=node.outputs[0])])


def quantize_channels(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """[inputs, outputs] -> (int8 of the same shape, scale [outputs]), symmetric, rounded to the nearest.

    Processors without VNNI add the products of inputs 2j and 2j + 1 with an activation up to 255 in 16 saturating bits.
    The scale keeps the sum of such a pair within 128 (127 before rounding), so that every processor gets the exact sum.
    """
    largest = np.maximum(_magnitude(weight), _magnitude(weight[:-1:2] + weight[1::2]))
    scale = (np.maximum(largest, TINY) / 127).astype(np.float32)
    # No copy that can be spared: the head of 262,144 tokens by 640 is 671 MB.
    steps = weight / scale
    np.rint(steps, out=steps).clip(-127, 127, out=steps)
    return steps.astype(np.int8), scale


def _magnitude(weight: Floats) -> Floats:
    """The largest magnitude of each column."""
    magnitude: Floats = np.maximum(weight.max(axis=0, initial=0), -weight.min(axis=0, initial=0))
    return magnitude


def add_int8_weight(layer: Linear) -> tuple[ir.Value, ir.Value, ir.Value]:
    """(integers [inputs, outputs], scale [outputs], zero point [outputs]) of a layer as initialisers."""
    integers, scale = quantize_channels(layer.weight)
    return (
        add_constant(layer.node, f"{layer.name}.int8", integers),
        add_constant(layer.node, f"{layer.name}.scale", scale),
        add_constant(layer.node, f"{layer.name}.zero", np.zeros(len(scale), np.int8)),
    )


def _quantize(node: ir.Node, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(a [..., 1], Q(x / a) uint8). A row of zeros divides to NaN, rounds to some integer and is zero again times a."""
    last_axis = add_constant(node, "lowering.last_axis", np.array([-1], np.int64))
    magnitude = emit(node, "ReduceMax", [emit(node, "Abs", [rows], like=rows), last_axis], {"keepdims": 1})
    unit = emit(node, "Div", [rows, magnitude], like=rows)
    return magnitude, emit(node, "QuantizeLinear", [unit, _step(node), _middle(node)])


def _step(node: ir.Node) -> ir.Value:
    return add_constant(node, "lowering.int8_step", np.array(1 / 127, np.float32))


def _middle(node: ir.Node) -> ir.Value:
    return add_constant(node, "lowering.uint8_middle", np.array(128, np.uint8))
