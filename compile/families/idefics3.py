"""Idefics3 and SmolVLM: a SigLIP tower over square tiles, pixel shuffle, a Llama decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .family import Family, Layout, VisionPart


class TileEncoder(nn.Module):
    """pixel_values [tiles, 3, side, side] -> features [tiles * tokens_per_tile, hidden]; tiles have no padding."""

    position: Tensor

    def __init__(self, tower: Any, connector: nn.Module, side: int) -> None:
        super().__init__()
        self.patch_embedding = tower.embeddings.patch_embedding
        self.encoder = tower.encoder
        self.post_layernorm = tower.post_layernorm
        self.connector = connector
        self.register_buffer("position", position_embedding(tower.embeddings, side), persistent=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        states = self.encoder(inputs_embeds=patches + self.position).last_hidden_state
        features: Tensor = self.connector(self.post_layernorm(states))
        return features.flatten(0, 1)


def position_embedding(embeddings: Any, side: int) -> Tensor:
    """What the tower adds to the patches of a whole tile, [1, patches, hidden]; taken from its own arithmetic."""
    added: list[Tensor] = []
    hook = embeddings.position_embedding.register_forward_hook(lambda _module, _inputs, output: added.append(output))
    patches = side // embeddings.patch_size
    with torch.no_grad():
        embeddings(torch.zeros(1, 3, side, side), torch.ones(1, patches, patches, dtype=torch.bool))
    hook.remove()
    return added[0].clone()


@dataclass(frozen=True)
class Idefics3(Family):
    name: str = "idefics3"
    model_types: tuple[str, ...] = ("idefics3", "smolvlm")
    layout: Layout = "idefics3"

    def vision_part(self, model: Any) -> VisionPart:
        side = model.config.vision_config.image_size
        return VisionPart(
            TileEncoder(model.model.vision_model, model.model.connector, side),
            {"pixel_values": torch.zeros(2, 3, side, side)},
            {"pixel_values": {0: "tiles"}},
        )
