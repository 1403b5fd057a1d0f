"""Throw-away heads that make the vision tower name what every patch holds; only training uses them."""

import torch
from torch import nn
from torch.nn import functional
from transformers import Idefics3Config

from .canvas import CLASSES, GRID


class PatchHeads(nn.Module):
    """Linear classifiers of the labels on patches and image tokens, and of an image token's own place."""

    def __init__(self, config: Idefics3Config) -> None:
        super().__init__()
        self.scale = config.scale_factor
        self.patch = nn.Linear(config.vision_config.hidden_size, sum(CLASSES))
        self.token = nn.Linear(config.text_config.hidden_size, self.scale**2 * sum(CLASSES))
        self.place = nn.Linear(config.text_config.hidden_size, GRID**2 // self.scale**2)
        self.lines = nn.Linear(config.text_config.hidden_size, 2 * GRID // self.scale)

    def forward(
        self, patches: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and the share of characters named rightly from the image tokens.

        patches: (images, GRID², d); tokens: (images, GRID² / scale², d'); labels: int64 (images, GRID, GRID, 5).
        """
        images, side, scale = labels.shape[0], labels.shape[1] // self.scale, self.scale
        from_patch = self.patch(patches).flatten(0, 1)
        from_token = self.token(tokens).view(images, side, side, scale, scale, -1)
        from_token = from_token.permute(0, 1, 3, 2, 4, 5).reshape(from_patch.shape)
        flat = labels.flatten(0, 2)
        loss = patches.new_zeros(())
        for logits in (from_patch, from_token):
            for head, target in zip(logits.split(CLASSES, dim=-1), flat.unbind(-1), strict=True):
                loss = loss + functional.cross_entropy(head, target)
        places = self.place(tokens).flatten(0, 1)
        loss = loss + 0.3 * functional.cross_entropy(places, torch.arange(places.shape[-1]).repeat(images))
        rows, columns = self.lines(tokens).flatten(0, 1).chunk(2, dim=-1)
        for logits, line in zip((rows, columns), self._lines(images), strict=True):
            loss = loss + 0.3 * functional.cross_entropy(logits, line)
        first = flat[:, 0]
        right = from_token[:, : CLASSES[0]].argmax(-1) == first
        return loss, right[first > 0].float().sum() / (first > 0).sum().clamp(min=1)

    def _lines(self, images: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column of every image token."""
        side = GRID // self.scale
        return torch.arange(side).repeat_interleave(side).repeat(images), torch.arange(side).repeat(side * images)
