"""What the predictor borrows from the target and never trains: embedding and head of the most frequent tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checkpoint import Checkpoint
from .traces import Traces

_PART = 8192


@dataclass(frozen=True)
class Frozen:
    """Rows of the target's tables.

    ids         int64 [slice], the full ids of the slice's tokens, ascending
    rows        int64 [vocabulary], a token's row in the slice; tokens outside have `len(ids)`
    embedding   float32 [slice + 1, hidden]; the last row, for tokens outside the slice, is the mean of theirs
    head, bias  float32 [slice, hidden], [slice]
    softcap     logits are softcap * tanh(logits / softcap), None where the target has none
    """

    ids: Tensor
    rows: Tensor
    embedding: Tensor
    head: Tensor
    bias: Tensor
    softcap: float | None

    @property
    def hidden(self) -> int:
        return self.head.shape[1]

    @property
    def parameters(self) -> int:
        """Weights shared with the target."""
        return self.embedding.numel() + self.head.numel()


def choose_slice(traces: Traces, size: int, vocabulary: int) -> NDArray[np.int64]:
    """Ids, ascending, of at most `size` tokens: the most frequent in the training answers, then among the best 20."""
    chosen, near = np.zeros(vocabulary, np.int64), np.zeros(vocabulary, np.int64)
    for number in traces.of("training"):
        span = traces.span(number)
        chosen += np.bincount(traces.tokens[span], minlength=vocabulary)
        near += np.bincount(traces.best[span].ravel(), minlength=vocabulary)
    order = np.lexsort((np.arange(vocabulary), -near, -chosen))[:size]
    return np.sort(order[chosen[order] + near[order] > 0]).astype(np.int64)


@torch.no_grad()
def borrow(checkpoint: Checkpoint, ids: NDArray[np.int64]) -> Frozen:
    """The tables of the tokens `ids` out of a checkpoint. Raises CheckpointError when it cannot be loaded."""
    model = checkpoint.model
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    vocabulary = head.weight.shape[0]
    inside = torch.from_numpy(ids)
    rows = torch.full((vocabulary,), len(ids))
    rows[inside] = torch.arange(len(ids))
    outside = torch.nonzero(rows == len(ids)).flatten()
    total = torch.zeros(head.weight.shape[1])
    for start in range(0, len(outside), _PART):
        total += embed(outside[start : start + _PART]).sum(0)
    bias = getattr(head, "bias", None)
    return Frozen(
        ids=inside,
        rows=rows,
        embedding=torch.cat([embed(inside), total[None] / max(1, len(outside))]).float(),
        head=head.weight[inside].float().clone(),
        bias=torch.zeros(len(ids)) if bias is None else bias[inside].float().clone(),
        softcap=getattr(checkpoint.text_config, "final_logit_softcapping", None),
    )
