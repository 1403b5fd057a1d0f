"""Qwen2-VL and Qwen2.5-VL: patches of any grid with rotary positions, 2 x 2 merging, M-RoPE in the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import attend_rows
from .family import Family, Layout, Rope, VisionPart


class PatchEncoder(nn.Module):
    """One image, or one pair of frames, of Qwen2-VL: every patch attends to every other.

    pixel_values [patches, channels*2*side*side], rotary_positions [patches, 2] (h, w), patches in merge order ->
    image features [patches / 4, hidden].
    """

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.patch_embed = as_linear(tower.patch_embed.proj)
        self.rotary = tower.rotary_pos_emb
        self.blocks = tower.blocks
        self.merger = tower.merger

    def forward(self, pixel_values: Tensor, rotary_positions: Tensor) -> Tensor:
        states = self.patch_embed(pixel_values).unsqueeze(0)
        rotation = half_rotation(self.rotary, states, rotary_positions)
        for block in self.blocks:
            states = run_block(block, states, rotation, mask=None)
        features: Tensor = self.merger(states)
        return features


class WindowedPatchEncoder(nn.Module):
    """The same for Qwen2.5-VL, where most layers attend within windows.

    window_index [patches / 4] puts merged groups into window order, window_id [patches] numbers each patch's window in
    that order; the features come back in the original order.
    """

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.patch_embed = as_linear(tower.patch_embed.proj)
        self.rotary = tower.rotary_pos_emb
        self.blocks = tower.blocks
        self.merger = tower.merger
        self.group = tower.spatial_merge_unit
        self.full_layers = frozenset(tower.fullatt_block_indexes)

    def forward(
        self, pixel_values: Tensor, rotary_positions: Tensor, window_index: Tensor, window_id: Tensor
    ) -> Tensor:
        states = self._windowed(self.patch_embed(pixel_values), window_index).unsqueeze(0)
        rotation = half_rotation(self.rotary, states, self._windowed(rotary_positions, window_index))
        same_window = (window_id.unsqueeze(0) == window_id.unsqueeze(1))[None, None]
        for number, block in enumerate(self.blocks):
            states = run_block(block, states, rotation, mask=None if number in self.full_layers else same_window)
        merged: Tensor = self.merger(states)
        return merged.index_put((window_index,), merged)  # a permutation: every row is written

    def _windowed(self, rows: Tensor, window_index: Tensor) -> Tensor:
        """Rows [patches, n] with their groups of merged neighbours put into window order."""
        return rows.view(-1, self.group, rows.shape[-1]).index_select(0, window_index).flatten(0, 1)


def as_linear(convolution: nn.Conv3d) -> nn.Linear:
    """A convolution whose kernel is the whole patch, as the product it is; shares the weight."""
    weight = convolution.weight.detach().flatten(1)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def half_rotation(rotary: nn.Module, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1, patches, head_dim / 2] of positions [patches, 2]; the tower repeats them for both halves."""
    cos, sin = rotary(states, positions)
    return cos.chunk(2, dim=-1)[0].unsqueeze(0), sin.chunk(2, dim=-1)[0].unsqueeze(0)


def run_block(block: Any, states: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
    """One transformer block over patches [1, patches, width]."""
    states = states + attend(block.attn, block.norm1(states), rotation, mask)
    result: Tensor = states + block.mlp(block.norm2(states))
    return result


def attend(attention: Any, states: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
    """The tower's attention as two RotaryEmbedding nodes and one Attention node; `mask` [1, 1, patches, patches]."""
    heads, (cos, sin) = attention.num_heads, rotation
    query, key, value = attention.qkv(states).chunk(3, dim=-1)
    query = torch.onnx.ops.rotary_embedding(query, cos, sin, num_heads=heads)
    key = torch.onnx.ops.rotary_embedding(key, cos, sin, num_heads=heads)
    projected: Tensor = attention.proj(attend_rows(query, key, value, heads, attention.scaling, mask))
    return projected


@dataclass(frozen=True)
class Qwen2VL(Family):
    name: str = "qwen2_vl"
    model_types: tuple[str, ...] = ("qwen2_vl",)
    rope: Rope = "mrope"
    layout: Layout = "qwen2_vl"

    def vision_part(self, model: Any) -> VisionPart:
        tower = model.model.visual
        inputs, dynamic = patch_inputs(tower)
        return VisionPart(PatchEncoder(tower), inputs, dynamic, group=tower.spatial_merge_size**2)


@dataclass(frozen=True)
class Qwen25VL(Qwen2VL):
    name: str = "qwen2_5_vl"
    model_types: tuple[str, ...] = ("qwen2_5_vl",)

    def vision_part(self, model: Any) -> VisionPart:
        tower = model.model.visual
        group = tower.spatial_merge_size**2
        inputs, dynamic = patch_inputs(tower)
        patches = len(inputs["rotary_positions"])
        inputs |= {"window_index": torch.arange(patches // group), "window_id": torch.zeros(patches).long()}
        dynamic |= {"window_index": {0: "groups"}, "window_id": {0: "patches"}}
        return VisionPart(WindowedPatchEncoder(tower), inputs, dynamic, group)


def patch_inputs(tower: Any) -> tuple[dict[str, Tensor], dict[str, dict[int, str]]]:
    """Example pixels and positions of three merged groups of patches, and the names of their dimensions."""
    patches = 3 * tower.spatial_merge_size**2
    size = tower.patch_embed.proj.weight[0].numel()
    inputs = {
        "pixel_values": torch.zeros(patches, size),
        "rotary_positions": torch.zeros(patches, 2, dtype=torch.int64),
    }
    return inputs, {name: {0: "patches"} for name in inputs}
