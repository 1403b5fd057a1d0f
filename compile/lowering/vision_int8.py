"""Linear layers with int8 weights and int8 activations, one scale for all rows of a call.

Cheaper than a scale per row where integer products are fast. The scale depends on everything in the call, so a vision
tower takes one tile in a call, its `tiles` dimension is fixed to 1; what a predictor drafts may depend on its company.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from .graph import CONTRIB, emit, emit_many, replace
from .int8_rows import add_int8_weight
from .linear import linear_layers

TILES = "tiles"


def quantize_tiles(model: ir.Model) -> None:
    """A vision tower's layers, for one tile in a call."""
    _quantize(model.graph)
    fix_tiles(model.graph)


def quantize_draft(model: ir.Model) -> None:
    """A predictor's layers, those in its loop too."""
    _quantize(model.graph)
    for graph in model.graph.subgraphs():
        _quantize(graph)
    common.LiftSubgraphInitializersToMainGraphPass()(model)


def _quantize(graph: ir.Graph) -> None:
    """Turn every linear layer and its bias into one integer product; layers that read the same rows share these."""
    quantized: dict[ir.Value, list[ir.Value]] = {}
    for layer in linear_layers(graph):
        node, bias = layer.node, layer.bias()
        if layer.rows not in quantized:
            quantized[layer.rows] = list(emit_many(node, "DynamicQuantizeLinear", [layer.rows], like=[None] * 3))
        rows, rows_scale, rows_zero = quantized[layer.rows]
        weight, scale, zero = add_int8_weight(layer)
        end, vector = bias or (node, None)
        inputs = [rows, weight, rows_scale, scale, rows_zero, zero, vector]
        product = emit(node, "MatMulIntegerToFloat", inputs, domain=CONTRIB, like=end.outputs[0])
        replace(end, [product])


def fix_tiles(graph: ir.Graph) -> None:
    """Make the graph take one tile; a graph without that dimension takes one image already."""
    for value in graph.inputs:
        if value.shape is not None and value.shape[0] == TILES:
            value.shape = ir.Shape([1, *value.shape[1:]])
