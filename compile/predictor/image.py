"""How the predictor sees images: attention to their features, or their mean."""

import torch
from torch import Tensor, nn

_FREQUENCIES = 0.5 ** torch.arange(12)


class ImageAttention(nn.Module):
    """Attention from the fused input to the image features, whose keys know their number in the order of features."""

    def __init__(self, hidden: int, state: int, heads: int, head_width: int) -> None:
        super().__init__()
        width = heads * head_width
        self.heads, self.head_width = heads, head_width
        self.query = nn.Linear(state, width)
        self.keys = nn.Linear(hidden, width, bias=False)
        self.place = nn.Linear(2 * len(_FREQUENCIES), width, bias=False)
        self.values = nn.Linear(hidden, width, bias=False)
        self.out = nn.Linear(width, state, bias=False)

    def remember(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Keys and values of the features [..., features, hidden] -> [..., features, 2 * heads * head_width]."""
        angles = torch.arange(features.shape[-2])[:, None] * _FREQUENCIES
        places = self.place(torch.cat([angles.sin(), angles.cos()], -1))
        return torch.cat([self.keys(features) + places, self.values(features)], -1)

    def forward(self, fused: Tensor, memory: Tensor, lengths: Tensor) -> Tensor:
        """The image vector [rows, state] for `fused` [rows, state] from the first `lengths` [rows] rows of `memory`
        [rows, features, 2 * heads * head_width]; zero where there are none."""
        query = self.query(fused).view(fused.shape[0], self.heads, 1, self.head_width)
        keys, values = memory.view(*memory.shape[:2], 2, self.heads, self.head_width).permute(2, 0, 3, 1, 4)
        scores = (query @ keys.transpose(-1, -2)) * self.head_width**-0.5
        present = torch.arange(memory.shape[1]) < lengths[:, None]
        weights = scores.masked_fill(~present[:, None, None], -1e9).softmax(-1)
        found: Tensor = self.out((weights @ values).flatten(1))
        return found * (lengths > 0)[:, None]


class ImageMean(nn.Module):
    """The projected mean of the features."""

    def __init__(self, hidden: int, state: int) -> None:
        super().__init__()
        self.out = nn.Linear(hidden, state, bias=False)

    def remember(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """[..., features, hidden] -> [..., 1, state]; features beyond `lengths` are zeros and not counted."""
        count = features.shape[-2] if lengths is None else lengths.clamp(min=1)[:, None, None]
        mean: Tensor = self.out(features.sum(-2, keepdim=True) / count)
        return mean

    def forward(self, fused: Tensor, memory: Tensor, lengths: Tensor) -> Tensor:
        """The same vector at every step."""
        return memory.sum(1)
