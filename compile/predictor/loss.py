"""The loss: the unrolled window against what the target chose."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .batches import Batch, Goal
from .model import Predictor, Step
from .settings import Training


@dataclass(frozen=True)
class Unrolled:
    """One step of the window at every place.

    `hit`: bool [places], whether its token is the target's; `reached`: whether the answer goes on so far and all
    tokens before were the target's.
    """

    step: Step
    goal: Goal
    hit: Tensor
    reached: Tensor


def unroll(predictor: Predictor, batch: Batch, *, gradient_checkpointing: bool = False) -> list[Unrolled]:
    """Draft a window from every place.

    Steps read their own foreseen hidden states, and the target's tokens: a draft counts only where all tokens before
    were right, and there the predictor's own tokens are the target's.
    """
    rows = len(batch.token)
    memory, lengths = batch.features, batch.lengths[batch.request]
    if predictor.image is not None:
        memory = predictor.image.remember(batch.features, batch.lengths)[batch.request]
    state, hidden, token = batch.hidden.new_zeros(rows, predictor.shape.state), batch.hidden, batch.token
    reached = torch.ones(rows, dtype=torch.bool)
    steps = []
    for goal in batch.goals:
        if gradient_checkpointing:
            found = Step(*checkpoint(predictor.step, state, hidden, token, memory, lengths, use_reentrant=False))
        else:
            found = predictor.step(state, hidden, token, memory, lengths)
        reached = reached & goal.exists
        hit = (found.logits.argmax(-1) == goal.token) & goal.exists
        steps.append(Unrolled(found, goal, hit, reached))
        state, hidden = found.state, found.hidden
        if predictor.shape.form == "recurrent":
            token = goal.full
        reached = reached & hit
    return steps


def compute_loss(predictor: Predictor, batch: Batch, training: Training) -> Tensor:
    """Cross-entropy + divergence from the target's 20 best + squared error of the hidden state, over the window; and
    for the confidence and the work plan, which pass no gradient on, binary cross-entropy."""
    total = torch.zeros(())
    for unrolled in unroll(predictor, batch, gradient_checkpointing=training.gradient_checkpointing):
        total = total + _token_loss(unrolled) + training.hidden_weight * _hidden_loss(unrolled)
        total = total + _judgement_loss(unrolled)
    return total / len(batch.goals)


def plan_labels(unrolled: Unrolled) -> Tensor:
    """Labels of the work plan [places, 4]: the next token repeats earlier text; an image decides one of the next
    tokens; an image decides the next token; the draft is right and the answer goes on after it."""
    goes_on = (unrolled.hit & ~unrolled.goal.final).float()
    return torch.cat([unrolled.goal.plan, goes_on[:, None]], 1)


def _token_loss(unrolled: Unrolled) -> Tensor:
    goal, logs = unrolled.goal, unrolled.step.logits.log_softmax(-1)
    known = goal.exists & (goal.token >= 0)
    chosen = -logs.gather(1, goal.token.clamp(min=0)[:, None])[:, 0]
    inside = goal.best >= 0
    weights = goal.odds.masked_fill(~inside, -1e9).softmax(-1) * inside
    divergence = (weights * (torch.log(weights.clamp(min=1e-9)) - logs.gather(1, goal.best.clamp(min=0)))).sum(-1)
    return _mean(chosen, known) + _mean(divergence, goal.exists & inside.any(-1))


def _hidden_loss(unrolled: Unrolled) -> Tensor:
    wanted = unrolled.goal.hidden
    error = (unrolled.step.hidden - wanted).square().mean(-1) / wanted.square().mean(-1).clamp(min=1e-6)
    return _mean(error, unrolled.goal.exists)


def _judgement_loss(unrolled: Unrolled) -> Tensor:
    confidence = F.binary_cross_entropy_with_logits(unrolled.step.confidence, unrolled.hit.float(), reduction="none")
    plan = F.binary_cross_entropy_with_logits(unrolled.step.modules, plan_labels(unrolled), reduction="none").mean(-1)
    return _mean(confidence, unrolled.reached) + _mean(plan, unrolled.reached)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)
