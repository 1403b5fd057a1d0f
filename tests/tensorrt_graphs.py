"""Graphs lowered for TensorRT in ONNX Runtime's CPU provider, which has most operators in fp16 and few in bf16."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from speceyes.compile.lowering.tensorrt import lower_for_tensorrt

from .checkpoints import exported

CAPACITY, TURNS = 128, 3
WIDE, NARROW = ir.DataType.FLOAT, ir.DataType.BFLOAT16


@cache
def lowered(family: str, part: str, precision: str) -> ir.Model:
    """Made once per process; do not change it in place."""
    return lower_for_tensorrt(exported(family).parts[part].clone(), part, precision, capacity=CAPACITY, turns=TURNS)


class Session:
    """A lowered graph that takes fp32 caches and gives fp32 results; inputs that it does not have are left out."""

    def __init__(self, model: ir.Model) -> None:
        model = without_bf16(model.clone())
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        data = ir.serde.serialize_model(model).SerializeToString()
        self._session: Any = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self._halves = {value.name for value in self.get_inputs() if value.type == "tensor(float16)"}

    def get_inputs(self) -> list[Any]:
        return list(self._session.get_inputs())

    def get_outputs(self) -> list[Any]:
        return list(self._session.get_outputs())

    def run(self, names: list[str] | None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        known = {value.name for value in self.get_inputs()}
        given = {
            name: array.astype(np.float16) if name in self._halves else array
            for name, array in feeds.items()
            if name in known
        }
        return [
            made.astype(np.float32) if made.dtype == np.float16 else made for made in self._session.run(names, given)
        ]


def without_bf16(model: ir.Model) -> ir.Model:
    """The same graph in fp32 where it is in bf16, with weights and casts rounded to bf16 all the same."""
    graph = model.graph
    for value in [*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)]:
        if value.dtype == NARROW:
            value.type = ir.TensorType(WIDE)
            if value.const_value is not None:
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    for node in tuple(graph):
        if node.op_type == "Cast" and node.attributes["to"].value == NARROW:
            rounded = ir.node("Cast", [node.inputs[0]], {"to": NARROW})
            graph.insert_before(node, rounded)
            node.replace_input_with(0, rounded.outputs[0])
            node.attributes["to"] = ir.AttrInt64("to", WIDE)
    return model
