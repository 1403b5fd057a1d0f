"""speceyes::CachedAttention -> TensorScatter and a standard Attention with an explicit mask, as TensorRT takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ...engines.errors import LoweringError
from ...plugins import cached_attention as operator
from .graph import add_constant, attribute, emit, nodes_of, replace

Inputs = Mapping[str, ir.Value]

CAPACITY = "capacity"


def write_out_attention(model: ir.Model, capacity: int) -> None:
    """Replace every CachedAttention; the graph inputs `mask` and `kv_length` go when nothing else reads them.

    `capacity`: slots of the cache. TensorRT updates a cache in place, and takes none whose length is free.

    A token sees the slots up to the one that it is written to. The mask says so in full: TensorRT drops
    `nonpad_kv_seqlen` in silence and takes `is_causal` from the upper left, wrong for a window over a cache. Padding on
    the right of a row counts as real tokens, which nothing that is read looks at.

    Raises LoweringError for attributes that the body does not know.
    """
    graph = model.graph
    _fix(graph, capacity)
    masks: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in nodes_of(graph, operator.NAME, operator.DOMAIN):
        unknown = sorted(set(node.attributes) - set(operator.ATTRIBUTES))
        if unknown:
            raise LoweringError(
                f"node {node.name!r} ({node.op_type}), rule write_out_attention: attribute {unknown[0]!r} is unknown; "
                f"known are {', '.join(operator.ATTRIBUTES)}; compile for another target"
            )
        named = {name: value for name, value in zip(operator.INPUTS, node.inputs, strict=True) if value is not None}
        key = named["write_index"], attribute(node, "window", 0)
        if key not in masks:
            masks[key] = _visible(node, named, key[1])
        replace(node, _attend(node, named, masks[key]))
    model.functions.pop((operator.DOMAIN, operator.NAME, ""), None)
    graph.opset_imports.pop(operator.DOMAIN, None)
    for unused in [v for v in graph.inputs if v.name in ("mask", "kv_length") and not v.uses()]:
        graph.inputs.remove(unused)


def _fix(graph: ir.Graph, capacity: int) -> None:
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None and CAPACITY in value.shape:
            value.shape = ir.Shape([capacity if size == CAPACITY else size for size in value.shape])


def _visible(node: ir.Node, inputs: Inputs, window: int) -> ir.Value:
    """Which slots a token may attend to: bool [batch, 1, width, capacity]."""
    zero, one = (add_constant(node, f"lowering.{name}", np.array(value)) for name, value in (("zero", 0), ("one", 1)))
    width = _size(node, inputs["query"], 1)
    slots = add_constant(node, "lowering.slots", np.arange(_capacity(inputs["cache_k"])))
    steps = emit(node, "Unsqueeze", [emit(node, "Range", [zero, width, one]), _ints(node, "column", 1)])
    start = emit(node, "Unsqueeze", [inputs["write_index"], _ints(node, "rows", 1, 2, 3)])
    position = emit(node, "Add", [start, steps])
    visible = emit(node, "LessOrEqual", [slots, position])
    if window:
        length = add_constant(node, f"lowering.window.{window}", np.array(window))
        near = emit(node, "Less", [emit(node, "Sub", [position, slots]), length])
        visible = emit(node, "And", [visible, near])
    return _typed(visible, ir.DataType.BOOL, ["batch", 1, "width", _capacity(inputs["cache_k"])])


def _attend(node: ir.Node, inputs: Inputs, mask: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    heads, kv_heads = (attribute(node, name, 0) for name in ("q_num_heads", "kv_num_heads"))
    query = _split(node, inputs["query"], heads)
    write_index = inputs["write_index"]
    present = [
        emit(
            node,
            "TensorScatter",
            [inputs[f"cache_{letter}"], _split(node, inputs[name], kv_heads), write_index],
            {"axis": 2},
            like=inputs[f"cache_{letter}"],
        )
        for letter, name in (("k", "key"), ("v", "value"))
    ]
    attributes: dict[str, Any] = {"scale": attribute(node, "scale", 0.0)}
    attended = emit(node, "Attention", [query, *present, mask], attributes, like=query)
    moved = emit(node, "Transpose", [attended], {"perm": [0, 2, 1, 3]})
    return emit(node, "Reshape", [moved, _ints(node, "joined", 0, 0, -1)], like=node.outputs[0]), *present


def _split(node: ir.Node, rows: ir.Value, heads: int) -> ir.Value:
    """[batch, width, heads * head_dim] -> [batch, heads, width, head_dim]."""
    split = emit(node, "Reshape", [rows, _ints(node, f"split.{heads}", 0, 0, heads, -1)])
    moved = emit(node, "Transpose", [split], {"perm": [0, 2, 1, 3]})
    dimensions = rows.shape or ir.Shape(["batch", "width", None])
    channels = dimensions[2] // heads if isinstance(dimensions[2], int) else None
    for value, shape in (
        (split, [dimensions[0], dimensions[1], heads, channels]),
        (moved, [dimensions[0], heads, dimensions[1], channels]),
    ):
        _typed(value, rows.dtype or ir.DataType.FLOAT, shape)
    return moved


def _capacity(cache: ir.Value) -> int:
    assert cache.shape is not None
    return int(cache.shape[2])


def _size(node: ir.Node, value: ir.Value, axis: int) -> ir.Value:
    size = emit(node, "Shape", [value], {"start": axis, "end": axis + 1})
    return emit(node, "Squeeze", [_typed(size, ir.DataType.INT64, [1])])


def _ints(node: ir.Node, name: str, *values: int) -> ir.Value:
    return add_constant(node, f"lowering.{name}", np.array(values, np.int64))


def _typed(value: ir.Value, dtype: ir.DataType, shape: Any) -> ir.Value:
    value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)
    return value
