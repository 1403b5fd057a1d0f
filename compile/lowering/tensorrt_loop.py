"""A predictor's Loop -> a fixed number of turns written out.

TensorRT would read the Loop, but gives outputs of a wrong shape when one ends early, and no graph with a loop can be
captured. The turns after the one that the Loop would have ended with draft on; the runtime cuts a draft where its
confidence falls below the threshold, whoever drafted it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from .graph import add_constant, attribute, emit, graph_of, nodes_of, replace

WINDOW, THRESHOLD = "window", "threshold"


def write_out_turns(model: ir.Model, turns: int) -> None:
    """Replace the Loop of a predictor by `turns` copies of its body; the inputs `window` and `threshold` go.

    Outputs of `window` tokens then have `turns`. A graph without a Loop is left as it is.
    """
    graph = model.graph
    for loop in nodes_of(graph, "Loop"):
        carried = list(loop.inputs[2:])
        collected = []
        for turn in range(turns):
            made = _turn(loop, turn, carried)
            carried, found = made[: len(carried)], made[len(carried) :]
            collected.append(found)
        stacked = [_stack(loop, values) for values in zip(*collected, strict=True)]
        replace(loop, [*carried, *stacked])
        _release(loop)
        for value in stacked:
            _skip_padding(value)
    for value in (*graph.outputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None and WINDOW in value.shape:
            value.shape = ir.Shape([turns if size == WINDOW else size for size in value.shape])
    common.RemoveUnusedNodesPass()(model)
    for unused in [v for v in graph.inputs if v.name in (WINDOW, THRESHOLD) and not v.uses()]:
        graph.inputs.remove(unused)


def _turn(loop: ir.Node, turn: int, carried: Sequence[ir.Value | None]) -> list[ir.Value]:
    """A copy of the body in front of the loop; gives what it carries on and what is collected of it."""
    body: ir.Graph = attribute(loop, "body", None)
    copy = body.clone(allow_outer_scope_values=True)
    number = add_constant(loop, f"turn {turn}", np.array(turn, np.int64))
    going = add_constant(loop, "going", np.array(True))
    for inner, outer in zip(copy.inputs, (number, going, *carried), strict=True):
        assert outer is not None
        inner.replace_all_uses_with(outer, replace_graph_outputs=True)
    nodes, outputs = list(copy), list(copy.outputs[1:])
    copy.outputs.clear()
    copy.remove(nodes)
    for node in nodes:
        node.name = f"{node.name}.{turn}"
        for value in node.outputs:
            value.name = f"{value.name}.{turn}"
        graph_of(loop).insert_before(loop, node)
    return outputs


def _release(loop: ir.Node) -> None:
    """The body of a loop that is gone still counts as a user of what it read from outside."""
    for node in attribute(loop, "body", None):
        for place in range(len(node.inputs)):
            node.replace_input_with(place, None)


def _stack(loop: ir.Node, values: Sequence[ir.Value]) -> ir.Value:
    """[…] of each turn -> [turns, …]."""
    first = add_constant(loop, "along turns", np.zeros(1, np.int64))
    rows = [emit(loop, "Unsqueeze", [value, first]) for value in values]
    stacked = emit(loop, "Concat", rows, {"axis": 0})
    for value in (*rows, stacked):
        value.type = values[0].type
    return stacked


def _skip_padding(value: ir.Value) -> None:
    """No turn is missing, so nothing is to be padded."""
    for use in tuple(value.uses()):
        if use.node.op_type == "Pad":
            replace(use.node, [value])
