"""speceyes::CachedAttention -> com.microsoft::GroupQueryAttention, which reads and writes the cache in place."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...engines.errors import LoweringError
from ...plugins import cached_attention as operator
from .graph import CONTRIB, add_constant, attribute, emit, emit_many, nodes_of, replace


def lower_cached_attention(model: ir.Model) -> None:
    """Replace every CachedAttention; the graph input `mask` goes when nothing else reads it.

    GroupQueryAttention is causal over absolute cache slots and takes the sliding window itself, so `mask` and
    `kv_length` have no part in it. Padding on the right counts as real tokens: nothing that is read looks at it, and a
    row of one real token and padding keeps its bits, since a single token would run through a kernel of its own.

    Raises LoweringError for attributes that GroupQueryAttention cannot express.
    """
    graph = model.graph
    lengths: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for node in nodes_of(graph, operator.NAME, operator.DOMAIN):
        unknown = sorted(set(node.attributes) - set(operator.ATTRIBUTES))
        if unknown:
            raise LoweringError(
                f"node {node.name!r} ({node.op_type}), rule attention: attribute {unknown[0]!r} has no counterpart in "
                f"GroupQueryAttention; known are {', '.join(operator.ATTRIBUTES)}; compile for another target"
            )
        query, key, value, cache_k, cache_v, write_index, _kv_length, _mask = node.inputs
        assert query is not None and write_index is not None
        if write_index not in lengths:
            lengths[write_index] = _derive_lengths(node, query, write_index)
        last_slot, longest, widths = lengths[write_index]
        attributes = {
            "num_heads": attribute(node, "q_num_heads", 0),
            "kv_num_heads": attribute(node, "kv_num_heads", 0),
            "scale": attribute(node, "scale", 0.0),
            "local_window_size": attribute(node, "window", 0) or -1,
        }
        inputs = [query, key, value, cache_k, cache_v, last_slot, longest, *[None] * 9, widths]
        replace(node, emit_many(node, "GroupQueryAttention", inputs, attributes, domain=CONTRIB, like=node.outputs))
    model.functions.pop((operator.DOMAIN, operator.NAME, ""), None)
    graph.opset_imports.pop(operator.DOMAIN, None)
    for unused in [v for v in graph.inputs if v.name == "mask" and not v.uses()]:
        graph.inputs.remove(unused)


def _derive_lengths(node: ir.Node, query: ir.Value, write_index: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """(last slot written per row [batch], slots used by the longest row [], width per row [batch]), all int32."""
    one = add_constant(node, "lowering.one", np.array(1, np.int64))
    scalar = add_constant(node, "lowering.scalar", np.array([], np.int64))
    width = emit(node, "Reshape", [emit(node, "Shape", [query], {"start": 1, "end": 2}), scalar])
    end = emit(node, "Add", [write_index, width], like=write_index)
    int32 = {"to": ir.DataType.INT32}
    last_slot = emit(node, "Cast", [emit(node, "Sub", [end, one], like=write_index)], int32)
    longest = emit(node, "Cast", [emit(node, "ReduceMax", [end], {"keepdims": 0})], int32)
    widths = emit(node, "Cast", [emit(node, "Sub", [end, write_index], like=write_index)], int32)
    return last_slot, longest, widths
