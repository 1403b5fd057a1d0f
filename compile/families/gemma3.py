"""Gemma 3 without vision: sliding layers between full ones, two RoPE bases, norms on queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...engines.errors import CheckpointError
from .family import Family


@dataclass(frozen=True)
class Gemma3(Family):
    name: str = "gemma3_text"
    model_types: tuple[str, ...] = ("gemma3_text",)

    def check(self, config: Any) -> None:
        super().check(config)
        if config.use_bidirectional_attention:
            raise CheckpointError(
                "config.json: use_bidirectional_attention is true; only causal decoders can be compiled"
            )
