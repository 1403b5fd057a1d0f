"""The predictor in the form that drafts: what is done once for a draft, and a turn for each of its tokens.

What is constant is multiplied out: a turn reads embeddings that are projected already, and one product with the cell's
state gives the next hidden share, the next query, the next gates, the logits and the judgement, since all are linear
maps of it.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...runtime.speculation.predictor import MODULES
from .image import ImageAttention
from .model import Predictor


class Judge(nn.Module):
    """The best token, its chance and the chance of going on, from what the cell's state was multiplied to."""

    def __init__(self, predictor: Predictor, ends: Tensor) -> None:
        super().__init__()
        self.softcap, self.last = predictor.softcap, predictor.shape.window - 1
        self.register_buffer("certainty", predictor.certainty.detach())
        self.register_buffer("scale", predictor.get_buffer("scale")[:, None])
        self.register_buffer("shift", predictor.get_buffer("shift")[:, None])
        self.register_buffer("goes_on", (~torch.isin(predictor.get_buffer("frozen_ids"), ends)).float()[:, None])

    def forward(self, logits: Tensor, odds: Tensor, chance: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """(best row of the slice [rows], its chance, the chance of what follows), the latter [rows, 1].

        `odds` [rows, 1]: log-odds that the token is right. `chance` [rows, 1]: that all before are; it is 0 after a
        token that ends answers.
        """
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        certain = logits.amax(-1, keepdim=True) - logits.logsumexp(-1, keepdim=True)
        place = position.clamp(max=self.last)
        scale, shift = (F.embedding(place, self.get_buffer(name)) for name in ("scale", "shift"))
        best = logits.argmax(-1)
        right = chance * torch.sigmoid((odds + self.get_buffer("certainty") * certain) * scale + shift)
        return best, right, right * F.embedding(best, self.get_buffer("goes_on"))


class Opening(nn.Module):
    """Of the recurrent form: `hidden` [rows, hidden] and `token` [rows] -> what the first turn reads.

    `row` [rows]: the token's row in the slice. `flow` [rows, state + attended]: the hidden state's share of the fused
    input and of the query. `gates` [rows, 2 * state]: the state's share of the gates. `state` and `chance` as a draft
    begins. `keys` and `values`, split into heads, and `unseen` are of the image features.
    """

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.image, self.state = predictor.image, predictor.shape.state
        self.register_buffer("rows", predictor.get_buffer("frozen_rows")[:, None])
        assert predictor.hidden is not None and predictor.gates is not None
        with torch.no_grad():
            start = _flow(predictor, predictor.hidden.weight, predictor.hidden.bias)
            self.register_buffer("start", start[0])
            self.register_buffer("start_bias", start[1])
            self.register_buffer("gates", predictor.gates.bias)

    def forward(
        self, hidden: Tensor, token: Tensor, memory: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        flow = hidden @ self.get_buffer("start") + self.get_buffer("start_bias")
        state, chance = flow.new_zeros(flow.shape[0], self.state), flow.new_ones(flow.shape[0], 1)
        gates = self.get_buffer("gates").expand(flow.shape[0], -1)
        opened = (F.embedding(token, self.get_buffer("rows"))[:, 0], flow, gates, state, chance)
        if memory is None or lengths is None:
            return opened
        assert isinstance(self.image, ImageAttention)
        heads, width = self.image.heads, self.image.head_width
        split = memory.view(*memory.shape[:2], 2, heads, width)
        present = torch.arange(memory.shape[1]) < lengths[:, None]
        unseen = torch.where(present, 0.0, -1e9)[:, None, None]
        values = split[:, :, 1] * (lengths > 0)[:, None, None, None]
        return (*opened, split[:, :, 0].permute(0, 2, 3, 1), values.transpose(1, 2), unseen)


class Turn(nn.Module):
    """One drafted token of the recurrent form: `row`, `flow`, `gates`, `state` and `chance` are the last turn's."""

    def __init__(self, predictor: Predictor, ends: Tensor) -> None:
        super().__init__()
        assert predictor.gates is not None and predictor.hidden is not None
        self.norm, self.image, self.judge = predictor.norm, predictor.image, Judge(predictor, ends)
        state = predictor.shape.state
        head, bias = predictor.get_buffer("frozen_head"), predictor.get_buffer("frozen_bias")
        embedding = predictor.get_buffer("frozen_embedding")
        with torch.no_grad():
            foresee = predictor.foresee
            flow, flow_bias = _flow(
                predictor,
                predictor.hidden.weight @ foresee.weight,
                predictor.hidden.weight @ foresee.bias + predictor.hidden.bias,
            )
            gates = predictor.gates.weight
            joined = [flow, gates[:, state:].T, (head @ foresee.weight).T, predictor.judge.weight.T]
            biases = [flow_bias, predictor.gates.bias, head @ foresee.bias + bias, predictor.judge.bias]
            table = predictor.token(F.layer_norm(embedding, embedding.shape[-1:]))
            table = torch.cat([table, *_query(self.image, table)], -1)
            self.register_buffer("table", table)
            self.register_buffer("joined", torch.cat(joined, -1))
            self.register_buffer("joined_bias", torch.cat(biases))
            self.register_buffer("gates", gates[:, :state].T.contiguous())
        attended = table.shape[1] - state
        self.shares = [state, attended] if attended else [state]
        self.products = [table.shape[1], 2 * state, len(head), 1, len(MODULES)]

    def forward(
        self,
        position: Tensor,
        row: Tensor,
        flow: Tensor,
        gates: Tensor,
        state: Tensor,
        chance: Tensor,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        unseen: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """-> row, flow, gates, state and chance for the next turn; row, chance, state and work plan of this one."""
        fused, *query = torch.split(flow + F.embedding(row, self.get_buffer("table")), self.shares, -1)
        if isinstance(self.image, ImageAttention) and keys is not None and values is not None and unseen is not None:
            rows = query[0].view(row.shape[0], self.image.heads, 1, self.image.head_width)
            found = torch.softmax(rows @ keys + unseen, -1) @ values
            fused = fused + found.reshape(row.shape[0], -1) @ self.image.out.weight.T
        gate, candidate = (self.norm(fused) @ self.get_buffer("gates") + gates).chunk(2, -1)
        state = state + torch.sigmoid(gate) * (torch.tanh(candidate) - state)
        products = state @ self.get_buffer("joined") + self.get_buffer("joined_bias")
        flow, gates, logits, odds, modules = torch.split(products, self.products, -1)
        row, right, chance = self.judge(logits, odds, chance, position)
        return row, flow, gates, state, chance, row, right, state, modules


class DocumentOpening(nn.Module):
    """Of the document's form, which says the same at every turn: `chance` as a draft begins, and the one state."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.norm, self.image = predictor.norm, predictor.image
        self.register_buffer("rows", predictor.get_buffer("frozen_rows")[:, None])
        with torch.no_grad():
            embedding = predictor.get_buffer("frozen_embedding")
            self.register_buffer("table", predictor.token(F.layer_norm(embedding, embedding.shape[-1:])))

    def forward(
        self, first_token: Tensor, memory: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        fused = F.embedding(F.embedding(first_token, self.get_buffer("rows"))[:, 0], self.get_buffer("table"))
        if self.image is not None and memory is not None and lengths is not None:
            fused = fused + self.image(fused, memory, lengths)
        return fused.new_ones(fused.shape[0], 1), torch.tanh(self.norm(fused))


class DocumentTurn(nn.Module):
    """One drafted token of the document's form; `only` is the state."""

    def __init__(self, predictor: Predictor, ends: Tensor) -> None:
        super().__init__()
        self.judgement, self.judge = predictor.judge, Judge(predictor, ends)
        head, bias = predictor.get_buffer("frozen_head"), predictor.get_buffer("frozen_bias")
        with torch.no_grad():
            self.register_buffer("head", (head @ predictor.foresee.weight).T.contiguous())
            self.register_buffer("head_bias", head @ predictor.foresee.bias + bias)

    def forward(self, position: Tensor, chance: Tensor, only: Tensor) -> tuple[Tensor, ...]:
        logits = only @ self.get_buffer("head") + self.get_buffer("head_bias")
        odds, modules = self.judgement(only).split([1, len(MODULES)], -1)
        row, right, chance = self.judge(logits, odds, chance, position)
        return chance, row, right, only + 0.0, modules


def _flow(predictor: Predictor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A map to a share of the fused input, [state, inputs] and [state], as one to `flow`, [inputs, …] and […]."""
    image, biases = predictor.image, [bias, *_query(predictor.image, bias)]
    if isinstance(image, ImageAttention):
        biases[1] = biases[1] + image.query.bias * image.head_width**-0.5
    return torch.cat([weight.T, *_query(image, weight.T)], -1), torch.cat(biases)


def _query(image: nn.Module | None, fused: Tensor) -> list[Tensor]:
    """The scaled query of a share of the fused input, without its bias; nothing where no images are seen."""
    if not isinstance(image, ImageAttention):
        return []
    return [(fused @ image.query.weight.T) * image.head_width**-0.5]
