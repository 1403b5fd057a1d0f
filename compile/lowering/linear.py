"""What a linear layer looks like in a canonical graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ...engines.errors import LoweringError
from .graph import add_lazy_constant, attribute, constant, emit, nodes_of, replace

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Linear:
    """`node` multiplies `rows` [..., inputs] by the constant `matrix` [inputs, outputs]."""

    node: ir.Node
    rows: ir.Value
    matrix: ir.Value

    @property
    def name(self) -> str:
        return str(self.matrix.name)

    @property
    def outputs(self) -> int:
        assert self.matrix.shape is not None
        return int(self.matrix.shape[1])

    @property
    def weight(self) -> Floats:
        """[inputs, outputs], read anew at each call: weights are large and often mapped or lazily transposed."""
        weight = constant(self.matrix)
        assert weight is not None
        return weight

    def bias(self) -> tuple[ir.Node, ir.Value] | None:
        """The Add of a constant vector that alone reads the product, and the vector; None when there is none."""
        product = self.node.outputs[0]
        uses = product.uses()
        if len(uses) != 1 or product.is_graph_output() or uses[0].node.op_type != "Add":
            return None
        vector = uses[0].node.inputs[1 - uses[0].idx]
        if vector is None or ir.convenience.get_const_tensor(vector) is None or len(vector.shape or ()) != 1:
            return None
        return uses[0].node, vector


def linear_layers(graph: ir.Graph) -> Iterator[Linear]:
    """Every MatMul by a constant fp32 matrix, in order; the graph may be edited meanwhile."""
    for node in nodes_of(graph, "MatMul"):
        rows, matrix = node.inputs
        if rows is None or matrix is None or ir.convenience.get_const_tensor(matrix) is None:
            continue
        if matrix.dtype == ir.DataType.FLOAT and matrix.shape is not None and len(matrix.shape) == 2:
            yield Linear(node, rows, matrix)


def unfold_head(model: ir.Model) -> None:
    """Turn the head, a Gemm by [vocabulary, hidden] that may also be the embedding table, into a MatMul.

    Raises LoweringError for a Gemm that does more than multiply and add a bias.
    """
    for node in nodes_of(model.graph, "Gemm"):
        rows, table, bias = (*node.inputs, None)[:3]
        tensor = ir.convenience.get_const_tensor(table) if table is not None else None
        settings = [attribute(node, name, default) for name, default in _GEMM_DEFAULTS.items()]
        if settings != [0, 1, 1.0, 1.0] or tensor is None:
            raise LoweringError(
                f"node {node.name!r} (Gemm), rule unfold_head: found {', '.join(_GEMM_DEFAULTS)} = {settings}; "
                "0, 1, 1.0, 1.0 and a constant matrix are expected; export the checkpoint again with this release"
            )
        matrix = _transposed(node, tensor)
        output = emit(node, "MatMul", [rows, matrix], like=node.outputs[0])
        if bias is not None:
            output = emit(node, "Add", [output, bias], like=node.outputs[0])
        replace(node, [output])


_GEMM_DEFAULTS = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}


def _transposed(anchor: ir.Node, table: ir.TensorProtocol) -> ir.Value:
    outputs, inputs = table.shape.numpy()
    return add_lazy_constant(anchor, f"{table.name}.transposed", (inputs, outputs), lambda: table.numpy().T)
