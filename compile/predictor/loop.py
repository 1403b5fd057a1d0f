"""A drafting loop as one ONNX graph: an opening, then turns until no row's chance is worth going on."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

WINDOW, THRESHOLD = "window", "threshold"
_TURN = "turn"


def join_loop(opening: ir.Model, turn: ir.Model, carried: int, collected: Sequence[str]) -> list[ir.Value]:
    """Put a Loop of `turn` behind the graph of `opening`; the model `opening` is changed in place, `turn` is used up.

    `turn` takes its number, int64 [], the `carried` first outputs of the opening, and the others of them; it gives
    the next carried values, of which the last is float32 [rows], the chance, and what is collected of every turn. The
    loop has at most `window` turns (a new input, int64 []) and ends when no chance reaches `threshold` (float32 []).
    Gives the collected values, [turns, …] each; the graph has no outputs yet.
    """
    graph, body = opening.graph, turn.graph
    opened = list(graph.outputs)
    graph.outputs.clear()
    window, threshold = _scalar(WINDOW, ir.DataType.INT64), _scalar(THRESHOLD, ir.DataType.FLOAT)
    graph.inputs.extend([window, threshold])
    number, *flows = list(body.inputs)
    for inner, outer in zip(flows[carried:], opened[carried:], strict=True):
        inner.replace_all_uses_with(outer)
    _prefix_names(body)
    following = list(body.outputs)
    highest = ir.node("ReduceMax", [following[carried - 1]], {"keepdims": 0})
    worth = ir.node("GreaterOrEqual", [highest.outputs[0], threshold])
    going = worth.outputs[0]
    going.name, going.type, going.shape = f"{_TURN}/going", ir.TensorType(ir.DataType.BOOL), ir.Shape([])
    going_before = ir.Value(name=f"{_TURN}/went", type=going.type, shape=going.shape)
    weights = list(body.initializers.values())
    body.initializers.clear()
    body.extend([highest, worth])
    body.inputs[:] = [number, going_before, *flows[:carried]]
    body.outputs[:] = [going, *following]
    for weight in weights:
        graph.register_initializer(weight)
    loop = ir.node(
        "Loop",
        [window, None, *opened[:carried]],
        {"body": body},
        num_outputs=carried + len(collected),
        name="loop",
    )
    graph.append(loop)
    for index, value in enumerate(loop.outputs[:carried]):
        value.name = f"last_{index}"
    found = list(loop.outputs[carried:])
    for value, inner, name in zip(found, following[carried:], collected, strict=True):
        value.name, value.type = f"{name} of each turn", inner.type
        value.shape = ir.Shape(["turns", *(inner.shape or ())])
    return found


def pad_turns(graph: ir.Graph, values: Sequence[ir.Value], names: Sequence[str]) -> list[ir.Value]:
    """Lengthen [turns, …] to [window, …] with zeros."""
    window = next(value for value in graph.inputs if value.name == WINDOW)
    turns = append(graph, "Shape", [values[0]], {"start": 0, "end": 1}, name="turns")
    missing = append(graph, "Sub", [window, turns], name="turns missing")
    zero, axis = add(graph, "none before", np.zeros(1, np.int64)), add(graph, "along turns", np.zeros(1, np.int64))
    pads = append(graph, "Concat", [zero, missing], {"axis": 0}, name="padding")
    padded = []
    for value, name in zip(values, names, strict=True):
        output = append(graph, "Pad", [value, pads, None, axis], name=name)
        output.type, output.shape = value.type, ir.Shape([WINDOW, *(value.shape or ())[1:]])
        padded.append(output)
    return padded


def append(
    graph: ir.Graph,
    operator: str,
    inputs: Sequence[ir.Value | None],
    attributes: dict[str, int] | None = None,
    *,
    name: str,
) -> ir.Value:
    """Append a node; its one output and the node itself are called `name`."""
    node = ir.node(operator, inputs, attributes, name=name)
    node.outputs[0].name = name
    graph.append(node)
    return node.outputs[0]


def add(graph: ir.Graph, name: str, array: NDArray[np.generic]) -> ir.Value:
    """Add an initialiser."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)
    graph.register_initializer(value)
    return value


def _scalar(name: str, dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([]))


def _prefix_names(graph: ir.Graph) -> None:
    """What the body of a loop calls its values must not be the name of one outside."""
    weights = list(graph.initializers.values())
    graph.initializers.clear()
    for value in [*graph.inputs, *weights, *(output for node in graph for output in node.outputs)]:
        value.name = f"{_TURN}/{value.name}"
        if value.const_value is not None:
            value.const_value.name = value.name
    for weight in weights:
        graph.register_initializer(weight)
    for node in graph:
        node.name = f"{_TURN}/{node.name}"
