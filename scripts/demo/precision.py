"""Training in bfloat16 where the processor multiplies it; attention in single precision, whose backward is faster."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

ATTENTION = "single_precision"


def mixed() -> AbstractContextManager[Any]:
    """An autocast to bfloat16, idle where the processor has no instructions for it."""
    return torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported())


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    dtype = query.dtype
    with torch.autocast("cpu", enabled=False):
        query, key, value = query.float(), key.float(), value.float()
        grouped = query.shape[1] != key.shape[1]
        out = functional.scaled_dot_product_attention(
            query, key, value, attention_mask, scale=scaling, enable_gqa=grouped
        )
    return out.transpose(1, 2).to(dtype).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
