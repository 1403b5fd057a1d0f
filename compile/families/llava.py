"""LLaVA: a CLIP or SigLIP tower over whole images, a two-layer projector, a Llama or Qwen2 decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...engines.errors import CheckpointError
from .family import Family, Layout, VisionPart

TOWERS = ("clip_vision_model", "siglip_vision_model")


class ImageEncoder(nn.Module):
    """pixel_values [images, 3, side, side] -> image features [images * tokens_per_image, hidden].

    `taps` are the numbers of layers after which states are taken; `drop_class` leaves the class token out.
    """

    position: Tensor

    def __init__(self, tower: Any, projector: nn.Module, taps: Sequence[int], drop_class: bool) -> None:
        super().__init__()
        self.patch_embedding = tower.embeddings.patch_embedding
        self.pre_layernorm = getattr(tower, "pre_layrnorm", nn.Identity())
        self.layers = tower.encoder.layers[: max(taps)]
        self.projector = projector
        self.taps = tuple(taps)
        self.drop_class = drop_class
        self.has_class = hasattr(tower.embeddings, "class_embedding")
        self.register_buffer("position", position_table(tower.embeddings), persistent=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        if self.has_class:
            patches = nn.functional.pad(patches, (0, 0, 1, 0))
        states = [self.pre_layernorm(patches + self.position)]
        for layer in self.layers:
            states.append(layer(states[-1], attention_mask=None))
        taken = [states[tap][:, 1:] if self.drop_class else states[tap] for tap in self.taps]
        features: Tensor = self.projector(torch.cat(taken, dim=-1) if len(taken) > 1 else taken[0])
        return features.flatten(0, 1)


def position_table(embeddings: Any) -> Tensor:
    """What is added to the patches, [tokens, width]; the class token's embedding is part of its row."""
    table: Tensor = embeddings.position_embedding.weight.detach().clone()
    if hasattr(embeddings, "class_embedding"):
        table[0] += embeddings.class_embedding.detach()
    return table


@dataclass(frozen=True)
class Llava(Family):
    name: str = "llava"
    model_types: tuple[str, ...] = ("llava",)
    layout: Layout = "llava"

    def check(self, config: Any) -> None:
        super().check(config)
        tower = config.vision_config.model_type
        if tower not in TOWERS:
            raise CheckpointError(
                f"config.json: vision_config.model_type {tower!r} is not a known tower; allowed: {', '.join(TOWERS)}"
            )

    def vision_part(self, model: Any) -> VisionPart:
        config = model.config
        layers, chosen = config.vision_config.num_hidden_layers, config.vision_feature_layer
        taps = [index % (layers + 1) for index in ([chosen] if isinstance(chosen, int) else chosen)]
        drop_class = config.vision_feature_select_strategy == "default"
        side = config.vision_config.image_size
        return VisionPart(
            ImageEncoder(model.model.vision_tower, model.model.multi_modal_projector, taps, drop_class),
            {"pixel_values": torch.zeros(2, 3, side, side)},
            {"pixel_values": {0: "tiles"}},
        )
