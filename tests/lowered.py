"""Lowered graphs of the tiny checkpoints, and small graphs of one layer, in ONNX Runtime."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from speceyes.compile.lowering import lower
from speceyes.plugins.int8_attention.operator import CHUNK

from .checkpoints import exported
from .stepper import Row, Stepper, walk


class Session:
    """An inference session that takes only the inputs its graph still has."""

    def __init__(self, model: ir.Model, threads: int = 1) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        data = ir.serde.serialize_model(model).SerializeToString()
        self._session: Any = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def get_inputs(self) -> list[Any]:
        return list(self._session.get_inputs())

    def get_outputs(self) -> list[Any]:
        return list(self._session.get_outputs())

    def run(self, names: list[str] | None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        known = {value.name for value in self.get_inputs()}
        return list(self._session.run(names, {name: array for name, array in feeds.items() if name in known}))


@cache
def lowered(family: str, part: str, precision: str, kv: str = "fp32") -> ir.Model:
    """Made once per process; do not change it in place."""
    return lower(exported(family).parts[part].clone(), part, precision, kv)


@cache
def session(family: str, part: str, precision: str | None, threads: int = 1, kv: str = "fp32") -> Session:
    """The lowered graph loaded, or the canonical one for the precision None."""
    model = exported(family).parts[part] if precision is None else lowered(family, part, precision, kv)
    return Session(model, threads)


def texts(family: str, lengths: tuple[int, ...]) -> list[Row]:
    """Random texts; in families with vision some tokens are rows of three image features."""
    checkpoint = exported(family).checkpoint
    rows = []
    for seed, length in enumerate(lengths):
        rng = np.random.default_rng(seed)
        row = Row.of_text(rng.integers(0, 300, length).tolist())
        if checkpoint.family.has_vision:
            row.feature_index = rng.integers(-1, 3, length)
        if checkpoint.family.rope == "mrope":
            row.position_ids = np.stack([row.position_ids, row.position_ids // 2, row.position_ids // 3])
        rows.append(row)
    return rows


def logits(
    family: str,
    precision: str | None,
    lengths: tuple[int, ...],
    widths: list[int],
    *,
    seed: int = 0,
    threads: int = 1,
    kv: str = "fp32",
) -> list[np.ndarray]:
    """Each text's logits [length, vocabulary], computed in ragged steps of these widths."""
    checkpoint = exported(family).checkpoint
    opened: Any = session(family, "decoder", precision, threads, kv)
    features = None
    if checkpoint.family.has_vision:
        features = np.random.default_rng(3).standard_normal((3, checkpoint.hidden)).astype(np.float32)
    capacity = max(lengths) + max(widths)
    if kv == "int8":
        capacity = -(-capacity // CHUNK) * CHUNK
    stepper = Stepper(opened, texts(family, lengths), capacity, features)
    return walk(stepper, widths, seed)


def layer_graph(weight: np.ndarray, bias: np.ndarray | None = None, *, rows: str = "rows") -> ir.Model:
    """A canonical graph of one linear layer: `x` [rows, inputs] -> `y` [rows, outputs]."""
    inputs, outputs = weight.shape
    tape = ir.tape.Tape()
    x = ir.val("x", ir.DataType.FLOAT, [rows, inputs])
    y = tape.op("MatMul", [x, tape.initializer(ir.tensor(weight, name="layer.weight"))])
    if bias is not None:
        y = tape.op("Add", [y, tape.initializer(ir.tensor(bias, name="layer.bias"))])
    y.name, y.dtype, y.shape = "y", ir.DataType.FLOAT, ir.Shape([rows, outputs])
    graph = ir.Graph([x], [y], nodes=tape.nodes, initializers=tape.initializers, opset_imports={"": 24}, name="layer")
    return ir.Model(graph, ir_version=11)
