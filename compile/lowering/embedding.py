"""The embedding table as int8 in blocks: a row is read and scaled in one operator, the file shrinks to a third."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .graph import CONTRIB, add_constant, attribute, constant, emit, nodes_of, replace
from .int8_rows import TINY
from .linear import Floats

BLOCK = 32
IDS = "input_ids"


def quantize_embedding(model: ir.Model) -> None:
    """Quantise the table that `input_ids` index, symmetric in blocks of 32; it stays when 32 does not divide a row."""
    for node in nodes_of(model.graph, "Gather"):
        table, ids = node.inputs
        if ids is None or ids.name != IDS or attribute(node, "axis", 0) != 0:
            continue
        weight = constant(table)
        if weight is None or weight.ndim != 2 or weight.shape[1] % BLOCK:
            continue
        integers, scale = quantize_blocks(weight)
        inputs = [
            add_constant(node, f"{table.name}.uint8", integers),
            ids,
            add_constant(node, f"{table.name}.block_scale", scale),
        ]
        attributes = {"bits": 8, "block_size": BLOCK, "quantize_axis": 1, "gather_axis": 0}
        replace(node, [emit(node, "GatherBlockQuantized", inputs, attributes, domain=CONTRIB, like=node.outputs[0])])


def quantize_blocks(table: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """[rows, hidden] -> (uint8 around 128 of the same shape, scale [rows, hidden / 32])."""
    rows, hidden = table.shape
    blocks = table.reshape(rows, hidden // BLOCK, BLOCK)
    scale = (np.maximum(np.abs(blocks).max(axis=2), TINY) / 127).astype(np.float32)
    steps = blocks / scale[:, :, None]
    np.rint(steps, out=steps)
    steps += 128
    return steps.astype(np.uint8).reshape(rows, hidden), scale
