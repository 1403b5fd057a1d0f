"""Calibration: confidences that mean what they say, and the figures that show it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...runtime.speculation.predictor import MODULES
from .batches import Batches
from .loss import plan_labels, unroll
from .model import Predictor

Floats = NDArray[np.float64]
BINS = 10
_LEAST = 20
_SIZE = 64


@dataclass(frozen=True)
class Judged:
    """Drafts of one position that were reached (all before them accepted): log-odds, whether accepted, and for the
    work plan probabilities and labels [drafts, 4]."""

    odds: Floats
    hit: NDArray[np.bool_]
    plan: Floats
    labels: Floats


@dataclass(frozen=True)
class Bin:
    """One bin of a reliability curve: drafts in it, their mean confidence, the share accepted."""

    count: int
    confidence: float
    accepted: float


@torch.no_grad()
def judge(predictor: Predictor, batches: Batches, split: str) -> list[Judged]:
    """Draft from every place of a split; what was reached, by position."""
    predictor.eval()
    parts: list[list[tuple[Floats, ...]]] = [[] for _ in range(predictor.shape.window)]
    for batch in batches.epoch(split, _SIZE):
        for position, unrolled in enumerate(unroll(predictor, batch)):
            reached = unrolled.reached
            found = (unrolled.step.confidence, unrolled.hit, unrolled.step.modules.sigmoid(), plan_labels(unrolled))
            parts[position].append(tuple(values[reached].double().numpy() for values in found))
    joined = [tuple(np.concatenate(arrays) for arrays in zip(*part, strict=True)) for part in parts]
    return [Judged(odds, hit.astype(bool), plan, labels) for odds, hit, plan, labels in joined]


def calibrate(predictor: Predictor, batches: Batches) -> None:
    """Fit, on the calibration split, a scale and a shift of the log-odds for each position (Platt 1999)."""
    for position, judged in enumerate(judge(predictor, batches, "calibration")):
        scale, shift = fit_platt(judged.odds, judged.hit)
        predictor.get_buffer("scale")[position] = scale
        predictor.get_buffer("shift")[position] = shift


def fit_platt(odds: Floats, hit: NDArray[np.bool_], steps: int = 50) -> tuple[float, float]:
    """Scale a > 0 and shift b of the most likely sigmoid(a * odds + b), by Newton's method, labels softened.

    With fewer than 20 drafts, or drafts that all have one fate, only the shift is fitted: the scale stays 1.
    """
    positive, total = int(hit.sum()), len(hit)
    if not total:
        return 1.0, 0.0
    label = np.where(hit, (positive + 1) / (positive + 2), 1 / (total - positive + 2))
    free = total >= _LEAST and 0 < positive < total
    design = np.stack([odds, np.ones(total)], 1) if free else np.ones((total, 1))
    offset = np.zeros(total) if free else odds
    weights = np.array([1.0, 0.0]) if free else np.zeros(1)
    for _ in range(steps):
        p = 1 / (1 + np.exp(-np.clip(design @ weights + offset, -30, 30)))
        hessian = design.T @ (design * (p * (1 - p))[:, None]) + 1e-6 * np.eye(len(weights))
        change = np.linalg.solve(hessian, design.T @ (label - p))
        weights = weights + change * min(1.0, 5 / max(1e-12, float(np.abs(change).max())))
    scale, shift = (weights[0], weights[1]) if free else (1.0, weights[0])
    return (float(scale), float(shift)) if scale > 0 else (1.0, float(np.log(positive / (total - positive))))


def reliability(confidence: Floats, accepted: NDArray[np.bool_], bins: int = BINS) -> list[Bin]:
    """The curve over `bins` equal intervals of [0, 1]; empty ones are left out."""
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    found = []
    for number in range(bins):
        inside = place == number
        if inside.any():
            found.append(Bin(int(inside.sum()), float(confidence[inside].mean()), float(accepted[inside].mean())))
    return found


def expected_error(curve: Sequence[Bin]) -> float:
    """ECE: mean distance of confidence and acceptance, weighted by drafts (Naeini et al. 2015)."""
    total = sum(bin.count for bin in curve)
    return sum(bin.count * abs(bin.confidence - bin.accepted) for bin in curve) / total if total else 0.0


def plan_figures(judged: Sequence[Judged]) -> dict[str, dict[str, float]]:
    """For each output of the work plan: share of true labels, precision and recall at one half, Brier score."""
    found, labels = (np.concatenate([getattr(part, name) for part in judged]) for name in ("plan", "labels"))
    figures = {}
    for column, module in enumerate(MODULES):
        probability, label = found[:, column], labels[:, column] > 0.5
        said = probability > 0.5
        right = float((said & label).sum())
        figures[module] = {
            "share": float(label.mean()) if len(label) else 0.0,
            "precision": right / float(said.sum()) if said.any() else 0.0,
            "recall": right / float(label.sum()) if label.any() else 0.0,
            "brier": float(np.square(probability - label).mean()) if len(label) else 0.0,
        }
    return figures


def acceptance(judged: Sequence[Judged]) -> list[float]:
    """By position: the share of reached drafts that were accepted."""
    return [round(float(part.hit.mean()), 4) if len(part.hit) else 0.0 for part in judged]


def tokens_per_pass(shares: Sequence[float]) -> float:
    """Tokens of one verify pass, the target's own included, when a whole window is drafted each time."""
    return float(1 + np.cumprod(shares).sum())


def hits(judged: Sequence[Judged]) -> NDArray[np.bool_]:
    """Whether each was accepted, in the order of `confidences`."""
    return np.concatenate([part.hit for part in judged])


def confidences(predictor: Predictor, judged: Sequence[Judged]) -> Floats:
    """Calibrated probabilities of all judged drafts, position after position."""
    return np.concatenate(
        [
            predictor.calibrate(torch.from_numpy(part.odds).float(), position).double().numpy()
            for position, part in enumerate(judged)
        ]
    )
