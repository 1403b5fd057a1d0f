"""The decoder as one traceable step: embed, merge image features, run the layers over the cache, take logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import CacheStep


class DecoderStep(nn.Module):
    """Wraps the text model and head of a transformers model; its forward has exactly the inputs of the canonical graph.

    `embedding` maps ids to states, `text_model` runs the layers from `inputs_embeds`, `head` maps states to logits.
    """

    def __init__(self, embedding: nn.Module, text_model: nn.Module, head: nn.Module, softcap: float | None) -> None:
        super().__init__()
        self.embedding = embedding
        self.text_model = text_model
        self.head = head
        self.softcap = softcap

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        write_index: Tensor,
        kv_length: Tensor,
        mask: Tensor,
        logit_index: Tensor,
        cache_k: list[Tensor],
        cache_v: list[Tensor],
        image_features: Tensor | None = None,
        feature_index: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        states = self.embedding(input_ids)
        if image_features is not None and feature_index is not None:
            states = merge(states, image_features, feature_index)
        step = CacheStep(cache_k, cache_v, write_index, kv_length)
        output: Any = self.text_model(
            inputs_embeds=states,
            attention_mask=mask,
            position_ids=position_ids,
            cache=step,
            use_cache=True,
            step=step,
        )
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, logit_index)
        logits = self.head(hidden)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits, hidden, *step.present_k, *step.present_v


def merge(states: Tensor, image_features: Tensor, feature_index: Tensor) -> Tensor:
    """Put row `feature_index` of `image_features` [features, hidden] in place of each state; -1 keeps the state."""
    rows = nn.functional.embedding(feature_index.clamp(min=0), image_features)
    return torch.where((feature_index >= 0).unsqueeze(-1), rows, states)
