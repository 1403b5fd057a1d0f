"""Figures of arrays beside the reference: pure arithmetic over rows, the last axis."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engines.engine import Array
from ...engines.errors import EngineError

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Figures:
    """`max_abs_error` of any element, `largest` magnitude in the reference, lowest `cosine` of a row (None where a row
    is no vector), and how many of the `rows` have their largest element in the same place; `discrete` for token ids, of
    which as many agree as are equal."""

    max_abs_error: float
    largest: float
    cosine: float | None
    agreed: int
    rows: int
    discrete: bool = False


def compare(name: str, wanted: Array, found: Array) -> Figures:
    """Figures of `found` beside `wanted`, arrays of one shape.

    Raises EngineError, naming the tensor, for another shape or values that are not finite.
    """
    if wanted.shape != found.shape:
        raise EngineError(f"{name}: found {list(found.shape)}; the reference has {list(wanted.shape)}")
    a, b = (np.atleast_2d(array.astype(np.float64)) for array in (wanted, found))
    if bad := int((~np.isfinite(b)).sum()):
        raise EngineError(f"{name}: {bad} of {b.size} values are not finite")
    discrete = np.issubdtype(wanted.dtype, np.integer)
    vectors = wanted.ndim > 1 and not discrete
    return Figures(
        max_abs_error=float(np.abs(a - b).max(initial=0)),
        largest=float(np.abs(a).max(initial=0)),
        cosine=lowest_cosine(a, b) if vectors else None,
        agreed=int((a.argmax(axis=-1) == b.argmax(axis=-1)).sum()) if vectors else int((a == b).sum()),
        rows=a[..., 0].size if vectors else a.size,
        discrete=discrete,
    )


def within(wanted: Array, found: Array, atol: float, rtol: float) -> bool:
    """Whether every element is off by at most `atol` + `rtol` times the reference's magnitude, as Polygraphy has it."""
    a, b = wanted.astype(np.float64), found.astype(np.float64)
    return bool((np.abs(a - b) <= atol + rtol * np.abs(a)).all())


def compare_logits(wanted: Floats, found: Floats) -> dict[str, float]:
    """Lowest cosine, share of equal best tokens, highest KL divergence in nats, over rows [rows, vocabulary]."""
    log_wanted, log_found = log_softmax(wanted), log_softmax(found)
    divergence = (np.exp(log_wanted) * (log_wanted - log_found)).sum(axis=-1)
    return {
        "cosine": lowest_cosine(wanted, found),
        "agreement": float((wanted.argmax(axis=-1) == found.argmax(axis=-1)).mean()),
        "divergence": float(divergence.max()),
    }


def lowest_cosine(wanted: Any, found: Any) -> float:
    """The smallest cosine between rows of the same place; 1 for two rows of zeros, 0 for one."""
    a, b = np.asarray(wanted, np.float64), np.asarray(found, np.float64)
    lengths = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
    norms = lengths[0] * lengths[1]
    empty = (lengths[0] == 0) & (lengths[1] == 0)
    cosines = (a * b).sum(axis=-1) / np.where(norms == 0, 1, norms)
    return float(np.where(empty, 1.0, cosines).min())


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    """Over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    logs: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs
