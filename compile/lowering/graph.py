"""Small operations on onnx_ir graphs that every rule shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]

CONTRIB = "com.microsoft"


def emit(
    anchor: ir.Node,
    operator: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    domain: str = "",
    like: ir.Value | None = None,
) -> ir.Value:
    """Insert a node with one output in front of `anchor`; the output has the type and shape of `like`, when given."""
    return emit_many(anchor, operator, inputs, attributes, domain=domain, like=(like,))[0]


def emit_many(
    anchor: ir.Node,
    operator: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    domain: str = "",
    like: Sequence[ir.Value | None],
) -> Sequence[ir.Value]:
    """`emit` for a node with one output for each of `like`."""
    outputs = [ir.Value(type=v.type, shape=v.shape) if v is not None else ir.Value() for v in like]
    converted = ir.convenience.convert_attributes(attributes or {})
    node = ir.Node(domain, operator, inputs, attributes=converted, outputs=outputs)
    graph = graph_of(anchor)
    graph.insert_before(anchor, node)
    if domain:
        graph.opset_imports.setdefault(domain, 1)
    outputs_of_node: Sequence[ir.Value] = node.outputs
    return outputs_of_node


def replace(node: ir.Node, values: Sequence[ir.Value]) -> None:
    """Remove `node` and what only it needed; its users, and graph outputs under their names, take `values` instead."""
    for old, new in zip(node.outputs, values, strict=True):
        new.type, new.shape = old.type or new.type, old.shape or new.shape
        if old.is_graph_output():
            new.name, old.name = old.name, None
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    _discard(node)


def _discard(node: ir.Node) -> None:
    producers = [value.producer() for value in node.inputs if value is not None]
    graph_of(node).remove(node, safe=True)
    for producer in dict.fromkeys(producers):
        if producer is not None and not any(v.uses() or v.is_graph_output() for v in producer.outputs):
            _discard(producer)


def add_constant(anchor: ir.Node, name: str, array: Array) -> ir.Value:
    """An initialiser of the graph; one that has this name already is returned as it is."""
    return _register(anchor, ir.tensor(np.ascontiguousarray(array).reshape(array.shape), name=name))


def add_lazy_constant(anchor: ir.Node, name: str, shape: Sequence[int], compute: Callable[[], Array]) -> ir.Value:
    """An fp32 initialiser computed whenever it is read, so that a weight about to be quantised is not held twice."""

    def tensor() -> ir.Tensor:
        return ir.tensor(np.ascontiguousarray(compute()), name=name)

    return _register(anchor, ir.LazyTensor(tensor, ir.DataType.FLOAT, ir.Shape(shape), name=name))


def _register(anchor: ir.Node, tensor: ir.TensorProtocol) -> ir.Value:
    graph = graph_of(anchor)
    name = str(tensor.name)
    if name not in graph.initializers:
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]


def constant(value: ir.Value | None) -> Array | None:
    """The array behind an initialiser or a Constant node, None for anything that is computed."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return tensor.numpy() if tensor is not None else None


def nodes_of(graph: ir.Graph, operator: str, domain: str = "") -> Iterator[ir.Node]:
    """The graph's nodes of one operator, in order; the graph may be edited meanwhile."""
    return (n for n in tuple(graph) if n.op_type == operator and n.domain == domain)


def graph_of(node: ir.Node) -> ir.Graph:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    return graph


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """The value of an attribute, `default` when the node does not carry it."""
    found = node.attributes.get(name)
    return default if found is None else found.value
