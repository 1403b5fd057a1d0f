"""Scenes of coloured shapes and bar charts, with questions about them."""

import json
from dataclasses import dataclass
from random import Random

from . import words
from .canvas import CELL, COLOURS, LINE, SHAPES, Canvas, Pen, write
from .sample import Sample, Turn

READ_CHART = "Read the chart as JSON."
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")


@dataclass(frozen=True)
class Bar:
    """A bar of a chart; `mark` is one of the canvas's MARKS."""

    name: str
    value: int
    colour: str
    mark: str


def scene(rng: Random) -> Sample:
    """One to five shapes on a grid of nine places."""
    count = rng.randint(1, 5)
    places = rng.sample(range(9), count)
    objects = [(place, rng.choice(list(COLOURS)), rng.choice(SHAPES)) for place in places]
    shade = rng.randint(235, 255)
    canvas = Canvas((shade, shade, shade))
    for place, colour, shape in objects:
        x, y = 32 + 64 * (place % 3) + rng.randint(-5, 5), 32 + 64 * (place // 3) + rng.randint(-5, 5)
        canvas.shape(shape, colour, x, y, rng.randint(16, 26))
    colours, shapes = [o[1] for o in objects], [o[2] for o in objects]
    shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
    if rng.random() < 0.7:
        shape, colour = rng.choice(shapes), rng.choice(colours)
    turns = [
        Turn("How many shapes are there?", str(count), "shapes/count"),
        Turn(f"How many {shape} shapes are there?", str(shapes.count(shape)), "shapes/count"),
        Turn(f"How many {colour} shapes are there?", str(colours.count(colour)), "shapes/count"),
    ]
    for place, tint, figure in objects:
        turns.append(Turn(f"What is at the {PLACES[place]}?", f"{tint} {figure}", "shapes/place"))
        if shapes.count(figure) == 1:
            turns.append(Turn(f"What colour is the {figure}?", tint, "shapes/colour"))
            turns.append(Turn(f"Where is the {figure}?", PLACES[place], "shapes/where"))
        if colours.count(tint) == 1:
            turns.append(Turn(f"Which shape is {tint}?", figure, "shapes/shape"))
    _, tint, figure = rng.choice(objects)
    if rng.random() < 0.5:
        absent = [(c, s) for c in COLOURS for s in SHAPES if (c, s) not in {(o[1], o[2]) for o in objects}]
        near = [pair for pair in absent if pair[0] in colours or pair[1] in shapes]
        tint, figure = rng.choice(near)
    present = (tint, figure) in {(o[1], o[2]) for o in objects}
    turns.append(Turn(f"Is there a {tint} {figure}?", "yes" if present else "no", "shapes/exists"))
    rng.shuffle(turns)
    return Sample((canvas,), tuple(turns))


def chart(rng: Random) -> Sample:
    """A bar chart, upright or lying, with named bars and their values, which differ by four at least."""
    count = rng.randint(3, 5)
    months = rng.random() < 0.5
    names = rng.sample(words.MONTHS, count) if months else [words.letters(rng, 1) for _ in range(count)]
    while len(set(names)) < count:
        names = [words.letters(rng, 1) for _ in range(count)]
    values = [value + rng.randint(0, 2) for value in rng.sample(range(5, 98, 6), count)]
    colours = rng.sample(list(COLOURS), count)
    marks = [{max(values): "longest bar", min(values): "shortest bar"}.get(value, "bar") for value in values]
    bars = [Bar(*parts) for parts in zip(names, values, colours, marks, strict=True)]
    shade = rng.randint(240, 255)
    canvas = Canvas((shade, shade, shade))
    title = rng.choice(words.TITLES)
    ink = (rng.randint(0, 50),) * 3
    pen = Pen(ink=ink)
    shift = rng.randint(0, 2), rng.randint(-2, 2)
    write(canvas, 4 * CELL * rng.randint(0, 3) + shift[0], shift[1], title, pen)
    (_upright if rng.random() < 0.5 else _lying)(rng, canvas, pen, shift, bars)
    reading = json.dumps(dict(zip(names, map(str, values), strict=True)), separators=(",", ":"))
    pick, other = rng.sample(range(count), 2)
    turns = [
        Turn(READ_CHART, reading, "fields/chart"),
        Turn(f"What is the value of {names[pick]}?", str(values[pick]), "chart/value"),
        Turn("Which bar is the highest?", names[values.index(max(values))], "chart/extreme"),
        Turn("Which bar is the lowest?", names[values.index(min(values))], "chart/extreme"),
        Turn(f"What colour is the bar of {names[other]}?", colours[other], "chart/colour"),
        Turn(f"Which bar is {colours[pick]}?", names[pick], "chart/bar"),
        Turn("How many bars are there?", str(count), "chart/count"),
        Turn("What is the title?", title, "chart/title"),
    ]
    return Sample((canvas,), (turns[0], *rng.sample(turns[1:], len(turns) - 1)))


def _upright(rng: Random, canvas: Canvas, pen: Pen, shift: tuple[int, int], bars: list[Bar]) -> None:
    """Values in the second line, bars on the floor of the fifth, names in the sixth."""
    first = rng.randint(0, 6 - len(bars))
    width = rng.randint(14, 26)
    for column, bar in enumerate(bars, first):
        left = LINE * column
        canvas.bar((left + 2, 5 * LINE - 4 - bar.value * 0.9, left + 2 + width, 5 * LINE - 4), bar.colour, bar.mark)
        write(canvas, left + shift[0], LINE + shift[1], str(bar.value), pen)
        write(canvas, left + shift[0], 5 * LINE + shift[1], bar.name, pen)


def _lying(rng: Random, canvas: Canvas, pen: Pen, shift: tuple[int, int], bars: list[Bar]) -> None:
    """A line for every bar: its name, the bar, its value."""
    first = rng.randint(1, 6 - len(bars))
    thick = rng.randint(12, 24)
    for row, bar in enumerate(bars, first):
        top = LINE * row
        canvas.bar((LINE + 2, top + 2, LINE + 2 + bar.value * 1.2, top + 2 + thick), bar.colour, bar.mark)
        write(canvas, shift[0], top + shift[1], bar.name, pen)
        write(canvas, 5 * LINE + shift[0], top + shift[1], str(bar.value), pen)
