"""Attention, rotation and normalisation as the nodes of a canonical graph, callable by transformers' own modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..plugins import cached_attention as operator


class CacheStep:
    """One step over the cache, in the shape transformers expects of a cache object.

    `update` hands the new keys and values back as they are; the attention function below writes and reads the buffers.
    """

    is_compileable = False
    is_sliding = (False,)
    is_linear = (False,)
    is_dummy = False

    def __init__(
        self, cache_k: Sequence[Tensor], cache_v: Sequence[Tensor], write_index: Tensor, kv_length: Tensor
    ) -> None:
        self.cache_k, self.cache_v = list(cache_k), list(cache_v)
        self.write_index, self.kv_length = write_index, kv_length
        self.present_k: list[Tensor] = [*cache_k]
        self.present_v: list[Tensor] = [*cache_v]

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value

    def get_seq_length(self, layer: int = 0) -> int:
        return 0


def attend_cached(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    step: CacheStep,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function of decoders, one speceyes::CachedAttention; `query` is [batch, heads, width, head_dim]."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    batch, heads, width, _dim = query.shape
    cache_k, cache_v = step.cache_k[layer], step.cache_v[layer]
    query, key, value = join_heads(query), join_heads(key), join_heads(value)
    attended, step.present_k[layer], step.present_v[layer] = torch.onnx.ops.symbolic_multi_out(
        f"{operator.DOMAIN}::{operator.NAME}",
        (query, key, value, cache_k, cache_v, step.write_index, step.kv_length, attention_mask),
        {
            "scale": float(scaling),
            "q_num_heads": heads,
            "kv_num_heads": cache_k.shape[1],
            "window": sliding_window or 0,
        },
        dtypes=(query.dtype, cache_k.dtype, cache_v.dtype),
        shapes=(query.shape, cache_k.shape, cache_v.shape),
        version=operator.VERSION,
    )
    return attended.view(batch, width, heads, -1), None


def attend_full(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function of vision towers, one standard Attention; `query` is [batch, heads, patches, head_dim]."""
    batch, heads, patches, _dim = query.shape
    attended = attend_rows(join_heads(query), join_heads(key), join_heads(value), heads, scaling, attention_mask)
    return attended.view(batch, patches, heads, -1), None


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float, mask: Tensor | None = None
) -> Tensor:
    """One standard Attention node over [batch, rows, heads*head_dim]; `mask` is [batch, heads or 1, rows, rows].

    A symbolic node computes nothing: outside of an export it is torch's own attention.
    """
    if not torch.compiler.is_exporting():
        q, k, v = (rows.view(*rows.shape[:2], heads, -1).transpose(1, 2) for rows in (query, key, value))
        return join_heads(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
    return torch.onnx.ops.symbolic(
        "Attention",
        [query, key, value] if mask is None else [query, key, value, mask],
        {"scale": float(scale), "q_num_heads": heads, "kv_num_heads": heads},
        dtype=query.dtype,
        shape=query.shape,
    )


def join_heads(states: Tensor) -> Tensor:
    """[batch, heads, width, head_dim] -> [batch, width, heads*head_dim]."""
    return states.transpose(1, 2).flatten(2)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` as RotaryEmbedding nodes; `cos`, `sin` are [batch, width, head_dim], both halves alike."""
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]

    def one(states: Tensor) -> Tensor:
        batch, heads, width, dim = states.shape
        rotated = torch.onnx.ops.rotary_embedding(join_heads(states), cos, sin, num_heads=heads)
        return rotated.view(batch, width, heads, dim).transpose(1, 2)

    return one(query), one(key)


def normalise(states: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """RMS normalisation over the last axis as one standard node, applied before heads are moved in front of tokens."""
    moved = states.dim() == 4
    states = states.transpose(1, 2) if moved else states
    normalised = torch.onnx.ops.symbolic(
        "RMSNormalization", (states, scale), {"axis": -1, "epsilon": epsilon}, dtype=states.dtype, shape=states.shape
    )
    return normalised.transpose(1, 2) if moved else normalised
