"""Linear layers that read the same rows (query, key, value; gate, up) become one product and a Split."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .graph import add_constant, add_lazy_constant, constant, emit, emit_many, replace
from .linear import Linear, linear_layers


def fuse_projections(model: ir.Model) -> None:
    """Join the weights of linear layers with common rows along the output channels, the biases too if all have one."""
    groups: dict[ir.Value, list[Linear]] = defaultdict(list)
    for layer in linear_layers(model.graph):
        groups[layer.rows].append(layer)
    for layers in groups.values():
        if len(layers) > 1:
            _fuse(layers)


def _fuse(layers: Sequence[Linear]) -> None:
    first, name = layers[0].node, "+".join(layer.name for layer in layers)
    sizes = [layer.outputs for layer in layers]
    inputs = int(layers[0].matrix.shape[0])  # type: ignore[index]
    matrices = [layer.matrix for layer in layers]
    matrix = add_lazy_constant(first, name, (inputs, sum(sizes)), lambda: _join(matrices, axis=1))
    fused = emit(first, "MatMul", [layers[0].rows, matrix])
    biases = [bias for layer in layers if (bias := layer.bias())]
    ends = [layer.node for layer in layers]
    if len(biases) == len(layers):
        vector = add_constant(first, f"{name}.bias", _join([vector for _, vector in biases], axis=0))
        fused = emit(first, "Add", [fused, vector])
        ends = [add for add, _ in biases]
    split = add_constant(first, f"{name}.sizes", np.array(sizes, np.int64))
    parts = emit_many(first, "Split", [fused, split], {"axis": -1}, like=[end.outputs[0] for end in ends])
    for end, part in zip(ends, parts, strict=True):
        replace(end, [part])


def _join(values: Sequence[ir.Value], axis: int) -> NDArray[np.float32]:
    arrays = [array for value in values if (array := constant(value)) is not None]
    return np.concatenate(arrays, axis=axis)
