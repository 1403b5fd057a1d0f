"""A square picture that remembers what was drawn where, for the auxiliary supervision of the vision tower."""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from . import fonts

SIZE = 192
PATCH = 16
GRID = SIZE // PATCH
SQUARE = 2 * PATCH
CELL, LINE = 8, 32

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:/-#$%&*+=()'"
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 39, 40),
    "green": (34, 150, 60),
    "blue": (31, 90, 200),
    "yellow": (240, 205, 30),
    "orange": (250, 130, 20),
    "purple": (130, 60, 170),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross")
FIGURES = (*SHAPES, "bar")

_CHARACTER = {character: index + 1 for index, character in enumerate(ALPHABET)}
_COLOUR = {colour: index + 1 for index, colour in enumerate(COLOURS)}
_FIGURE = {figure: index + 1 for index, figure in enumerate(FIGURES)}
MARKS = ("shape", "longest bar", "shortest bar", "bar")
CLASSES = (len(ALPHABET) + 1, len(ALPHABET) + 1, len(COLOURS) + 1, len(FIGURES) + 1, len(MARKS) + 1)


@dataclass(frozen=True)
class Pen:
    """How text is written: a face, its size in pixels and the ink."""

    face: str = fonts.FACES[0]
    size: int = 13
    ink: tuple[int, int, int] = (0, 0, 0)


class Canvas:
    """`SIZE` x `SIZE` RGB pixels and, per patch, the labels of what its area holds.

    `labels` is int64 of shape (GRID, GRID, 5): the first and second character with their centre in the patch, the
    colour and the figure that cover its centre, and the one of `MARKS` with its centre in the patch; 0 says none.
    `runs` are the texts written, with the image token of every character and its slot there; `things` are colour,
    figure and image token of the bars and shapes; `marked` is the image token of the longest and the shortest bar.
    """

    def __init__(self, paper: tuple[int, int, int] = (255, 255, 255)) -> None:
        self.image = Image.new("RGB", (SIZE, SIZE), paper)
        self.labels = np.zeros((GRID, GRID, len(CLASSES)), dtype=np.int64)
        self.runs: list[tuple[str, list[tuple[int, int]]]] = []
        self.things: list[tuple[str, str, int]] = []
        self.marked: dict[str, int] = {}
        self._draw = ImageDraw.Draw(self.image)

    def text(self, x: float, baseline: float, text: str, pen: Pen) -> None:
        """Write `text` in cells of `CELL` pixels, the first starting at `x`."""
        font = fonts.load(pen.face, pen.size)
        middle = baseline - 0.36 * pen.size
        centres = [x + (i + 0.5) * CELL for i in range(len(text))]
        self.runs.append((text, [(_token(centre, middle), int(centre % SQUARE // CELL)) for centre in centres]))
        for index, character in enumerate(text):
            if character == " ":
                continue
            centre = x + (index + 0.5) * CELL
            self._draw.text((centre, baseline), character, font=font, fill=pen.ink, anchor="ms")
            self._label_character(centre, middle, character)

    def written(self, token: int) -> tuple[int, ...]:
        """The four characters of an image token's first row of patches, as classes; 0 for none."""
        row, column = divmod(token, SIZE // SQUARE)
        return tuple(self.labels[2 * row, 2 * column : 2 * column + 2, :2].flatten().tolist())

    def rule(self, y: float, ink: tuple[int, int, int]) -> None:
        """A thin line across the page at height `y`."""
        self._draw.line((6, y, SIZE - 7, y), fill=ink)

    def frame(self, box: tuple[float, float, float, float], ink: tuple[int, int, int]) -> None:
        """The outline of `box` (left, top, right, bottom)."""
        self._draw.rectangle(box, outline=ink)

    def bar(self, box: tuple[float, float, float, float], colour: str, mark: str = "bar") -> None:
        """A filled rectangle (left, top, right, bottom) of a chart; `mark` is one of `MARKS`."""
        self._draw.rectangle(box, fill=COLOURS[colour])
        self.things.append((colour, "bar", _token((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)))
        for row, column, y, x in _centres():
            if box[0] <= x <= box[2] and box[1] <= y <= box[3]:
                self.labels[row, column, 2:4] = _COLOUR[colour], _FIGURE["bar"]
        self._mark((box[0] + box[2]) / 2, (box[1] + box[3]) / 2, mark)

    def shape(self, name: str, colour: str, x: float, y: float, radius: float) -> None:
        """One of `SHAPES` inside the circle around (`x`, `y`)."""
        fill = COLOURS[colour]
        self.things.append((colour, name, _token(x, y)))
        if name == "circle":
            self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        else:
            self._draw.polygon([(x + radius * px, y + radius * py) for px, py in _OUTLINES[name]], fill=fill)
        for row, column, py, px in _centres():
            if (px - x) ** 2 + (py - y) ** 2 <= max(radius, PATCH / 2) ** 2:
                self.labels[row, column, 2:4] = _COLOUR[colour], _FIGURE[name]
        self._mark(x, y, "shape")

    def _mark(self, x: float, y: float, mark: str) -> None:
        self.marked[mark] = _token(x, y)
        self.labels[min(int(y // PATCH), GRID - 1), min(int(x // PATCH), GRID - 1), 4] = MARKS.index(mark) + 1

    def _label_character(self, x: float, y: float, character: str) -> None:
        row, column = int(y // PATCH), int(x // PATCH)
        if 0 <= row < GRID and 0 <= column < GRID:
            first = self.labels[row, column, 0] == 0
            self.labels[row, column, 0 if first else 1] = _CHARACTER[character]


def write(canvas: Canvas, x: float, y: float, text: str, pen: Pen) -> None:
    """Write `text` so that its capitals are centred in the first patch below `y`."""
    canvas.text(x, y + PATCH / 2 + 0.36 * pen.size, text, pen)


def _token(x: float, y: float) -> int:
    """The number of the image token whose square holds a point."""
    side = SIZE // SQUARE
    row, column = (min(max(int(v // SQUARE), 0), side - 1) for v in (y, x))
    return row * side + column


def _centres() -> list[tuple[int, int, float, float]]:
    return [(r, c, (r + 0.5) * PATCH, (c + 0.5) * PATCH) for r in range(GRID) for c in range(GRID)]


def _star() -> list[tuple[float, float]]:
    radii = (1.0, 0.45)
    return [(radii[i % 2] * math.sin(i * math.pi / 5), -radii[i % 2] * math.cos(i * math.pi / 5)) for i in range(10)]


_T = 0.34
_OUTLINES: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "triangle": [(0.0, -1.0), (0.95, 0.75), (-0.95, 0.75)],
    "diamond": [(0.0, -1.0), (0.75, 0.0), (0.0, 1.0), (-0.75, 0.0)],
    "star": _star(),
    "cross": [
        (-_T, -1.0), (_T, -1.0), (_T, -_T), (1.0, -_T), (1.0, _T), (_T, _T),
        (_T, 1.0), (-_T, 1.0), (-_T, _T), (-1.0, _T), (-1.0, -_T), (-_T, -_T),
    ],
}  # fmt: skip
