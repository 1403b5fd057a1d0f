"""How the predictor sees images: attention to their features, or their mean."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
        features = F.layer_norm(features, features.shape[-1:])
        angles = torch.arange(features.shape[-2])[:, None] * _FREQUENCIES
        places = self.place(torch.cat([angles.sin(), angles.cos()], -1))
        return torch.cat([self.keys(features) + places, self.values(features)], -1)

    def forward(self, fused: Tensor, memory: Tensor, lengths: Tensor, owner: Tensor | None = None) -> Tensor:
        """The image vector [rows, state] for `fused` [rows, state] from the first `lengths` [rows] rows of `memory`
        [rows, features, 2 * heads * head_width]; zero where there are none.

        With `owner` int64 [rows], ascending, memory and lengths are those of requests, and owner says whose a row is:
        the queries of a request then share its keys, which training needs to be quick.
        """
        query = self.query(fused).view(fused.shape[0], 1, self.heads, self.head_width)
        if owner is not None:
            slot = torch.arange(len(owner)) - torch.searchsorted(owner, owner)
            padded = query.new_zeros(len(memory), int(slot.max()) + 1 if len(slot) else 1, *query.shape[2:])
            query = padded.index_put((owner, slot), query[:, 0])
        keys, values = memory.view(*memory.shape[:2], 2, self.heads, self.head_width).permute(2, 0, 3, 1, 4)
        scores = (query.transpose(1, 2) @ keys.transpose(-1, -2)) * self.head_width**-0.5
        present = torch.arange(memory.shape[1]) < lengths[:, None]
        weights = scores.masked_fill(~present[:, None, None], -1e9).softmax(-1)
        found = (weights @ values).transpose(1, 2)
        vector: Tensor = self.out((found[:, 0] if owner is None else found[owner, slot]).flatten(1))
        some = lengths > 0 if owner is None else lengths[owner] > 0
        return vector * some[:, None]


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

    def forward(self, fused: Tensor, memory: Tensor, lengths: Tensor, owner: Tensor | None = None) -> Tensor:
        """The same vector at every step; arguments as for ImageAttention."""
        vector = memory.sum(1)
        return vector if owner is None else vector[owner]
