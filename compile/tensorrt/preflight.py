"""What can be known before a build: rules by name that refuse what cannot work, and what the build will take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ...engines.errors import LoweringError
from ...engines.tensorrt_library import FLAVOURS
from ..lowering.graph import attribute

HEAD_DIMS = range(16, 257, 8)
"""Channels of a head that Attention has kernels for."""

VERSIONS = {"tensorrt-rtx": ((1, 7), (2, 0)), "tensorrt": ((11, 0), (12, 0))}
"""From which version on, and below which, by target."""

BF16_CAPABILITY = 80

REFUSED = {
    "DynamicQuantizeLinear": "TensorRT has no such operator; quantise with QuantizeLinear and a constant scale",
    "MatMulInteger": "TensorRT has no such operator; write int8 products with DequantizeLinear",
    "ConvInteger": "TensorRT has no such operator; write int8 products with DequantizeLinear",
    "Loop": "an engine with a loop cannot be captured, and one that ends early gives outputs of a wrong shape",
    "If": "an engine with a condition cannot be captured",
}


@dataclass(frozen=True)
class Estimate:
    """What building an engine takes at most: bytes of memory beside the process's own, seconds, bytes of disk."""

    memory: int
    seconds: float
    disk: int


def check_machine(target: str, version: str, capabilities: Sequence[int], precisions: Sequence[str]) -> None:
    """Rules version, capability and precision. Raises LoweringError, naming the rule."""
    least, below = VERSIONS[target]
    found = tuple(int(part) for part in version.split(".")[:2])
    if not least <= found < below:
        shown = " and below ".join(".".join(map(str, bound)) for bound in (least, below))
        raise LoweringError(f"rule version: found TensorRT {version}; {target} is built with {shown}")
    known = FLAVOURS[target].capabilities
    for capability in capabilities:
        if known and capability not in known:
            raise LoweringError(
                f"rule capability: found compute capability {capability}; {target} {version} builds for "
                f"{', '.join(map(str, known))}; choose others with --compute-capability"
            )
        if capability < BF16_CAPABILITY and any(precision.startswith("bf16") for precision in precisions):
            raise LoweringError(
                f"rule precision: found bf16 for compute capability {capability}; it needs {BF16_CAPABILITY} or more; "
                "choose fp16"
            )


def check_head_dim(part: str, head_dim: int) -> None:
    """Rule head_dim. Raises LoweringError."""
    if head_dim not in HEAD_DIMS:
        raise LoweringError(
            f"rule head_dim: found heads of {head_dim} channels in the {part}; TensorRT's attention takes multiples of "
            f"{HEAD_DIMS.step} from {HEAD_DIMS.start} to {HEAD_DIMS[-1]}; build for onnxruntime-cpu"
        )


def check_graph(part: str, graph: ir.Graph) -> None:
    """Rules operator, attention and cache over a lowered graph. Raises LoweringError, naming rule and node."""
    for node in graph:
        if reason := next(_faults(part, node), None):
            raise LoweringError(f"node {node.name!r} ({node.op_type}) of the {part}, {reason}")


def estimate(weight_bytes: int, build_twice: bool) -> Estimate:
    """From the bytes of the weights of a lowered graph; see docs/tensorrt.md for the builds that it was made from."""
    gigabytes, builds = weight_bytes / 1e9, 2 if build_twice else 1
    return Estimate(
        memory=int(250_000_000 + 3.5 * weight_bytes),
        seconds=3 + 20 * gigabytes + builds * (1 + 8 * gigabytes),
        disk=int(10_000_000 + 1.1 * weight_bytes),
    )


def _faults(part: str, node: ir.Node) -> Iterator[str]:
    if node.domain:
        yield f"rule operator: it is of the domain {node.domain}, TensorRT has standard operators alone"
    if node.op_type in REFUSED:
        yield f"rule operator: {REFUSED[node.op_type]}"
    dtypes = [value.dtype for value in node.inputs if value is not None]
    if node.op_type == "Attention":
        if dtypes and dtypes[0] == ir.DataType.FLOAT:
            yield "rule attention: TensorRT has it in fp16 and bf16 alone, fp32 was found"
        if len(node.outputs) > 1 or any(value is not None for value in node.inputs[4:]):
            yield "rule attention: TensorRT takes query, key, value and mask, and gives one output"
        if attribute(node, "softcap", 0.0):
            yield "rule attention: TensorRT has no softcap"
        if attribute(node, "is_causal", 0):
            yield "rule attention: TensorRT's causal mask begins at the upper left, wrong over a cache; use a mask"
        if head_dim := _head_dim(node):
            check_head_dim(part, head_dim)
    if node.op_type == "TensorScatter":
        if attribute(node, "mode", "linear") != "linear":
            yield "rule cache: TensorRT writes a cache in the linear mode alone"
        if dtypes[0] == ir.DataType.INT8:
            yield "rule cache: TensorRT writes fp16, bf16 and fp32 caches, int8 was found"
        shape = node.inputs[0].shape if node.inputs[0] is not None else None
        if shape is None or not isinstance(shape[2], int):
            yield "rule cache: TensorRT wants the capacity of a cache fixed"


def _head_dim(node: ir.Node) -> int | None:
    query = node.inputs[0]
    if query is None or query.shape is None or not isinstance(query.shape[-1], int):
        return None
    channels = int(query.shape[-1])
    return channels // attribute(node, "q_num_heads", 1) if len(query.shape) == 3 else channels
