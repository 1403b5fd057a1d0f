"""Run a canonical decoder graph step by step in ONNX Runtime, with the cache in numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime


def open_graph(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@dataclass
class Row:
    """One text: its ids [length], positions [length] or [3, length], and the image row of each token (-1 = text)."""

    ids: np.ndarray
    position_ids: np.ndarray
    feature_index: np.ndarray
    done: int = 0

    @classmethod
    def of_text(cls, ids: Sequence[int]) -> Row:
        return cls(np.array(ids), np.arange(len(ids)), np.full(len(ids), -1))


@dataclass
class Stepper:
    """A batch of rows that advance by any number of tokens a step, at most the width; the rest is padding."""

    session: onnxruntime.InferenceSession
    rows: list[Row]
    capacity: int
    image_features: np.ndarray | None = None
    cache: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value in self.session.get_inputs():
            if value.name.startswith("cache"):
                _, kv_heads, _, channels = value.shape
                dtype = np.int8 if value.type == "tensor(int8)" else np.float32
                self.cache[value.name] = np.zeros((len(self.rows), kv_heads, self.capacity, channels), dtype)

    def step(self, takes: Sequence[int], width: int, logit_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Advance row b by `takes[b]` tokens; returns logits and hidden states at `logit_index` of [batch * width]."""
        start = np.array([row.done for row in self.rows])
        slots = start[:, None] + np.arange(width)
        feeds: dict[str, Any] = {
            "input_ids": self._window("ids", takes, width, 0),
            "position_ids": self._window("position_ids", takes, width, 0),
            "write_index": start,
            "kv_length": start + np.array(takes),
            "mask": (np.arange(self.capacity) <= slots[:, :, None])[:, None],
            "logit_index": logit_index,
            **self.cache,
        }
        if self.image_features is not None:
            feeds["image_features"] = self.image_features
            feeds["feature_index"] = self._window("feature_index", takes, width, -1)
        names = [value.name for value in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(names, feeds), strict=True))
        self.cache = {name: outputs[name.replace("cache", "present")] for name in self.cache}
        for row, take in zip(self.rows, takes, strict=True):
            row.done += take
        return outputs["logits"], outputs["hidden"]

    def _window(self, name: str, takes: Sequence[int], width: int, padding: int) -> np.ndarray:
        """The next tokens of each row, padded on the right: [batch, width], or [3, batch, width]."""
        parts = []
        for row, take in zip(self.rows, takes, strict=True):
            part = getattr(row, name)[..., row.done : row.done + take]
            parts.append(np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, width - take)], constant_values=padding))
        return np.stack(parts, axis=-2)


def walk(stepper: Stepper, widths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Consume all rows with ragged steps of the given widths (cycled); returns each row's logits [length, vocabulary].

    Rows take a random number of tokens per step, also none, and the wanted logit rows come in a random order.
    """
    rng = np.random.default_rng(seed)
    collected: list[list[np.ndarray]] = [[] for _ in stepper.rows]
    turn = 0
    while any(row.done < len(row.ids) for row in stepper.rows):
        width = widths[turn % len(widths)]
        turn += 1
        takes = [min(int(rng.integers(0, width + 1)), len(row.ids) - row.done) for row in stepper.rows]
        wanted = [(row, column) for row, take in enumerate(takes) for column in range(take)]
        if not wanted:
            continue
        order = rng.permutation(len(wanted))
        logits, _ = stepper.step(takes, width, np.array([wanted[i][0] * width + wanted[i][1] for i in order]))
        for place in np.argsort(order):
            collected[wanted[order[place]][0]].append(logits[place])
    return [np.stack(rows) for rows in collected]
