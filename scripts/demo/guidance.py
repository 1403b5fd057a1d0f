"""Guided attention: while training, one head in two layers is shown which image token to look at."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

LAYERS = (2, 4)


class Guide:
    """Watches the first head of `LAYERS` of a Llama decoder and scores where it looks."""

    def __init__(self, decoder: nn.Module) -> None:
        self._seen: dict[nn.Module, dict[str, Any]] = {}
        for index in LAYERS:
            decoder.layers[index].self_attn.register_forward_pre_hook(self._watch, with_kwargs=True)

    def _watch(self, module: nn.Module, _: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        self._seen[module] = inputs

    def loss(self, places: torch.Tensor) -> torch.Tensor:
        """Mean negative log of the attention on `places`, int64 (rows, length): a key's index or -1."""
        total = torch.zeros(())
        wanted = places >= 0
        for attention, inputs in self._seen.items():
            hidden, width = inputs["hidden_states"], attention.head_dim
            query = functional.linear(hidden, attention.q_proj.weight[:width])[:, None]
            key = functional.linear(hidden, attention.k_proj.weight[:width])[:, None]
            query, key = apply_rotary_pos_emb(query, key, *inputs["position_embeddings"])
            scores = (query @ key.mT)[:, 0] * attention.scaling + inputs["attention_mask"][:, 0]
            chosen = scores.log_softmax(-1)[wanted].gather(-1, places[wanted][:, None])
            total = total - chosen.mean()
        self._seen.clear()
        return total
