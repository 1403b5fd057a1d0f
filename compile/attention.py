"""Hooks that make transformers' own modules trace to the nodes of a canonical graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import NewGELUActivation
from transformers.modeling_utils import AttentionInterface
from transformers.pytorch_utils import Conv1D

from ..plugins import cached_attention as operator

CACHED = "speceyes_cached"
FULL = "speceyes_full"


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
    """One standard Attention node over [batch, rows, heads*head_dim]; `mask` is [batch, heads or 1, rows, rows]."""
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


@contextmanager
def traceable(*models: nn.Module, attention: str) -> Iterator[None]:
    """Within it `models` trace to canonical nodes; afterwards transformers and the models are as they were."""
    functions = {CACHED: attend_cached, FULL: attend_full}
    with ExitStack() as stack:
        stack.callback(_unregister, *functions)
        for name, function in functions.items():
            AttentionInterface.register(name, function)
        for model in models:
            for module in model.modules():
                if hasattr(getattr(module, "config", None), "_attn_implementation"):
                    stack.enter_context(_swapped(vars(module.config), "_attn_implementation_internal", attention))
                if type(module).__name__.endswith("RMSNorm"):
                    stack.enter_context(_swapped(module._parameters, "weight", _rms_scale(module)))
                    stack.enter_context(_swapped(vars(module), "forward", _rms_forward(module)))
                if isinstance(module, Conv1D):
                    stack.enter_context(_swapped(vars(module), "forward", _conv1d_forward(module)))
                if isinstance(module, NewGELUActivation):
                    stack.enter_context(_swapped(vars(module), "forward", _gelu_tanh))
            for source in _modeling_modules(model):
                if hasattr(source, "apply_rotary_pos_emb"):
                    stack.enter_context(_swapped(vars(source), "apply_rotary_pos_emb", rotate))
        yield


@contextmanager
def _swapped(table: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """`table[name]` is `value` within; afterwards it is what it was, or absent again."""
    before = {name: table[name]} if name in table else {}
    table[name] = value
    try:
        yield
    finally:
        del table[name]
        table.update(before)


def _unregister(*names: str) -> None:
    for name in names:
        AttentionInterface._global_mapping.pop(name, None)


def _rms_forward(module: nn.Module) -> Any:
    epsilon = float(getattr(module, "variance_epsilon", None) or module.eps)  # type: ignore[arg-type]
    return lambda states: normalise(states, module.weight, epsilon)  # type: ignore[arg-type]


def _rms_scale(module: nn.Module) -> nn.Parameter:
    """The factor after normalisation; Gemma stores its offset from one."""
    weight: nn.Parameter = module.weight  # type: ignore[assignment]
    offset = type(module).__name__.startswith("Gemma")
    return nn.Parameter(1.0 + weight.detach(), requires_grad=False) if offset else weight


def _conv1d_forward(module: Conv1D) -> Any:
    """GPT-2's linear layer without its detour over two dimensions."""
    return lambda states: torch.matmul(states, module.weight) + module.bias


def _gelu_tanh(states: Tensor) -> Tensor:
    """What `NewGELUActivation` spells out, as one operator."""
    return nn.functional.gelu(states, approximate="tanh")


def _modeling_modules(model: nn.Module) -> list[ModuleType]:
    names = sorted({type(module).__module__ for module in model.modules()})
    return [sys.modules[name] for name in names if name.startswith("transformers.models.")]
