"""speceyes::CachedAttention -> attention over a cache of int8, with one scale for each token and head.

A token's key and value are rounded when they are written and read as int8 from then on, by that token too: what a
token reads does not depend on the tokens computed beside it. Products with keys are sums of integers. Products with
values are summed up in chunks of CHUNK slots, which no kernel cuts, whatever the number of slots, rows and threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ...engines.errors import LoweringError
from ...plugins import cached_attention as operator
from ...plugins.int8_attention.operator import CHUNK
from ...plugins.int8_attention.quantise import LEVELS, SMALLEST
from .graph import CONTRIB, add_constant, attribute, emit, emit_many, graph_of, nodes_of, replace

QUERY_LEVELS = 63
"""Queries have seven bits: processors without VNNI add pairs of products in 16 bits, and 127 · 127 · 2 fits in them."""


@dataclass(frozen=True)
class _Step:
    """What the layers share: [1], the slots to read, a multiple of CHUNK; [batch, 1, width, 1], where each token is
    written; and the masks [batch, 1, group * width, slots] by window and group."""

    live: ir.Value
    written: ir.Value
    masks: dict[tuple[int, int], ir.Value] = field(default_factory=dict)


def lower_int8_cache(model: ir.Model) -> None:
    """Replace every CachedAttention and make the caches int8; graph inputs that nothing reads any more go.

    Beside `cache_k.N` int8 [batch, kv_heads, capacity, head_dim] stands `cache_k_scale.N` float32
    [batch, kv_heads, capacity, 1]; outputs and values are named alike. Like GroupQueryAttention, the result is causal
    over slots, and padding counts as real tokens. Raises LoweringError for attributes that have no counterpart.
    """
    graph = model.graph
    steps: dict[ir.Value, _Step] = {}
    for node in nodes_of(graph, operator.NAME, operator.DOMAIN):
        unknown = sorted(set(node.attributes) - set(operator.ATTRIBUTES))
        if unknown:
            raise LoweringError(
                f"node {node.name!r} ({node.op_type}), rule int8_cache: attribute {unknown[0]!r} has no counterpart; "
                f"known are {', '.join(operator.ATTRIBUTES)}; compile with `--kv fp32`"
            )
        query, write_index = node.inputs[0], node.inputs[5]
        assert query is not None and write_index is not None
        if write_index not in steps:
            steps[write_index] = _share(node, query, write_index)
        _lower(node, steps[write_index])
    model.functions.pop((operator.DOMAIN, operator.NAME, ""), None)
    graph.opset_imports.pop(operator.DOMAIN, None)
    for unused in [v for v in graph.inputs if v.name in ("mask", "kv_length") and not v.uses()]:
        graph.inputs.remove(unused)


def _share(node: ir.Node, query: ir.Value, write_index: ir.Value) -> _Step:
    width = emit(node, "Shape", [query], {"start": 1, "end": 2})
    end = emit(node, "Add", [emit(node, "ReduceMax", [write_index], {"keepdims": 1}), width])
    chunk = _integers(node, CHUNK)
    chunks = emit(node, "Div", [emit(node, "Add", [end, _integers(node, CHUNK - 1)]), chunk])
    tokens = emit(node, "Reshape", [_range(node, width), _integers(node, 1, 1, -1, 1)])
    first = emit(node, "Reshape", [write_index, _integers(node, -1, 1, 1, 1)])
    return _Step(live=emit(node, "Mul", [chunks, chunk]), written=emit(node, "Add", [first, tokens]))


def _lower(node: ir.Node, step: _Step) -> None:
    query, key, value, *caches, write_index, _, _ = node.inputs
    assert caches[0] is not None and caches[0].shape is not None
    kv_heads, head_dim = (int(caches[0].shape[axis]) for axis in (1, 3))
    group = attribute(node, "q_num_heads", 0) // kv_heads
    codes, scales = _quantise(node, [key, value], kv_heads, head_dim)
    read: list[ir.Value] = []
    presents: list[ir.Value] = []
    for place, cache in enumerate(caches):
        assert cache is not None
        held = _add_scale(node, cache, node.outputs[1 + place])
        for slots, new in zip(held, (codes[place], scales[place]), strict=True):
            present = emit(node, "TensorScatter", [slots, new, write_index], {"axis": 2}, like=slots)
            presents.append(present)
            read.append(emit(node, "Slice", [present, _integers(node, 0), step.live, _integers(node, 2)]))
    keys, key_scales, values, value_scales = read

    magnitude, rows = _round_queries(node, query, kv_heads, group, head_dim)
    scores = emit(
        node,
        "MatMulIntegerToFloat",
        [rows, _turn(node, keys), _number(node, 1 / QUERY_LEVELS), _turn(node, key_scales), _middle(node)],
        domain=CONTRIB,
    )
    factor = emit(node, "Mul", [magnitude, _number(node, attribute(node, "scale", 0.0))])
    mask = _mask(node, step, attribute(node, "window", 0), group)
    scores = emit(node, "Add", [emit(node, "Mul", [scores, factor]), mask])
    shares = emit(node, "Mul", [emit(node, "Softmax", [scores], {"axis": -1}), _turn(node, value_scales)])
    summed = _sum_up(node, shares, values, head_dim)
    heads = emit(node, "Reshape", [summed, _integers(node, 0, kv_heads, group, -1, head_dim)])
    tokens = emit(node, "Transpose", [heads], {"perm": [0, 3, 1, 2, 4]})
    attended = emit(node, "Reshape", [tokens, _integers(node, 0, 0, -1)], like=node.outputs[0])
    present_k, scale_k, present_v, scale_v = presents
    _add_outputs(node, (scale_k, scale_v))
    replace(node, [attended, present_k, present_v])


def _quantise(
    node: ir.Node, pair: Sequence[ir.Value | None], kv_heads: int, head_dim: int
) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
    """Codes int8 [batch, kv_heads, width, head_dim] and scales [batch, kv_heads, width, 1] of the new K and V."""
    joined = emit(node, "Concat", pair, {"axis": -1})
    rows = emit(node, "Reshape", [joined, _integers(node, 0, 0, 2 * kv_heads, head_dim)])
    largest = emit(node, "ReduceMax", [emit(node, "Abs", [rows]), _integers(node, -1)], {"keepdims": 1})
    step = emit(node, "Div", [largest, _number(node, LEVELS)])
    scale = emit(node, "Where", [emit(node, "Less", [largest, _number(node, SMALLEST)]), _number(node, 1), step])
    zero = add_constant(node, "lowering.int8_zero", np.array(0, np.int8))
    codes = emit(node, "QuantizeLinear", [emit(node, "Div", [rows, scale]), _number(node, 1), zero])
    split = []
    for whole in (codes, scale):
        heads = emit(node, "Transpose", [whole], {"perm": [0, 2, 1, 3]})
        split.append(emit_many(node, "Split", [heads], {"axis": 1, "num_outputs": 2}, like=(None, None)))
    return split[0], split[1]


def _round_queries(
    node: ir.Node, query: ir.Value | None, kv_heads: int, group: int, head_dim: int
) -> tuple[ir.Value, ir.Value]:
    """(a [batch, kv_heads, group * width, 1], Q(x / a) uint8 [..., head_dim]); rows of zeros as in int8_rows."""
    split = emit(node, "Reshape", [query, _integers(node, 0, 0, kv_heads, group, head_dim)])
    heads = emit(node, "Transpose", [split], {"perm": [0, 2, 3, 1, 4]})
    rows = emit(node, "Reshape", [heads, _integers(node, 0, kv_heads, -1, head_dim)])
    magnitude = emit(node, "ReduceMax", [emit(node, "Abs", [rows]), _integers(node, -1)], {"keepdims": 1})
    unit = emit(node, "Div", [rows, magnitude])
    return magnitude, emit(node, "QuantizeLinear", [unit, _number(node, 1 / QUERY_LEVELS), _middle(node)])


def _sum_up(node: ir.Node, shares: ir.Value, values: ir.Value, head_dim: int) -> ir.Value:
    """[batch, kv_heads, rows, slots] times int8 [batch, kv_heads, slots, head_dim], chunk by chunk."""
    cut = emit(node, "Reshape", [shares, _integers(node, 0, 0, 0, -1, CHUNK)])
    chunks = emit(node, "Transpose", [cut], {"perm": [0, 1, 3, 2, 4]})
    # As floats, unscaled; DequantizeLinear is vectorised, Cast is not. Behind it a Reshape would be quantised again.
    codes = emit(node, "Reshape", [values, _integers(node, 0, 0, -1, CHUNK, head_dim)])
    products = emit(node, "MatMul", [chunks, emit(node, "DequantizeLinear", [codes, _number(node, 1)])])
    return emit(node, "ReduceSum", [products, _integers(node, 2)], {"keepdims": 0})


def _mask(node: ir.Node, step: _Step, window: int, group: int) -> ir.Value:
    if (window, group) not in step.masks:
        slot = _range(node, step.live)
        seen = emit(node, "LessOrEqual", [slot, step.written])
        if window:
            distance = emit(node, "Sub", [step.written, slot])
            seen = emit(node, "And", [seen, emit(node, "Less", [distance, _integers(node, window)])])
        mask = emit(node, "Where", [seen, _number(node, 0), _number(node, -np.inf)])
        step.masks[window, group] = emit(node, "Concat", [mask] * group, {"axis": 2})
    return step.masks[window, group]


def _add_scale(node: ir.Node, cache: ir.Value, present: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Make a cache int8 and put the input with its scales behind it."""
    assert cache.shape is not None and cache.name is not None
    inputs = graph_of(node).inputs
    cache.type = present.type = ir.TensorType(ir.DataType.INT8)
    shape = ir.Shape([*cache.shape[:3], 1])
    name = cache.name.replace(".", "_scale.")
    scale = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
    inputs.insert(inputs.index(cache) + 1, scale)
    return cache, scale


def _add_outputs(node: ir.Node, scales: Sequence[ir.Value]) -> None:
    outputs = graph_of(node).outputs
    for scale, present in zip(scales, node.outputs[1:], strict=True):
        assert present.name is not None
        scale.name = present.name.replace(".", "_scale.")
        outputs.insert(outputs.index(present) + 1, scale)


def _turn(node: ir.Node, value: ir.Value) -> ir.Value:
    return emit(node, "Transpose", [value], {"perm": [0, 1, 3, 2]})


def _range(node: ir.Node, stop: ir.Value) -> ir.Value:
    """0 … stop - 1, for `stop` [1]."""
    start, step = (add_constant(node, f"lowering.int64_{n}", np.array(n, np.int64)) for n in (0, 1))
    return emit(node, "Range", [start, emit(node, "Squeeze", [stop]), step])


def _integers(node: ir.Node, *values: int) -> ir.Value:
    return add_constant(node, f"lowering.int64s_{'_'.join(map(str, values))}", np.array(values, np.int64))


def _number(node: ir.Node, value: float | np.floating) -> ir.Value:
    return add_constant(node, f"lowering.float_{float(value):.9g}", np.array(value, np.float32))


def _middle(node: ir.Node) -> ir.Value:
    return add_constant(node, "lowering.uint7_middle", np.array(64, np.uint8))
