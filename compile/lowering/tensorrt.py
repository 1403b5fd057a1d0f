"""The rules of the TensorRT targets: canonical graph -> strongly typed graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

import onnx_ir as ir
from onnx_ir.passes import common

from ...engines.errors import LoweringError
from .linear import unfold_head
from .tensorrt_attention import write_out_attention
from .tensorrt_loop import write_out_turns
from .tensorrt_precision import HALVES, check_lifted, halve, halve_products
from .tensorrt_weights import quantize_weights, quantize_weights_and_rows

Rule = Callable[[ir.Model], None]

_WEIGHTS: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "": (),
        "w8a16": (unfold_head, quantize_weights),
        "w8a8": (unfold_head, quantize_weights_and_rows),
    }
)

PARTS = ("decoder", "vision", "predictor", "predictor_image")
PRECISIONS: tuple[str, ...] = tuple("-".join(filter(None, (half, weights))) for half in HALVES for weights in _WEIGHTS)
"""What a decoder and a vision part can be lowered to."""

PREDICTOR_PRECISIONS: tuple[str, ...] = tuple(HALVES)


def lower_for_tensorrt(
    model: ir.Model,
    part: str,
    precision: str,
    *,
    capacity: int = 0,
    turns: int = 0,
    lifted: Collection[str] = (),
) -> ir.Model:
    """Rewrite a canonical graph in place into the strongly typed form that TensorRT builds, and return it.

    `capacity`: slots of a decoder's cache. `turns`: tokens of a predictor's draft. `lifted`: names of canonical tensors
    that do not fit in the half type, see compile/tensorrt/ranges.py. Graph inputs and outputs stay fp32, the cache is
    in the half type. Raises LoweringError for what cannot be lowered.
    """
    allowed = precisions(part)
    if precision not in allowed:
        raise LoweringError(
            f"precision of the {part}: found {precision!r}; allowed for TensorRT are {', '.join(allowed)}; "
            f"set `tensorrt.precision.{part}` in the recipe"
        )
    half, _, weights = precision.partition("-")
    if part.startswith("predictor"):
        write_out_turns(model, turns)
        halve_products(model, HALVES[half], lifted)
    else:
        check_lifted(model, lifted)
        for rule in _WEIGHTS[weights]:
            rule(model)
        write_out_attention(model, capacity)
        halve(model, HALVES[half], lifted)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)
    for node in model.graph:
        if node.domain:
            raise LoweringError(
                f"node {node.name!r} ({node.domain}::{node.op_type}): no rule of the TensorRT targets turns it into a "
                "standard operator; export the checkpoint again with this release"
            )
    return model


def precisions(part: str) -> tuple[str, ...]:
    """What a part can be lowered to. Raises LoweringError for an unknown part."""
    if part not in PARTS:
        raise LoweringError(f"part: found {part!r}; allowed are {', '.join(PARTS)}")
    return PREDICTOR_PRECISIONS if part.startswith("predictor") else PRECISIONS
