"""The CUDA kernels as plugins of TensorRT: an engine holds their PTX and runs no Python. Never run on a GPU.

A plugin compiled ahead of time launches one kernel, and the operator takes three that wait for each other: hence three
plugins, and a function that calls them in the operator's place.
"""

# No `from __future__ import annotations`: TensorRT reads a plugin's signature from the annotations as objects.
import sys
from typing import TYPE_CHECKING, Any

from .kernel import launches, ptx
from .operator import ATTRIBUTES, DOMAIN, INPUTS, NAME, OPSET, OUTPUTS, VERSION

if TYPE_CHECKING:
    import onnx

WRITE, ATTEND, JOIN = "Int8KVWrite", "Int8KVAttend", "Int8KVJoin"
KINDS = {"FLOAT": "float", "HALF": "half", "BF16": "bfloat16"}
TYPES = "FP32|FP16|BF16"

_BODY = f"""
<domain: "{DOMAIN}", opset_import: ["" : {OPSET}, "{DOMAIN}" : {VERSION}]>
{NAME} <{", ".join(ATTRIBUTES)}> ({", ".join(INPUTS)}) => ({", ".join(OUTPUTS)})
{{
    present_k, present_v, present_scale_k, present_scale_v = {DOMAIN}.{WRITE} <plugin_namespace = "{DOMAIN}">
        (key, value, center, write_index, cache_k, cache_v, scale_k, scale_v)
    highest, weights, sums = {DOMAIN}.{ATTEND} <plugin_namespace = "{DOMAIN}", scale: float = @scale>
        (query, present_k, present_v, present_scale_k, present_scale_v, mask)
    attended = {DOMAIN}.{JOIN} <plugin_namespace = "{DOMAIN}"> (query, highest, weights, sums)
}}
"""


def function_proto() -> "onnx.FunctionProto":
    """The operator as a model-local function of the three plugins, for groups = 1 (one scale a token and head).

    Its cache is changed in place: builds need PreviewFeature.ALIASED_PLUGIN_IO_10_03, and each present_* output of the
    engine bound to the address of its cache_* input.
    """
    from onnx import parser

    function: onnx.FunctionProto = parser.parse_function(_BODY)
    return function


def register() -> None:
    """Put the plugins into the registry of this process's TensorRT, once.

    Raises ImportError without `tensorrt`, RuntimeError where TensorRT for RTX is loaded: it has no plugins, and parsing
    a node that a creator stands for ends its process.
    """
    if "tensorrt_rtx" in sys.modules:
        raise RuntimeError("tensorrt_rtx is loaded, which has no plugins; register them in a process of their own")
    import tensorrt as trt
    import tensorrt.plugin as trtp

    if not hasattr(trtp.op, DOMAIN):
        _register_write(trtp)
        _register_attend(trt, trtp)
        _register_join(trtp)


def _register_write(trtp: Any) -> None:
    @trtp.register(f"{DOMAIN}::{WRITE}")  # type: ignore[untyped-decorator]
    def describe(
        key: trtp.TensorDesc,
        value: trtp.TensorDesc,
        center: trtp.TensorDesc,
        write_index: trtp.TensorDesc,
        cache_k: trtp.TensorDesc,
        cache_v: trtp.TensorDesc,
        scale_k: trtp.TensorDesc,
        scale_v: trtp.TensorDesc,
    ) -> tuple[trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc]:
        return cache_k.aliased(), cache_v.aliased(), scale_k.aliased(), scale_v.aliased()

    @trtp.autotune(f"{DOMAIN}::{WRITE}")  # type: ignore[untyped-decorator]
    def tune(key, value, center, write_index, cache_k, cache_v, scale_k, scale_v, outputs):  # type: ignore[no-untyped-def]
        caches = "INT8, INT8, FP32, FP32"
        return [trtp.AutoTuneCombination(f"{TYPES}, {TYPES}, FP32, INT64, {caches}, {caches}", "LINEAR")]

    @trtp.aot_impl(f"{DOMAIN}::{WRITE}")  # type: ignore[untyped-decorator]
    def compiled(  # type: ignore[no-untyped-def]
        key, value, center, write_index, cache_k, cache_v, scale_k, scale_v, outputs, tactic
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        batch, width, _ = key.shape_expr
        _, kv_heads, capacity, head_dim = cache_k.shape_expr
        _one_group(scale_k)
        return _embedded(trtp, launches.write(_kind(key), batch, width, kv_heads, capacity, head_dim))


def _register_attend(trt: Any, trtp: Any) -> None:
    @trtp.register(f"{DOMAIN}::{ATTEND}")  # type: ignore[untyped-decorator]
    def describe(
        query: trtp.TensorDesc,
        present_k: trtp.TensorDesc,
        present_v: trtp.TensorDesc,
        present_scale_k: trtp.TensorDesc,
        present_scale_v: trtp.TensorDesc,
        mask: trtp.TensorDesc,
        scale: float,
    ) -> tuple[trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc]:
        batch, width, channels = query.shape_expr
        _, _, capacity, head_dim = present_k.shape_expr
        rows = (batch, width, channels // head_dim, launches.chunks(capacity))
        partial = [trtp.from_shape_expr(shape, trt.float32) for shape in (rows, rows, (*rows, head_dim))]
        return partial[0], partial[1], partial[2]

    @trtp.autotune(f"{DOMAIN}::{ATTEND}")  # type: ignore[untyped-decorator]
    def tune(query, present_k, present_v, present_scale_k, present_scale_v, mask, outputs):  # type: ignore[no-untyped-def]
        return [trtp.AutoTuneCombination(f"{TYPES}, INT8, INT8, FP32, FP32, BOOL, FP32, FP32, FP32", "LINEAR")]

    @trtp.aot_impl(f"{DOMAIN}::{ATTEND}")  # type: ignore[untyped-decorator]
    def compiled(  # type: ignore[no-untyped-def]
        query, present_k, present_v, present_scale_k, present_scale_v, mask, scale, outputs, tactic
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        batch, width, channels = query.shape_expr
        _, kv_heads, capacity, head_dim = present_k.shape_expr
        fixed = present_k.shape[3]
        sizes = (batch, width, channels // head_dim, kv_heads, capacity)
        return _embedded(trtp, launches.attend(_kind(query), fixed, scale, *sizes))


def _register_join(trtp: Any) -> None:
    @trtp.register(f"{DOMAIN}::{JOIN}")  # type: ignore[untyped-decorator]
    def describe(
        query: trtp.TensorDesc, highest: trtp.TensorDesc, weights: trtp.TensorDesc, sums: trtp.TensorDesc
    ) -> trtp.TensorDesc:
        return query.like()

    @trtp.autotune(f"{DOMAIN}::{JOIN}")  # type: ignore[untyped-decorator]
    def tune(query, highest, weights, sums, outputs):  # type: ignore[no-untyped-def]
        return [trtp.AutoTuneCombination(f"{TYPES}, FP32, FP32, FP32, {TYPES}", "LINEAR")]

    @trtp.aot_impl(f"{DOMAIN}::{JOIN}")  # type: ignore[untyped-decorator]
    def compiled(  # type: ignore[no-untyped-def]
        query, highest, weights, sums, outputs, tactic
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        return _embedded(trtp, launches.join(_kind(query), *sums.shape_expr))


def _one_group(scales: Any) -> None:
    """Raises ValueError for several scales a token and head, of which the kernels know nothing."""
    if scales.shape[3] != 1:
        raise ValueError(
            f"quant_groups: found {scales.shape[3]}; the kernels take 1, build with one group or without them"
        )


def _kind(tensor: Any) -> str:
    """The kernels' word for a tensor's type. Raises ValueError for another one than float, half and bfloat16."""
    if tensor.dtype.name not in KINDS:
        raise ValueError(f"{NAME}: found queries of type {tensor.dtype.name}; {', '.join(KINDS)} are allowed")
    return KINDS[tensor.dtype.name]


def _embedded(trtp: Any, launch: launches.Launch) -> tuple[str, str, Any, Any]:
    """What TensorRT puts into the engine. Raises ValueError for a head_dim that no kernel is compiled for."""
    grid = trtp.KernelLaunchParams()
    grid.grid_x, grid.grid_y, grid.grid_z = launch.grid
    grid.block_x = ptx.THREADS
    sizes = trtp.SymIntExprs.from_tuple(tuple(trtp.SymInt32(size) for size in launch.sizes))
    return launch.kernel, ptx.only(ptx.shipped(), launch.kernel), grid, sizes
