"""Bring an exported graph into canonical form: constant shapes, weights [in, out], stable names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import optimize_ir

_SCOPES = "pkg.torch.onnx.name_scopes"
_SLICED_LIST = re.compile(r"\.slice\([^)]*\)")


def canonicalise(model: ir.Model, outputs: Sequence[str]) -> None:
    """Rewrite `model` in place; `outputs` names the graph's outputs."""
    for value, name in zip(model.graph.outputs, outputs, strict=True):
        value.name = name
    optimize_ir(model, should_fold=lambda node: False if node.op_type == "Transpose" else None)
    fold_reshapes(model.graph)
    split_gemms(model.graph, keep=outputs)
    fold_weight_transposes(model.graph)
    common.RemoveUnusedNodesPass()(model)
    common.DeduplicateInitializersPass()(model)
    order_nodes(model.graph)
    name_everything(model.graph)
    common.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.graph.metadata_props.clear()


def rename_dimensions(graph: ir.Graph, names: Mapping[str, str]) -> None:
    """Replace symbolic dimensions, spelt exactly as the keys of `names`."""
    for value in [*graph.inputs, *(output for node in graph for output in node.outputs)]:
        if value.shape is not None:
            value.shape = ir.Shape([dim if isinstance(dim, int) else names.get(str(dim), dim) for dim in value.shape])


def fold_reshapes(graph: ir.Graph) -> None:
    """Give each Reshape whose target is known but for one dimension a constant target.

    A Reshape or Expand that changes nothing goes, and so does a Reshape that feeds another one.
    """
    for node in list(graph):
        if node.op_type not in ("Reshape", "Expand"):
            continue
        source, target = _before_reshapes(node.inputs[0]), node.outputs[0]
        if source is None or source.shape is None or target.shape is None:
            continue
        if _same(source.shape, target.shape) and not target.is_graph_output():
            target.replace_all_uses_with(source)
        elif node.op_type == "Reshape" and (sizes := _constant_target(source.shape, target.shape)) is not None:
            node.replace_input_with(0, source)
            node.replace_input_with(1, _constant(graph, f"target of {target.name}", np.array(sizes, np.int64)))
            node.attributes.pop("allowzero", None)


def _before_reshapes(value: ir.Value | None) -> ir.Value | None:
    while value is not None and (producer := value.producer()) is not None and producer.op_type == "Reshape":
        value = producer.inputs[0]
    return value


def _same(first: ir.Shape, second: ir.Shape) -> bool:
    return len(first) == len(second) and all(_equal(a, b) for a, b in zip(first, second, strict=True))


def _equal(first: int | ir.SymbolicDim, second: int | ir.SymbolicDim) -> bool:
    return first == second and not (isinstance(first, ir.SymbolicDim) and first.value is None)


def _constant_target(source: ir.Shape, target: ir.Shape) -> list[int] | None:
    """The operand of a Reshape, 0 for a kept dimension and -1 for the one unknown; None if two are unknown."""
    sizes = [
        dim if isinstance(dim, int) else 0 if axis < len(source) and _equal(source[axis], dim) else -1
        for axis, dim in enumerate(target)
    ]
    return sizes if sizes.count(-1) <= 1 else None


def _constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def split_gemms(graph: ir.Graph, keep: Sequence[str]) -> None:
    """Write linear layers over matrices as those over batches are: MatMul, then Add; a Gemm that reads an output stays.

    That one is the head, whose weight [vocabulary, hidden] may also be the embedding table.
    """
    for node in list(graph):
        if node.op_type != "Gemm" or node.inputs[0] is None or node.inputs[0].name in keep:
            continue
        states, weight, bias = (*node.inputs, None)[:3]
        target = node.outputs[0]
        new: list[ir.Node] = []
        if node.attributes.get_int("transB", 0):
            new.append(_node("Transpose", [weight], node, perm=[1, 0]))
            weight = new[-1].outputs[0]
        new.append(_node("MatMul", [states, weight], node))
        if bias is not None:
            new.append(_node("Add", [new[-1].outputs[0], bias], node))
        new[-1].outputs[0].name = target.name
        ir.convenience.replace_nodes_and_values(graph, node, [node], new, [target], [new[-1].outputs[0]])


def _node(op_type: str, inputs: Sequence[ir.Value | None], replaced: ir.Node, **attributes: Sequence[int]) -> ir.Node:
    node = ir.node(op_type, inputs, attributes)
    node.metadata_props.update(replaced.metadata_props)
    node.outputs[0].type = replaced.outputs[0].type
    node.outputs[0].shape = None if op_type == "Transpose" else replaced.outputs[0].shape
    return node


def fold_weight_transposes(graph: ir.Graph) -> None:
    """Store a weight the way MatMul reads it, [in, out]; one that is also an embedding table keeps its Transpose."""
    for node in list(graph):
        weight = node.inputs[0] if node.op_type == "Transpose" else None
        if weight is None or not weight.is_initializer() or weight.const_value is None or len(weight.uses()) > 1:
            continue
        tensor, permutation = weight.const_value, node.attributes["perm"].as_ints()
        node.outputs[0].replace_all_uses_with(weight)
        weight.const_value = _transposed(tensor, permutation)
        weight.shape = weight.const_value.shape
        graph.remove(node, safe=True)


def _transposed(tensor: ir.TensorProtocol, permutation: Sequence[int]) -> ir.LazyTensor:
    """The permuted copy is made when the weight is read, not before."""
    shape = ir.Shape([tensor.shape[axis] for axis in permutation])

    def read() -> ir.Tensor:
        return ir.Tensor(np.ascontiguousarray(tensor.numpy().transpose(permutation)), name=tensor.name)

    return ir.LazyTensor(read, dtype=tensor.dtype, shape=shape, name=tensor.name)


def order_nodes(graph: ir.Graph) -> None:
    """Depth first from the outputs, so that the order does not depend on the order of tracing."""
    ordered: dict[ir.Node, None] = {}
    pending = [(value.producer(), False) for value in reversed(graph.outputs)]
    while pending:
        node, inputs_done = pending.pop()
        if node is None or node in ordered:
            continue
        if inputs_done:
            ordered[node] = None
            continue
        pending.append((node, True))
        pending.extend((value.producer(), False) for value in reversed(node.inputs) if value is not None)
    graph.remove(list(ordered))
    graph.extend(ordered)


def name_everything(graph: ir.Graph) -> None:
    """Name nodes and values after the module they come from, weights after the parameter, constants by number."""
    taken: Counter[str] = Counter()
    fixed = set(graph.inputs) | set(graph.outputs)
    for node in graph:
        base = "/".join(part for part in (_scope(node), node.op_type) if part)
        node.name = f"{base}_{taken[base]}" if taken[base] else base
        taken[base] += 1
        for index, value in enumerate(node.outputs):
            if value not in fixed:
                value.name = f"{node.name}:{index}" if len(node.outputs) > 1 else node.name
    _name_initializers(graph)


def _scope(node: ir.Node) -> str:
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "['', '']"))
    return _SLICED_LIST.sub("", scopes[-2]) if len(scopes) > 1 else ""


def _name_initializers(graph: ir.Graph) -> None:
    used = [value for node in graph for value in node.inputs if value is not None and value.is_initializer()]
    graph.initializers.clear()
    constants = 0
    for value in dict.fromkeys(used):
        if "." not in str(value.name):
            value.name = f"constant_{constants}"
            constants += 1
        if value.const_value is not None:
            value.const_value.name = value.name
        graph.register_initializer(value)
