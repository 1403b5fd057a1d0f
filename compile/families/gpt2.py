"""GPT-2: learned positions, so the context ends where their table ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ...engines.errors import CheckpointError
from .family import Family, Rope


@dataclass(frozen=True)
class GPT2(Family):
    name: str = "gpt2"
    model_types: tuple[str, ...] = ("gpt2",)
    rope: Rope = "learned"

    def check(self, config: Any) -> None:
        if config.add_cross_attention:
            raise CheckpointError("config.json: add_cross_attention is true; only plain decoders can be compiled")

    def text_model(self, model: Any) -> nn.Module:
        module: nn.Module = model.transformer
        return module
