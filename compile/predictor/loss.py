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
    """One step of the window at the places that are left.

    `hit`: bool [places], whether its token is the target's; `reached`: whether the answer goes on so far and all
    tokens before were the target's.
    """

    step: Step
    goal: Goal
    hit: Tensor
    reached: Tensor


def unroll(
    predictor: Predictor, batch: Batch, *, astray: float = 0.0, gradient_checkpointing: bool = False
) -> list[Unrolled]:
    """Draft a window from every place, reading its own foreseen hidden states and its own tokens.

    A place is left when its draft goes wrong, for what follows is never accepted. A share `astray` of such places goes
    on, at random, with the target's token instead of the wrong one.
    """
    request, state = batch.request, batch.hidden.new_zeros(len(batch.token), predictor.shape.state)
    hidden, token, rows = batch.hidden, batch.token, torch.arange(len(batch.token))
    memory = batch.features if predictor.image is None else predictor.image.remember(batch.features, batch.lengths)
    right = torch.ones(len(token), dtype=torch.bool)
    steps = []
    for goals in batch.goals:
        left = goals.exists[rows] & (right | (torch.rand(len(rows)) < astray))
        rows, right = rows[left], right[left]
        goal = goals.take(rows)
        inputs = (state[left], hidden[left], token[left], memory, batch.lengths, request[rows])
        if gradient_checkpointing:
            found = Step(*checkpoint(predictor.step, *inputs, use_reentrant=False))
        else:
            found = predictor.step(*inputs)
        hit = found.logits.argmax(-1) == goal.token
        steps.append(Unrolled(found, goal, hit, right))
        state, hidden, right = found.state, found.hidden, right & hit
        token = goal.full if predictor.shape.form == "recurrent" else inputs[2]
    return steps


def compute_loss(predictor: Predictor, batch: Batch, training: Training) -> Tensor:
    """Cross-entropy + divergence from the target's 20 best + squared error of the hidden state, over the window; and
    for the confidence and the work plan, which pass no gradient on, binary cross-entropy."""
    steps = unroll(predictor, batch, astray=training.astray, gradient_checkpointing=training.gradient_checkpointing)
    total = torch.zeros(())
    for step in steps:
        total = total + _token_loss(step) + training.hidden_weight * _hidden_loss(step) + _judgement_loss(step)
    return total / len(steps)


def plan_labels(unrolled: Unrolled) -> Tensor:
    """Labels of the work plan [places, 4]: the next token repeats earlier text; an image decides one of the next
    tokens; an image decides the next token; the draft is right and the answer goes on after it."""
    goes_on = (unrolled.hit & ~unrolled.goal.final).float()
    return torch.cat([unrolled.goal.plan, goes_on[:, None]], 1)


def _token_loss(unrolled: Unrolled) -> Tensor:
    goal, logs = unrolled.goal, unrolled.step.logits.log_softmax(-1)
    known = goal.token >= 0
    chosen = -logs.gather(1, goal.token.clamp(min=0)[:, None])[:, 0]
    inside = goal.best >= 0
    weights = goal.odds.masked_fill(~inside, -1e9).softmax(-1) * inside
    divergence = (weights * (torch.log(weights.clamp(min=1e-9)) - logs.gather(1, goal.best.clamp(min=0)))).sum(-1)
    return _mean(chosen, known) + _mean(divergence, inside.any(-1))


def _hidden_loss(unrolled: Unrolled) -> Tensor:
    wanted = unrolled.goal.hidden
    error = (unrolled.step.hidden - wanted).square().mean(-1) / wanted.square().mean(-1).clamp(min=1e-6)
    return _mean(error, torch.ones_like(unrolled.reached))


def _judgement_loss(unrolled: Unrolled) -> Tensor:
    confidence = F.binary_cross_entropy_with_logits(unrolled.step.confidence, unrolled.hit.float(), reduction="none")
    plan = F.binary_cross_entropy_with_logits(unrolled.step.modules, plan_labels(unrolled), reduction="none").mean(-1)
    return _mean(confidence, unrolled.reached) + _mean(plan, unrolled.reached)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)
