"""Strong typing: a tensor is fp16 or bf16 where that does no harm and fp32 elsewhere, with casts in between."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from ...engines.errors import LoweringError
from .graph import attribute, emit, graph_of

FULL = ir.DataType.FLOAT
HALVES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
FLOATS = (FULL, *HALVES.values())
CACHES = ("cache_", "present_")

_NORMS = ("RMSNormalization", "LayerNormalization", "GroupNormalization", "InstanceNormalization")
_SUMS = ("Softmax", "LogSoftmax", "ReduceMean", "ReduceSum", "ReduceLogSumExp")
_FUNCTIONS = ("Exp", "Log", "Pow", "Sqrt", "Reciprocal", "Cos", "Sin")
_SCALES = ("Abs", "ReduceMax", "Max", "QuantizeLinear")

EXACT = frozenset((*_NORMS, *_SUMS, *_FUNCTIONS, *_SCALES))
"""Operators that stay in fp32: sums over many elements, and functions that magnify an error."""

_SHAPES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Pad", "Identity")
_PIECES = ("Slice", "Split", "Concat", "Gather", "GatherElements", "ScatterND", "Where")

MOVES = frozenset((*_SHAPES, *_PIECES))
"""Operators that only move elements: they keep the type of what they move."""

HALF_ONLY = frozenset(("Attention", "CachedAttention", "TensorScatter"))
"""Operators that TensorRT has in half precision alone."""

_BOOLEAN = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not")


def halve(model: ir.Model, half: ir.DataType, lifted: Collection[str] = ()) -> None:
    """Type a decoder or a vision tower; its inputs and outputs stay fp32 but for the cache, which is `half`.

    In fp32 are EXACT operators, everything behind `hidden` (the logits), angles with what they come from, and whatever
    reads or makes a tensor named in `lifted`.
    """
    graph = model.graph
    _type_values(graph)
    exact = _head(graph) | _angles(graph) | _rounded(graph) | _lifted(graph, frozenset(lifted))
    for value in graph.inputs:
        if str(value.name).startswith(CACHES):
            value.type = ir.TensorType(half)
    for node in tuple(graph):
        if node.op_type != "Cast":
            _type_node(node, _choose(node, half, exact))
    for place, value in enumerate(graph.outputs):
        if value.dtype == half and not str(value.name).startswith(CACHES):
            graph.outputs[place] = _widen(value)


def check_lifted(model: ir.Model, lifted: Collection[str]) -> None:
    """Raise LoweringError when one of HALF_ONLY reads or makes a tensor that is to be lifted."""
    for node in model.graph:
        values = [v.name for v in (*node.inputs, *node.outputs) if v is not None and v.name in lifted]
        if values and node.op_type in HALF_ONLY:
            raise LoweringError(
                f"node {node.name!r} ({node.op_type}), rule range: {values[0]!r} is beyond the range of fp16, and "
                "TensorRT has the operator in half precision alone; choose bf16"
            )


def halve_products(model: ir.Model, half: ir.DataType, lifted: Collection[str] = ()) -> None:
    """Type the products of a predictor; all else is fp32, since it decides between tokens, and so is what is lifted."""
    graph = model.graph
    _type_values(graph)
    exact = _lifted(graph, frozenset(lifted))
    for node in [node for node in graph if node.op_type in ("MatMul", "Gemm") and node not in exact]:
        product = node.outputs[0]
        _type_node(node, half)
        uses, output = tuple(product.uses()), product.is_graph_output()
        wide = _widen(product)
        for use in uses:
            use.node.replace_input_with(use.idx, wide)
        if output:
            graph.outputs[:] = [wide if value is product else value for value in graph.outputs]


def _choose(node: ir.Node, half: ir.DataType, exact: Collection[ir.Node]) -> ir.DataType:
    if node in exact:
        return FULL
    if node.op_type == "DequantizeLinear":
        return _choose(node.outputs[0].uses()[0].node, half, exact)
    moved = [v for v in node.inputs if v is not None and v.dtype in FLOATS and _tensor(v) is None]
    if node.op_type in EXACT or (node.op_type in MOVES and moved and all(v.dtype == FULL for v in moved)):
        return FULL
    return half


def _type_node(node: ir.Node, dtype: ir.DataType) -> None:
    """Cast the floating inputs to `dtype` and make the floating outputs that."""
    for place, value in enumerate(node.inputs):
        if value is not None and value.dtype in FLOATS and value.dtype != dtype:
            node.replace_input_with(place, _cast(node, value, dtype))
    for value in node.outputs:
        if value.dtype == FULL:
            value.type = ir.TensorType(dtype)


def _cast(node: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """The value in another type, made once for all who want it."""
    tensor = _tensor(value)
    if tensor is not None:
        return _cast_constant(node, value, tensor, dtype)
    for use in value.uses():
        if use.node.op_type == "Cast" and use.node.outputs[0].dtype == dtype and use.node.graph is node.graph:
            return use.node.outputs[0]
    cast = emit(node, "Cast", [value], {"to": dtype}, like=value)
    cast.type = ir.TensorType(dtype)
    return cast


def _cast_constant(node: ir.Node, value: ir.Value, tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.Value:
    """An initialiser of the node's graph; its array is made when it is read, so that weights are not held twice."""
    graph = graph_of(node)
    name = f"{value.name}.{dtype.name.lower()}"
    if name not in graph.initializers:

        def read() -> ir.Tensor:
            return ir.Tensor(tensor.numpy().astype(dtype.numpy()), dtype=dtype, name=name)

        lazy = ir.LazyTensor(read, dtype=dtype, shape=ir.Shape(tensor.shape), name=name)
        made = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(tensor.shape), const_value=lazy)
        graph.register_initializer(made)
    return graph.initializers[name]


def _widen(value: ir.Value) -> ir.Value:
    """A Cast to fp32 behind the producer; it takes over the name of a graph's output."""
    producer = value.producer()
    assert producer is not None
    cast = ir.node("Cast", [value], {"to": FULL})
    wide = cast.outputs[0]
    wide.type, wide.shape = ir.TensorType(FULL), value.shape
    if value.is_graph_output():
        wide.name, value.name = value.name, f"{value.name}.half"
    graph_of(producer).insert_after(producer, cast)
    return wide


def _head(graph: ir.Graph) -> set[ir.Node]:
    """What turns the last hidden states into logits."""
    return _downstream(value for value in graph.outputs if value.name == "hidden")


def _angles(graph: ir.Graph) -> set[ir.Node]:
    """What angles are made from: a position times a frequency needs more digits than a half has."""
    pending = [node for node in graph if node.op_type in ("Cos", "Sin")]
    found: set[ir.Node] = set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [p for v in node.inputs if v is not None and (p := v.producer()) is not None]
    return found


def _rounded(graph: ir.Graph) -> set[ir.Node]:
    """What makes the values that are rounded to integers."""
    sources = (node.inputs[0] for node in graph if node.op_type == "QuantizeLinear")
    return {node for value in sources if value is not None and (node := value.producer()) is not None}


def _lifted(graph: ir.Graph, names: frozenset[str]) -> set[ir.Node]:
    return {node for node in graph if any(v is not None and v.name in names for v in (*node.inputs, *node.outputs))}


def _downstream(values: Iterable[ir.Value]) -> set[ir.Node]:
    pending = [use.node for value in values for use in value.uses()]
    found: set[ir.Node] = set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [use.node for value in node.outputs for use in value.uses()]
    return found


def _tensor(value: ir.Value) -> ir.TensorProtocol | None:
    return ir.convenience.get_const_tensor(value)


def _type_values(graph: ir.Graph) -> None:
    """Give every value that has none the type that follows from the producer's inputs."""
    for node in graph:
        for value in node.outputs:
            if value.dtype is None and (dtype := _result(node)) is not None:
                value.type = ir.TensorType(dtype)


def _result(node: ir.Node) -> ir.DataType | None:
    if node.op_type in _BOOLEAN:
        return ir.DataType.BOOL
    if node.op_type in ("Shape", "Size", "ArgMax"):
        return ir.DataType.INT64
    if node.op_type == "Cast":
        return ir.DataType(attribute(node, "to", FULL.value))
    source = node.inputs[{"Where": 1, "DequantizeLinear": 1, "QuantizeLinear": 2}.get(node.op_type, 0)]
    return source.dtype if source is not None else None
