"""Scenes of coloured shapes and bar charts, with questions about them."""

import json
from random import Random

from . import words
from .canvas import COLOURS, SHAPES, SIZE, Canvas, Pen
from .sample import Sample, Turn

READ_CHART = "Read the chart as JSON."
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")


def scene(rng: Random, level: float = 1.0) -> Sample:
    """One to five shapes on a grid of nine places."""
    count = rng.randint(1, 2 + round(3 * level))
    places = rng.sample(range(9), count)
    objects = [(place, rng.choice(list(COLOURS)), rng.choice(SHAPES)) for place in places]
    shade = rng.randint(235, 255)
    canvas = Canvas((shade, shade, shade))
    for place, colour, shape in objects:
        x, y = 34 + 62 * (place % 3) + rng.randint(-6, 6), 34 + 62 * (place // 3) + rng.randint(-6, 6)
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


def chart(rng: Random, level: float = 1.0) -> Sample:
    """A bar chart, upright or lying, with named bars and their values."""
    count = rng.randint(3, 4 + round(level))
    months = rng.random() < 0.5
    names = rng.sample(words.MONTHS, count) if months else [words.letters(rng, 1) for _ in range(count)]
    while len(set(names)) < count:
        names = [words.letters(rng, 1) for _ in range(count)]
    values = rng.sample(range(5, 100), count)
    colours = rng.sample(list(COLOURS), count)
    shade = rng.randint(240, 255)
    canvas = Canvas((shade, shade, shade))
    title = rng.choice(words.TITLES)
    ink = (rng.randint(0, 50),) * 3
    pen = Pen(cell=8, size=13, ink=ink)
    canvas.text(rng.randint(6, SIZE - 6 - 9 * len(title)), 18, title, Pen(cell=9, size=14, ink=ink))
    (_upright if rng.random() < 0.5 else _lying)(rng, canvas, pen, names, values, colours)
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


def _upright(rng: Random, canvas: Canvas, pen: Pen, names: list[str], values: list[int], colours: list[str]) -> None:
    step = (SIZE - 12) // len(names)
    floor = SIZE - 24 - rng.randint(0, 4)
    width = min(step - 8, rng.randint(18, 30))
    for index, (name, value, colour) in enumerate(zip(names, values, colours, strict=True)):
        centre = 6 + step * (index + 0.5)
        top = floor - value * 1.15
        canvas.bar((centre - width / 2, top, centre + width / 2, floor), colour)
        canvas.text(centre - 4 * len(str(value)), top - 3, str(value), pen)
        canvas.text(centre - 4 * len(name), floor + 16, name, pen)


def _lying(rng: Random, canvas: Canvas, pen: Pen, names: list[str], values: list[int], colours: list[str]) -> None:
    step = (SIZE - 36) // len(names)
    thick = min(step - 8, rng.randint(14, 24))
    left = 36 + rng.randint(0, 8)
    for index, (name, value, colour) in enumerate(zip(names, values, colours, strict=True)):
        middle = 30 + step * (index + 0.5)
        right = left + value * 1.15
        canvas.bar((left, middle - thick / 2, right, middle + thick / 2), colour)
        canvas.text(right + 4, middle + 5, str(value), pen)
        canvas.text(left - 6 - 8 * len(name), middle + 5, name, pen)
