"""Standard Attention without a mask -> com.microsoft::MultiHeadAttention.

Its kernel goes block by block and never holds the scores of all tokens against all, which a large image cannot afford.
"""

from __future__ import annotations

import onnx_ir as ir

from .graph import CONTRIB, attribute, emit, nodes_of, replace


def lower_attention(model: ir.Model) -> None:
    """Replace every Attention over [batch, tokens, hidden] with as many key as query heads, no mask and no cache."""
    for node in nodes_of(model.graph, "Attention"):
        query, key, value = node.inputs[:3]
        heads = attribute(node, "q_num_heads", 0)
        known = {"scale", "q_num_heads", "kv_num_heads"}
        if len(node.inputs) > 3 or heads != attribute(node, "kv_num_heads", 0) or set(node.attributes) - known:
            continue
        attributes = {"num_heads": heads, "scale": attribute(node, "scale", 0.0)}
        inputs = [query, key, value]
        replace(node, [emit(node, "MultiHeadAttention", inputs, attributes, domain=CONTRIB, like=node.outputs[0])])
