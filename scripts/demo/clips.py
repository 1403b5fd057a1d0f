"""Short clips of moving shapes, as frames, with their summary."""

from random import Random

from .canvas import COLOURS, SHAPES, Canvas
from .sample import Sample, Turn

FRAMES = 3
SUMMARISE = "Summarise the clip."
ACTIONS = ("moves left", "moves right", "moves up", "moves down", "grows", "shrinks", "stays still", "disappears")


def clip(rng: Random) -> Sample:
    """One or two shapes that each do one of `ACTIONS` over `FRAMES` frames."""
    count = rng.randint(1, 2)
    colours, shapes = rng.sample(list(COLOURS), count), rng.sample(SHAPES, count)
    actions = [rng.choice(ACTIONS) for _ in range(count)]
    flat = any(action in ("moves left", "moves right") for action in actions)
    if flat:
        actions = [{"moves up": "moves left", "moves down": "moves right"}.get(action, action) for action in actions]
    shade = rng.randint(235, 255)
    canvases = tuple(Canvas((shade, shade, shade)) for _ in range(FRAMES))
    lanes = rng.sample((0, 1), count)
    for colour, shape, action, lane in zip(colours, shapes, actions, lanes, strict=True):
        across, along = 50 + 92 * lane + rng.randint(-8, 8), rng.randint(70, 122)
        radius = float(rng.randint(17, 26))
        step = rng.randint(26, 36)
        for index, canvas in enumerate(canvases):
            offset, size = index - 1, radius
            place = float(along)
            if action in ("moves left", "moves up"):
                place -= offset * step
            elif action in ("moves right", "moves down"):
                place += offset * step
            elif action == "grows":
                size = 12.0 + 12 * index
            elif action == "shrinks":
                size = 36.0 - 12 * index
            if action == "disappears" and index == FRAMES - 1:
                continue
            x, y = (place, across) if flat else (across, place)
            canvas.shape(shape, colour, x, y, size)
    subjects = [f"the {c} {s} {a}" for c, s, a in zip(colours, shapes, actions, strict=True)]
    ordered = [text for _, text in sorted(zip(lanes, subjects, strict=True))]
    summary = " and ".join(ordered)
    turns = [Turn(SUMMARISE, summary[0].upper() + summary[1:] + ".", "clip")]
    for colour, shape, action in zip(colours, shapes, actions, strict=True):
        turns.append(Turn(f"What does the {colour} {shape} do?", action, "clip/action"))
    return Sample(canvases, tuple(turns))
