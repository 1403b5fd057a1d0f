"""Linear layers with int4 weights in blocks of 32 (com.microsoft::MatMulNBits), activations rounded to int8 inside."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .graph import CONTRIB, add_constant, emit, replace
from .int8_rows import TINY
from .linear import Floats, linear_layers

BLOCK = 32
HEAD_ROWS = "hidden"


def quantize_nbits(model: ir.Model) -> None:
    """Turn linear layers into their int4 form, but not the head, which decides between neighbouring logits.

    A layer whose inputs are no multiple of 32 stays as well: the operator's kernels go wrong in a block cut short.
    """
    for layer in linear_layers(model.graph):
        node = layer.node
        weight = layer.weight
        inputs, outputs = weight.shape
        if layer.rows.name == HEAD_ROWS or inputs % BLOCK:
            continue
        packed, scale = quantize_int4(weight)
        attributes = {"K": inputs, "N": outputs, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
        operands = [
            layer.rows,
            add_constant(node, f"{layer.name}.int4", packed),
            add_constant(node, f"{layer.name}.block_scale", scale),
        ]
        replace(node, [emit(node, "MatMulNBits", operands, attributes, domain=CONTRIB, like=node.outputs[0])])


def quantize_int4(weight: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """[inputs, outputs] -> (two integers a byte [outputs, blocks, 16], scale [outputs, blocks]); 0 to 15 around 8.

    A block's scale takes the sign that lets its largest magnitude fall on -8, the end with one step more.
    """
    blocks = np.ascontiguousarray(weight.T).reshape(weight.shape[1], -1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    scale = (np.where(np.abs(largest) < TINY, TINY, largest) / -8).astype(np.float32)
    integers = (np.rint(blocks / scale[:, :, None]) + 8).clip(0, 15).astype(np.uint8)
    return np.bitwise_or(integers[:, :, 0::2], integers[:, :, 1::2] << 4, dtype=np.uint8), scale
