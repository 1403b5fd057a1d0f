"""speceyes::Int8KVAttention as a model-local function of standard operators, for runtimes without the plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .operator import ATTRIBUTES, DOMAIN, INPUTS, NAME, OPSET, OUTPUTS
from .quantise import LEVELS, SMALLEST

if TYPE_CHECKING:
    import onnx


def function_proto() -> onnx.FunctionProto:
    """The body: scatter the rounded keys and values, widen the cache, softmax in fp32.

    It scatters with ScatterElements, since TensorScatter over int8 is refused by TensorRT, and sums in the order of the
    runtime's own kernels: equal to the reference within the rounding of fp32, not bit for bit.
    """
    from onnx import parser

    function: onnx.FunctionProto = parser.parse_function(_BODY)
    return function


def _rounded(side: str, values: str) -> str:
    """Statements that round `values` [batch, kv_heads, width, head_dim] and put codes and scales into the cache."""
    return f"""
    {side}_parts = Reshape ({values}, grouped)
    {side}_size = Abs ({side}_parts)
    {side}_largest = ReduceMax <keepdims = 1> ({side}_size, rest)
    {side}_none = Less ({side}_largest, smallest)
    {side}_step = Div ({side}_largest, levels)
    {side}_scales = Where ({side}_none, unit, {side}_step)
    {side}_ratio = Div ({side}_parts, {side}_scales)
    {side}_round = Round ({side}_ratio)
    {side}_clipped = Clip ({side}_round, lowest, levels)
    {side}_narrow = Cast <to = 3> ({side}_clipped)
    {side}_shape = Shape ({values})
    {side}_codes = Reshape ({side}_narrow, {side}_shape)
    {side}_slots = Expand (places, {side}_shape)
    present_{side} = ScatterElements <axis = 2> (cache_{side}, {side}_slots, {side}_codes)
    {side}_flat_scales = Reshape ({side}_scales, keep_three)
    {side}_scale_shape = Shape ({side}_flat_scales)
    {side}_scale_slots = Expand (places, {side}_scale_shape)
    present_scale_{side} = ScatterElements <axis = 2> (scale_{side}, {side}_scale_slots, {side}_flat_scales)
    {side}_wide = Cast <to = 1> (present_{side})
    {side}_wide_parts = Reshape ({side}_wide, grouped)
    {side}_each = Unsqueeze (present_scale_{side}, rest)
    {side}_scaled = Mul ({side}_wide_parts, {side}_each)
    {side}_whole = Shape (present_{side})
    {side}_values = Reshape ({side}_scaled, {side}_whole)
    {side}_held = Unsqueeze ({side}_values, two)
"""


_BODY = f"""
<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>
{NAME} <{", ".join(ATTRIBUTES)}> ({", ".join(INPUTS)}) => ({", ".join(OUTPUTS)})
{{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    two = Constant <value_ints = [2]> ()
    rest = Constant <value_ints = [-1]> ()
    keep = Constant <value_ints = [0, 0]> ()
    keep_three = Constant <value_ints = [0, 0, 0, -1]> ()
    flat = Constant <value_ints = [0, 0, -1]> ()
    as_row = Constant <value_ints = [-1, 1, 1, 1]> ()
    as_column = Constant <value_ints = [1, 1, -1, 1]> ()
    unit = Constant <value_float = 1.0> ()
    levels = Constant <value_float = {LEVELS}.0> ()
    lowest = Constant <value_float = -{LEVELS}.0> ()
    smallest = Constant <value_float = {float(SMALLEST):.9e}> ()
    nothing = Constant <value_float = 0.0> ()
    hidden = Constant <value_float = -1e30> ()
    heads = Constant <value_int: int = @q_num_heads> ()
    kv_heads = Constant <value_int: int = @kv_num_heads> ()
    each = Div (heads, kv_heads)
    kv_heads_1d = Reshape (kv_heads, rest)
    each_1d = Reshape (each, rest)
    groups = Constant <value_int: int = @groups> ()
    groups_1d = Reshape (groups, rest)
    key_shape = Concat <axis = 0> (keep, kv_heads_1d, rest)
    query_shape = Concat <axis = 0> (keep, kv_heads_1d, each_1d, rest)
    keep_slots = Constant <value_ints = [0, 0, 0]> ()
    grouped = Concat <axis = 0> (keep_slots, groups_1d, rest)

    width_1d = Shape <start = 1, end = 2> (query)
    width = Squeeze (width_1d)
    step = Range (zero, width, one)
    step_column = Reshape (step, as_column)
    start = Reshape (write_index, as_row)
    places = Add (start, step_column)

    key_split = Reshape (key, key_shape)
    key_heads = Transpose <perm = [0, 2, 1, 3]> (key_split)
    center_column = Unsqueeze (center, axis_one)
    key_centered = Sub (key_heads, center_column)
    value_split = Reshape (value, key_shape)
    value_heads = Transpose <perm = [0, 2, 1, 3]> (value_split)
{_rounded("k", "key_centered")}{_rounded("v", "value_heads")}
    query_split = Reshape (query, query_shape)
    query_heads = Transpose <perm = [0, 2, 3, 1, 4]> (query_split)
    keys = Transpose <perm = [0, 1, 2, 4, 3]> (k_held)
    products = MatMul (query_heads, keys)
    factor = Constant <value_float: float = @scale> ()
    scores = Mul (products, factor)
    mask_heads = Unsqueeze (mask, axis_one)
    masked = Where (mask_heads, scores, hidden)
    shares = Softmax <axis = -1> (masked)
    seen = Where (mask_heads, shares, nothing)
    summed = MatMul (seen, v_held)
    tokens = Transpose <perm = [0, 3, 1, 2, 4]> (summed)
    attended = Reshape (tokens, flat)
}}
""".replace("    two = Constant", "    axis_one = Constant <value_ints = [1]> ()\n    two = Constant", 1)
