"""Linear layers with int4 weights in blocks of 32 (com.microsoft::MatMulNBits), activations rounded to int8 inside."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .graph import CONTRIB, add_constant, emit, replace
from .linear import Floats, linear_layers

BLOCK = 32
HEAD_ROWS = "hidden"


def quantize_nbits(model: ir.Model) -> None:
    """Turn every linear layer but the head, which decides between neighbouring logits, into its int4 form."""
    for layer in linear_layers(model.graph):
        node = layer.node
        if layer.rows.name == HEAD_ROWS:
            continue
        packed, scale = quantize_int4(layer.weight)
        inputs, outputs = layer.weight.shape
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
    inputs, outputs = weight.shape
    padded = np.zeros((outputs, -(-inputs // BLOCK) * BLOCK), np.float32)
    padded[:, :inputs] = weight.T
    blocks = padded.reshape(outputs, -1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    scale = (np.where(largest == 0, 1, largest) / -8).astype(np.float32)
    integers = (np.rint(blocks / scale[:, :, None]) + 8).clip(0, 15).astype(np.uint8)
    return np.bitwise_or(integers[:, :, 0::2], integers[:, :, 1::2] << 4, dtype=np.uint8), scale
