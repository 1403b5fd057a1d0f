"""speceyes::Int8KVAttention as a model-local function of standard operators, for runtimes without the plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .operator import ATTRIBUTES, DOMAIN, INPUTS, NAME, OPSET, OUTPUTS
from .quantise import LEVELS, SMALLEST

if TYPE_CHECKING:
    import onnx


def function_proto(half: bool = False) -> onnx.FunctionProto:
    """The body: round the new keys and values, scatter them, widen the cache, attend.

    Queries, keys and values are fp32, as is the attention, which is written out. With `half` they are fp16 or bf16, and
    a standard Attention in that type, which TensorRT has kernels for, reads them. `center`, scales and rounding are
    fp32 in both: codes and scales equal the reference's to the bit, results up to `rounding_bound` of tolerance.py.

    ScatterElements writes the cache, since TensorRT refuses TensorScatter over int8.
    """
    from onnx import parser

    statements = _SHAPES + _round("key", "k", center=True) + _round("value", "v") + (_IN_HALF if half else _IN_FULL)
    function: onnx.FunctionProto = parser.parse_function(f"{_HEADER}\n{{{statements}}}")
    return function


def _round(states: str, side: str, center: bool = False) -> str:
    """Statements from `states` to present_{side}, present_scale_{side} and {side}_read fp32, shaped like the cache."""
    shifted = f"Sub ({side}_wide, center_rows)" if center else f"Identity ({side}_wide)"
    return f"""
    {side}_split = Reshape ({states}, kv_split)
    {side}_heads = Transpose <perm = [0, 2, 1, 3]> ({side}_split)
    {side}_wide = Cast <to = 1> ({side}_heads)
    {side}_shifted = {shifted}
    {side}_parts = Reshape ({side}_shifted, grouped)
    {side}_sizes = Abs ({side}_parts)
    {side}_largest = ReduceMax <keepdims = 1> ({side}_sizes, last)
    {side}_none = Less ({side}_largest, smallest)
    {side}_step = Div ({side}_largest, levels)
    {side}_steps = Where ({side}_none, unit, {side}_step)
    {side}_ratios = Div ({side}_parts, {side}_steps)
    {side}_rounded = Round ({side}_ratios)
    {side}_clipped = Clip ({side}_rounded, lowest, levels)
    {side}_narrow = Cast <to = 3> ({side}_clipped)
    {side}_shape = Shape ({side}_heads)
    {side}_codes = Reshape ({side}_narrow, {side}_shape)
    {side}_scales = Squeeze ({side}_steps, last)
    {side}_scales_shape = Shape ({side}_scales)
    {side}_slots = Expand (places, {side}_shape)
    {side}_scale_slots = Expand (places, {side}_scales_shape)
    present_{side} = ScatterElements <axis = 2> (cache_{side}, {side}_slots, {side}_codes)
    present_scale_{side} = ScatterElements <axis = 2> (scale_{side}, {side}_scale_slots, {side}_scales)

    {side}_held = Cast <to = 1> (present_{side})
    {side}_held_parts = Reshape ({side}_held, grouped)
    {side}_held_steps = Unsqueeze (present_scale_{side}, last)
    {side}_scaled = Mul ({side}_held_parts, {side}_held_steps)
    {side}_present_shape = Shape (present_{side})
    {side}_read = Reshape ({side}_scaled, {side}_present_shape)
"""


_HEADER = f"""<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>
{NAME} <{", ".join(ATTRIBUTES)}> ({", ".join(INPUTS)}) => ({", ".join(OUTPUTS)})"""

_SHAPES = f"""
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    first = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [-1]> ()
    keep_two = Constant <value_ints = [0, 0]> ()
    keep_three = Constant <value_ints = [0, 0, 0]> ()
    joined = Constant <value_ints = [0, 0, -1]> ()
    as_rows = Constant <value_ints = [-1, 1, 1, 1]> ()
    as_column = Constant <value_ints = [1, 1, -1, 1]> ()
    unit = Constant <value_float = 1.0> ()
    levels = Constant <value_float = {LEVELS}.0> ()
    lowest = Constant <value_float = -{LEVELS}.0> ()
    smallest = Constant <value_float = {float(SMALLEST):.9e}> ()
    heads = Constant <value_int: int = @q_num_heads> ()
    kv_heads = Constant <value_int: int = @kv_num_heads> ()
    groups = Constant <value_int: int = @groups> ()
    heads_1d = Reshape (heads, last)
    kv_heads_1d = Reshape (kv_heads, last)
    groups_1d = Reshape (groups, last)
    kv_split = Concat <axis = 0> (keep_two, kv_heads_1d, last)
    grouped = Concat <axis = 0> (keep_three, groups_1d, last)
    center_rows = Unsqueeze (center, first)

    width_1d = Shape <start = 1, end = 2> (query)
    width = Squeeze (width_1d)
    steps = Range (zero, width, one)
    step_column = Reshape (steps, as_column)
    start = Reshape (write_index, as_rows)
    places = Add (start, step_column)
"""

_IN_FULL = """
    each = Div (heads, kv_heads)
    each_1d = Reshape (each, last)
    query_split = Concat <axis = 0> (keep_two, kv_heads_1d, each_1d, last)
    query_rows = Reshape (query, query_split)
    query_heads = Transpose <perm = [0, 2, 3, 1, 4]> (query_rows)
    second = Constant <value_ints = [2]> ()
    k_each = Unsqueeze (k_read, second)
    v_each = Unsqueeze (v_read, second)
    keys = Transpose <perm = [0, 1, 2, 4, 3]> (k_each)
    products = MatMul (query_heads, keys)
    factor = Constant <value_float: float = @scale> ()
    scores = Mul (products, factor)
    visible = Unsqueeze (mask, first)
    hidden = Constant <value_float = -1e30> ()
    nothing = Constant <value_float = 0.0> ()
    masked = Where (visible, scores, hidden)
    shares = Softmax <axis = -1> (masked)
    seen = Where (visible, shares, nothing)
    summed = MatMul (seen, v_each)
    tokens = Transpose <perm = [0, 3, 1, 2, 4]> (summed)
    attended = Reshape (tokens, joined)
"""

_IN_HALF = """
    query_split = Concat <axis = 0> (keep_two, heads_1d, last)
    query_rows = Reshape (query, query_split)
    query_heads = Transpose <perm = [0, 2, 1, 3]> (query_rows)
    keys = CastLike (k_read, query)
    values = CastLike (v_read, query)
    summed = Attention <scale: float = @scale> (query_heads, keys, values, mask)
    tokens = Transpose <perm = [0, 2, 1, 3]> (summed)
    attended = Reshape (tokens, joined)
"""
