"""Guidance of the decoder while training: where to look, which character there is meant, what the others are."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import Idefics3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel, apply_rotary_pos_emb

from .batches import Batch
from .canvas import CLASSES, GRID

LOOKING = (2, 4)
RELAYING = 3
COUNTING = 2
KNOWING = 4
SLOTS = 4
SIDE = GRID // 2


class Guide(nn.Module):
    """Throw-away supervision of a Llama decoder's inner layers, next to that of its answers.

    The first head of the layers `LOOKING` is to attend to the image token that shows the next character or that a word
    of the question names; that of `RELAYING`, before the answer, to the word that names one, so that
    row and column of what is named are readable after both; after layer
    `COUNTING` the slot of that character, and after `KNOWING` all characters of the image token, are to be readable.
    """

    def __init__(self, config: Idefics3Config, decoder: LlamaModel) -> None:
        super().__init__()
        width = config.text_config.hidden_size
        self.slot = nn.Linear(width, SLOTS)
        self.characters = nn.Linear(width, SLOTS * CLASSES[0])
        self.named = nn.Linear(width, 2 * SIDE)
        self.relayed = nn.Linear(width, 2 * SIDE)
        self._inputs: dict[int, tuple[LlamaAttention, dict[str, Any]]] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        for index in (*LOOKING, RELAYING):
            decoder.layers[index].self_attn.register_forward_pre_hook(self._see_inputs, with_kwargs=True)
        for index in {COUNTING, RELAYING, KNOWING}:
            decoder.layers[index].register_forward_hook(
                lambda _module, _inputs, output, index=index: self._hidden.update({index: output})
            )

    def _see_inputs(self, module: LlamaAttention, _: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        self._inputs[module.layer_idx] = module, inputs

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Losses of the last pass of the decoder: `looking`, `relaying`, `placing`, `counting` and `knowing`."""
        relayed = batch.relays >= 0
        first, second = LOOKING
        # What a named place leads to can be known only after the relay.
        losses = {
            "looking": self._looking(first, batch.places.where(~relayed, -1)) + self._looking(second, batch.places)
        }
        if relayed.any():
            losses["relaying"] = self._looking(RELAYING, batch.relays)
            squares = batch.squares.gather(1, batch.relays.clamp(min=0))[relayed]
            losses["placing"] = _place(self.relayed(self._normal(RELAYING)[relayed]), squares)
            named = (batch.squares >= 0) & (batch.targets < 0)
            losses["placing"] += _place(self.named(self._normal(first)[named]), batch.squares[named])
        counted = batch.slots >= 0
        if counted.any():
            losses["counting"] = functional.cross_entropy(
                self.slot(self._normal(COUNTING)[counted]), batch.slots[counted]
            )
            characters = self.characters(self._normal(KNOWING)[counted]).view(-1, CLASSES[0])
            losses["knowing"] = functional.cross_entropy(characters, batch.shown[counted].flatten())
        return losses

    def _normal(self, layer: int) -> torch.Tensor:
        hidden = self._hidden[layer]
        return functional.rms_norm(hidden, hidden.shape[-1:])

    def _looking(self, layer: int, places: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of the first head's attention of a layer with the wanted places (-1 for none)."""
        attention, inputs = self._inputs[layer]
        hidden, width = inputs["hidden_states"], attention.head_dim
        query = functional.linear(hidden, attention.q_proj.weight[:width])[:, None]
        key = functional.linear(hidden, attention.k_proj.weight[:width])[:, None]
        query, key = apply_rotary_pos_emb(query, key, *inputs["position_embeddings"])
        scores = (query @ key.mT)[:, 0] * attention.scaling + inputs["attention_mask"][:, 0]
        wanted = places >= 0
        chosen: torch.Tensor = scores.log_softmax(-1)[wanted].gather(-1, places[wanted][:, None])
        return -chosen.mean()


def _place(logits: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of row and column, logits (n, 2 SIDE), with image tokens' numbers."""
    rows, columns = logits.chunk(2, dim=-1)
    return functional.cross_entropy(rows, squares // SIDE) + functional.cross_entropy(columns, squares % SIDE)
