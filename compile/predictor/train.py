"""The training loop: distils the target's answers, saves after every epoch, goes on where it was interrupted."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...engines.errors import PredictorError
from ...engines.files import whole_file
from .batches import Batches
from .frozen import Frozen
from .loss import compute_loss
from .model import Predictor
from .settings import Shape, Training

Report = Callable[[int, int, float], None]
"""Called after each step with the number of steps done, of all steps, and the loss."""

_WARM_UP = 0.05
_CLIP = 1.0


def train(
    batches: Batches,
    frozen: Frozen,
    shape: Shape,
    training: Training,
    save: Path,
    *,
    images: bool,
    identity: Mapping[str, Any] | None = None,
    report: Report = lambda done, total, loss: None,
) -> Predictor:
    """Train a predictor; `save` holds the state after each epoch and is read when it is there.

    `images`: whether the target sees images.
    An interrupted training that goes on gives the same weights as one that was not interrupted (on one machine, with
    one number of threads). `identity` tells what the training belongs to. Raises PredictorError when `save` is the
    state of another one.
    """
    belongs = {"shape": asdict(shape), "training": asdict(training), **(identity or {})}
    torch.manual_seed(training.seed)
    predictor = Predictor(shape, frozen, images=images, dropout=training.dropout)
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=training.learning_rate, weight_decay=0.01, fused=True)
    done = _resume(save, belongs, predictor, optimizer)
    steps = batches.steps("training", training.batch)
    total = steps * training.epochs
    predictor.train()
    for epoch in range(done, training.epochs):
        # Every epoch draws from its own stream, so that going on needs no state of generators.
        torch.manual_seed(hash_seed(training.seed, epoch))
        for number, batch in enumerate(batches.epoch("training", training.batch, seed=hash_seed(training.seed, epoch))):
            step = epoch * steps + number
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate * schedule(step, total)
            loss = compute_loss(predictor, batch, training)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(predictor.parameters(), _CLIP)
            optimizer.step()
            report(step + 1, total, loss.item())
        _save(save, belongs, epoch + 1, predictor, optimizer)
    return predictor.eval()


def schedule(step: int, total: int) -> float:
    """Share of the highest learning rate: up along a line for a twentieth of the steps, then down along a cosine."""
    rise = max(1, round(total * _WARM_UP))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, total - rise)))


def hash_seed(seed: int, epoch: int) -> int:
    """A seed for each epoch of each seed."""
    return seed * 1_000_003 + epoch


def _resume(save: Path, belongs: Mapping[str, Any], predictor: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load what was saved; gives the number of epochs done."""
    if not save.exists():
        return 0
    state = torch.load(save, weights_only=True)
    if state["belongs"] != belongs:
        differing = ", ".join(sorted(key for key in belongs if state["belongs"].get(key) != belongs[key]))
        raise PredictorError(
            f"{save}: the interrupted training differs in {differing}; take the same options to go on, or delete the "
            "file to begin anew"
        )
    predictor.load_state_dict(state["predictor"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epochs"])


def _save(
    save: Path, belongs: Mapping[str, Any], epochs: int, predictor: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    state = {"belongs": dict(belongs), "epochs": epochs, "predictor": predictor.state_dict()}
    with whole_file(save) as partial:
        torch.save(state | {"optimizer": optimizer.state_dict()}, partial)
