"""Frames of a video as a user turn: as many as a budget allows, with their times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...engines.errors import RequestError
from ..processing.prompt import ImageSource


@dataclass(frozen=True)
class Frame:
    """A picture and the second at which it is shown."""

    seconds: float
    image: ImageSource


@dataclass(frozen=True)
class Clip:
    """Frames chosen from a video: `messages` with a placeholder for each, and the `images`, for `generate` or a batch.

    A frame that is shown again is encoded once, like any picture that is kept.
    """

    messages: list[dict[str, Any]]
    images: list[ImageSource]


def sample_frames(frames: Sequence[Frame], budget: int) -> list[Frame]:
    """At most `budget` frames, evenly spread over the time from the first to the last, in their order.

    Raises RequestError for no frames, a budget below 1, or times that do not rise.
    """
    if not frames:
        raise RequestError("frames: found none; at least one is needed")
    if budget < 1:
        raise RequestError(f"budget: found {budget}; at least 1 frame is needed")
    for number, (before, after) in enumerate(itertools.pairwise(frames), 1):
        if not after.seconds > before.seconds:
            raise RequestError(
                f"frames[{number}].seconds: found {after.seconds:g} behind {before.seconds:g}; times have to rise"
            )
    if len(frames) <= budget:
        return list(frames)
    start, length = frames[0].seconds, frames[-1].seconds - frames[0].seconds
    wanted = [start + length * (number + 0.5) / budget for number in range(budget)]
    chosen: list[int] = []
    for number, second in enumerate(wanted):
        # Each takes the nearest frame that leaves enough for those after it.
        first = chosen[-1] + 1 if chosen else 0
        last = len(frames) - (budget - number)
        chosen.append(min(range(first, last + 1), key=lambda place: abs(frames[place].seconds - second)))
    return [frames[place] for place in chosen]


def make_clip(frames: Sequence[Frame], text: str, budget: int = 8, *, times: bool = True) -> Clip:
    """A user turn about a video: frames, each behind its time (`Frame from 01:05:`) unless `times` is off, then `text`.

    Raises RequestError as `sample_frames`.
    """
    chosen = sample_frames(frames, budget)
    parts: list[dict[str, Any]] = []
    for frame in chosen:
        if times:
            minutes, seconds = divmod(round(frame.seconds), 60)
            parts.append({"type": "text", "text": f"Frame from {minutes:02}:{seconds:02}:"})
        parts.append({"type": "image"})
    return Clip([{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], [f.image for f in chosen])
