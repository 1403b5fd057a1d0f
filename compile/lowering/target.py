"""The rules of the target onnxruntime-cpu: which run for a part in a precision, and how its engine is to be run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import onnx_ir as ir
from onnx_ir.passes import common

from ...engines.errors import LoweringError
from ...engines.onnxruntime import MEMORY_REUSE
from .attention import lower_cached_attention
from .embedding import quantize_embedding
from .fuse_projections import fuse_projections
from .graph import CONTRIB
from .int8_cache import lower_int8_cache
from .int8_rows import quantize_rows
from .linear import unfold_head
from .nbits import quantize_nbits
from .vision_attention import lower_attention
from .vision_int8 import quantize_draft, quantize_tiles

Rule = Callable[[ir.Model], None]

_RULES: Mapping[str, Mapping[str, tuple[Rule, ...]]] = MappingProxyType(
    {
        "decoder": {
            "fp32": (lower_cached_attention,),
            "int8": (lower_cached_attention, quantize_embedding, unfold_head, fuse_projections, quantize_rows),
            "int4": (
                *(lower_cached_attention, quantize_embedding, unfold_head, fuse_projections),
                *(quantize_nbits, quantize_rows),
            ),
        },
        "vision": {
            "fp32": (lower_attention,),
            "int8": (lower_attention, fuse_projections, quantize_tiles),
        },
        "predictor": {"fp32": (), "int8": (quantize_draft,)},
        "predictor_image": {"fp32": ()},
    }
)

PRECISIONS: Mapping[str, tuple[str, ...]] = MappingProxyType({part: tuple(rules) for part, rules in _RULES.items()})
"""What each part can be lowered to, the most accurate first."""

KV: Mapping[str, Rule] = MappingProxyType({"fp32": lower_cached_attention, "int8": lower_int8_cache})
"""What the decoder's cache can hold, and the rule of its attention."""

OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType({"vision": MappingProxyType({MEMORY_REUSE: "0"})})
"""How the engine of a part is to be loaded."""

MIN_WIDTH: Mapping[str, int] = MappingProxyType({"decoder": 2, "vision": 1})
"""Fewest tokens a row may have in a step for all widths to give the same bits; above 32 tokens the width must be even.

ONNX Runtime cuts the rows of a step into blocks; a row that is alone in its block takes another kernel.
"""


def seams(head_dim: int, kv: str = "fp32") -> tuple[int, ...]:
    """Lengths of the cache that a step must not straddle, for all widths to give the same bits; int8 has none.

    ONNX Runtime multiplies queries and keys in blocks of 128 of the head's channels, and takes longer blocks while the
    keys are few (MLAS, `MlasSgemmOperation`): from 64 keys on a head of more than 128 channels is summed up otherwise,
    one of more than 256 also from 32 keys on.
    """
    if kv == "int8":
        return ()
    return tuple(length for length, channels in ((32, 256), (64, 128)) if head_dim > channels)


def lower(model: ir.Model, part: str, precision: str, kv: str = "fp32") -> ir.Model:
    """Rewrite a canonical graph in place into the form that ONNX Runtime's CPU provider runs best, and return it.

    `part`, `precision`: of PRECISIONS; `kv`, of KV: what the decoder's cache holds. The result depends on nothing
    else and needs no session option. Raises LoweringError for what the target cannot run.
    """
    allowed = PRECISIONS.get(part)
    if allowed is None:
        raise LoweringError(f"part: found {part!r}; allowed are {', '.join(PRECISIONS)}")
    if precision not in allowed:
        raise LoweringError(
            f"precision of the {part}: found {precision!r}; allowed are {', '.join(allowed)}; "
            f"set `precision.{part}` in the recipe"
        )
    if kv not in KV:
        raise LoweringError(f"kv: found {kv!r}; allowed are {', '.join(KV)}; set `kv` in the recipe")
    for rule in _RULES[part][precision]:
        (KV[kv] if rule is lower_cached_attention else rule)(model)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)
    for node in model.graph:
        if node.domain not in ("", CONTRIB):
            raise LoweringError(
                f"node {node.name!r} ({node.domain}::{node.op_type}): no rule of onnxruntime-cpu turns it into an "
                "operator of ONNX Runtime; export the checkpoint again with this release"
            )
    return model
