"""From samples straight to tensors, without the processor."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from .alignment import Spot, mentioned, spots
from .canvas import Canvas
from .model import IMAGE_TOKENS
from .sample import Sample, Turn
from .tokenizer import BEGIN, END, FAKE, GLOBAL, IMAGE, PAD

PROMPT = "\nAssistant:"
_NOTHING = (0, 0, 0, 0)


@dataclass(frozen=True)
class Batch:
    """`rows` sequences of `length` tokens: a prefix with the pictures, then turns that do not see each other.

    pixels: float32 (images, 3, SIZE, SIZE), in [-1, 1]; labels: int64 (images, GRID, GRID, 5).
    ids, positions, turns: int64 (rows, length); `turns` numbers a token's turn from 1, 0 in the prefix, -1 in padding.
    targets: int64 (rows, length), the token that follows or -100; weights: float32 (rows, length).
    places: int64 (rows, length), the position of the image token that the target is read off, or, in a question, of
    the one that the token names; else -1.
    squares: int64 (rows, length), the number of that image token in its picture, or -1.
    relays: int64 (rows, length), where the last token of a question that names a place is, for the token before the
    answer; else -1.
    slots: int64 (rows, length), which of its characters the target is, or -1; shown: int64 (rows, length, 4), all four.
    """

    pixels: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    turns: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    places: torch.Tensor
    squares: torch.Tensor
    relays: torch.Tensor
    slots: torch.Tensor
    shown: torch.Tensor

    def mask(self) -> torch.Tensor:
        """Additive attention mask, float32 (rows, 1, length, length)."""
        query, key = self.turns[:, :, None], self.turns[:, None, :]
        length = self.turns.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        seen = ((key == 0) | (key == query)) & causal
        return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]


def pixels(canvases: list[Canvas]) -> torch.Tensor:
    """float32 (len(canvases), 3, SIZE, SIZE), as the processor normalises."""
    stacked = np.stack([np.asarray(canvas.image) for canvas in canvases])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).float().div_(255).sub_(0.5).div_(0.5)


class Encoder:
    """Turns a question about pictures into token ids, equal to what the processor gives."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        ids = tokenizer.convert_tokens_to_ids
        self.pad, self.end, begin = ids(PAD), ids(END), ids(BEGIN)
        self._start = [begin, *self.text("User:")]
        self._picture = [ids(FAKE), ids(GLOBAL), *[ids(IMAGE)] * IMAGE_TOKENS, ids(FAKE)]
        self._prompt = [self.end, *self.text(PROMPT)]

    def text(self, text: str) -> list[int]:
        """Token ids of plain text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def prefix(self, pictures: int) -> list[int]:
        """What precedes the question."""
        return self._start + self._picture * pictures

    def turn(self, turn: Turn) -> tuple[list[int], list[int]]:
        """The question with the generation prompt, and the answer with its end."""
        return self.text(turn.question) + self._prompt, [*self.text(turn.answer), self.end]

    def _read(
        self, sample: Sample, places_of: list[Spot | None], tokens: list[int]
    ) -> tuple[list[int], list[int], list[int], list[tuple[int, ...]]]:
        """For every token where its text begins: the image token's position and number, the slot and the characters."""
        places, squares, slots, shown, start = [], [], [], [], 0
        for token in self._tokenizer.convert_ids_to_tokens(tokens):
            spot = next((spot for spot in places_of[start : start + len(token)] if spot), None)
            start += len(token)
            if spot:
                picture, image_token, slot = spot
                places.append(len(self._start) + picture * len(self._picture) + 2 + image_token)
                squares.append(image_token)
                slots.append(slot)
                shown.append(sample.canvases[picture].written(image_token))
            else:
                places.append(-1)
                squares.append(-1)
                slots.append(-1)
                shown.append(_NOTHING)
        return places, squares, slots, shown

    def batch(self, samples: list[Sample]) -> Batch:
        """Pad samples to the longest."""
        rows = [self._row(sample) for sample in samples]
        length = max(len(row["ids"]) for row in rows)
        fill = {
            "ids": self.pad,
            "positions": 0,
            "turns": -1,
            "targets": -100,
            "weights": 0.0,
            "places": -1,
            "squares": -1,
            "relays": -1,
            "slots": -1,
            "shown": _NOTHING,
        }
        columns = {
            name: torch.tensor([[*row[name], *[value] * (length - len(row[name]))] for row in rows])
            for name, value in fill.items()
        }
        canvases = [canvas for sample in samples for canvas in sample.canvases]
        labels = torch.from_numpy(np.stack([canvas.labels for canvas in canvases]))
        return Batch(pixels(canvases), labels, **columns)

    def _row(self, sample: Sample) -> dict[str, list[Any]]:
        prefix = self.prefix(len(sample.canvases))
        size = len(prefix)
        row: dict[str, list[Any]] = {
            "ids": list(prefix),
            "positions": list(range(size)),
            "turns": [0] * size,
            "targets": [-100] * size,
            "weights": [0.0] * size,
            "places": [-1] * size,
            "squares": [-1] * size,
            "relays": [-1] * size,
            "slots": [-1] * size,
            "shown": [_NOTHING] * size,
        }
        for number, turn in enumerate(sample.turns, 1):
            question, answer = self.turn(turn)
            ids = [*question, *answer[:-1]]
            silent = len(question) - 1
            row["ids"] += ids
            row["positions"] += range(size, size + len(ids))
            row["turns"] += [number] * len(ids)
            row["targets"] += [-100] * silent + answer
            places, squares, slots, shown = self._read(sample, spots(sample, turn), answer)
            asked, named_squares, _, _ = self._read(sample, mentioned(sample, turn.question), question)
            named = [len(row["places"]) + index for index, place in enumerate(asked[:-1]) if place >= 0]
            row["relays"] += [-1] * silent + (named or [-1])[-1:] + [-1] * (len(answer) - 1)
            row["places"] += asked[:-1] + places
            row["squares"] += named_squares[:-1] + squares
            row["slots"] += [-1] * silent + slots
            row["shown"] += [_NOTHING] * silent + shown
            row["weights"] += [0.0] * silent + [len(answer) ** -0.5] * len(answer)
        return row
