"""The predictor in torch: early fusion, one recurrent cell, the target's head, a confidence and a work plan.

A step sees the target's last hidden state (from the second step on the one foreseen by the step before), the embedding
of the last token and an attended image vector. ReDrafter (arXiv 2403.09919) and Hydra (2402.05109) are recurrent
drafters that read the target's hidden states; DREAM (2505.19201) lets the drafter attend to the target's features.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...engines.errors import ConfigError
from ...runtime.speculation.predictor import MODULES
from .frozen import Frozen
from .image import ImageAttention, ImageMean
from .settings import MAX_PARAMETERS, Shape


class Step(NamedTuple):
    """What a step gives: logits [rows, slice], the next `state` [rows, state], the foreseen `hidden` [rows, hidden].

    `confidence` [rows] is the log-odds, not yet calibrated, that the best token is accepted if those before were;
    `modules` [rows, 4] the log-odds of the work plan.
    """

    logits: Tensor
    state: Tensor
    hidden: Tensor
    confidence: Tensor
    modules: Tensor


class Predictor(nn.Module):
    """A drafter of at most 5 million parameters of its own; `frozen` holds the target's tables, which stay as they are.

    `images`: whether the target sees images.
    Raises ConfigError when the shape asks for more parameters.
    """

    def __init__(self, shape: Shape, frozen: Frozen, *, images: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        hidden, state = frozen.hidden, shape.state
        for name in ("ids", "rows", "embedding", "head", "bias"):
            self.register_buffer(f"frozen_{name}", getattr(frozen, name), persistent=False)
        self.softcap = frozen.softcap
        recurrent = shape.form == "recurrent"
        self.token = nn.Linear(hidden, state, bias=False)
        self.image: ImageAttention | ImageMean | None = None
        if images:
            self.image = (
                ImageAttention(hidden, state, shape.heads, shape.head_width) if recurrent else ImageMean(hidden, state)
            )
        self.hidden = nn.Linear(hidden, state) if recurrent else None
        self.norm = nn.LayerNorm(state)
        self.dropout = nn.Dropout(dropout)
        self.gates = nn.Linear(2 * state, 2 * state) if recurrent else None
        self.foresee = nn.Linear(state, hidden)
        self.judge = nn.Linear(state, 1 + len(MODULES))
        self.certainty = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.ones(shape.window))
        self.register_buffer("shift", torch.zeros(shape.window))
        if self.parameters_own > MAX_PARAMETERS:
            raise ConfigError(
                f"state: {state} makes a predictor of {self.parameters_own:,} parameters beside a target of width "
                f"{hidden}; at most {MAX_PARAMETERS:,} are allowed; lower --state"
            )

    @property
    def parameters_own(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def embed(self, token: Tensor) -> Tensor:
        """A token's share of the fused input, its embedding normed and projected: int64 [rows] -> [rows, state]."""
        rows, embedding = self.get_buffer("frozen_rows"), self.get_buffer("frozen_embedding")
        chosen = embedding[rows[token]]
        projected: Tensor = self.token(F.layer_norm(chosen, chosen.shape[-1:]))
        return projected

    def step(
        self, state: Tensor, hidden: Tensor, token: Tensor, memory: Tensor, lengths: Tensor, owner: Tensor | None = None
    ) -> Step:
        """One drafted token. `state` [rows, state], zeros at first; `hidden` [rows, hidden]; `token` int64 [rows];
        `memory`, `lengths` and `owner` are those of ImageAttention, of any size where the target sees no images."""
        fused = self.embed(token)
        if self.hidden is not None:
            fused = fused + self.hidden(hidden)
        if self.image is not None:
            fused = fused + self.image(fused, memory, lengths, owner)
        fused = self.dropout(self.norm(fused))
        if self.gates is None:
            state = torch.tanh(fused)
        else:
            gate, candidate = self.gates(torch.cat([fused, state], -1)).chunk(2, -1)
            state = state + torch.sigmoid(gate) * (torch.tanh(candidate) - state)
        foreseen = self.foresee(state)
        logits = F.linear(foreseen, self.get_buffer("frozen_head"), self.get_buffer("frozen_bias"))
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        judged = self.judge(state.detach())
        certain = (logits.amax(-1) - logits.logsumexp(-1)).detach()
        return Step(logits, state, foreseen, judged[:, 0] + self.certainty * certain, judged[:, 1:])

    def calibrate(self, confidence: Tensor, position: int) -> Tensor:
        """Probability from the log-odds of a step; positions beyond the trained window take the last one's map."""
        place = min(position, self.shape.window - 1)
        return torch.sigmoid(confidence * self.get_buffer("scale")[place] + self.get_buffer("shift")[place])
