"""Where on the pictures an answer is read: for every character of it, the image token that shows it."""

import re

from .canvas import COLOURS, SHAPES, Canvas
from .sample import Sample, Turn

Spot = tuple[int, int, int]
EXTREMES = {"highest": "longest bar", "lowest": "shortest bar"}

_QUOTED = re.compile(r'"([^"]+)"')
_PAIR = re.compile(r'"([a-z]+)":"([^"]+)"')
_LINE = re.compile(r"[^\n]+")
_NAME = re.compile(r"\b[A-Z]+\b")
_WORD = re.compile(r"[a-z]+")


def spots(sample: Sample, turn: Turn) -> list[Spot | None]:
    """For every character of the answer, (picture, image token, slot) or None where it is not read off one
    place. The slot counts characters from the left of the image token; it is -1 for a shape or a bar."""
    found: list[Spot | None] = [None] * len(turn.answer)
    pattern = _QUOTED if turn.answer.startswith("{") else _LINE
    for match in pattern.finditer(turn.answer):
        group = match.lastindex or 0
        start = match.start(group)
        for offset, spot in enumerate(_written(sample, match.group(group).upper())):
            found[start + offset] = spot
    for match in _PAIR.finditer(turn.answer):
        if found[match.start(1)] is None:
            found[match.start(1) : match.end(1)] = [_row(sample, match.group(2))] * len(match.group(1))
    if turn.kind.startswith("clip"):
        asked = set(_WORD.findall(turn.question)) & set(COLOURS)
        followed = asked.pop() if asked else ""
        for match in _WORD.finditer(turn.answer):
            word = match.group()
            followed = word if word in COLOURS else followed
            frame = 0 if word in COLOURS or word in SHAPES else len(sample.canvases) - 1
            found[match.start() : match.end()] = [_followed(sample, frame, followed)] * len(word)
    elif turn.kind.startswith(("shapes", "chart/colour")):
        found = [_asked(sample.canvases[0], turn)] * len(turn.answer)
    return found


def mentioned(sample: Sample, question: str) -> list[Spot | None]:
    """For every character of the question, where the label, the only colour or figure, or the bar that it names is."""
    found: list[Spot | None] = [None] * len(question)
    for match in _NAME.finditer(question):
        for offset, spot in enumerate(_written(sample, match.group())):
            found[match.start() + offset] = spot
    for match in _WORD.finditer(question):
        tokens = [token for colour, figure, token in sample.canvases[0].things if match.group() in (colour, figure)]
        if len(tokens) == 1:
            found[match.start() : match.end()] = [(0, tokens[0], -1)] * len(match.group())
        if mark := EXTREMES.get(match.group()):
            found[match.start() : match.end()] = [(0, sample.canvases[0].marked[mark], -1)] * len(match.group())
    return found


def _written(sample: Sample, text: str) -> list[Spot]:
    """Places of the characters of `text` if it is written exactly once."""
    exact = re.compile(rf"(?<![\w.\-/])(?<!\d:){re.escape(text)}(?![\w.\-/])(?!:\d)")
    places = [
        [(number, *place) for place in run_places[match.start() : match.end()]]
        for number, canvas in enumerate(sample.canvases)
        for run, run_places in canvas.runs
        for match in exact.finditer(run)
    ]
    return places[0] if len(places) == 1 else []


def _row(sample: Sample, value: str) -> Spot | None:
    """The beginning of the only row in which `value` is written, where its label stands."""
    rows = [(n, *places[0]) for n, canvas in enumerate(sample.canvases) for run, places in canvas.runs if value in run]
    return rows[0] if len(rows) == 1 else None


def _followed(sample: Sample, frame: int, colour: str) -> Spot | None:
    """The thing of a colour in one frame of a clip."""
    tokens = [token for tint, _, token in sample.canvases[frame].things if tint == colour]
    return (frame, tokens[0], -1) if tokens else None


def _asked(canvas: Canvas, turn: Turn) -> Spot | None:
    """The thing that question and answer together describe best, if it is one alone."""
    words = set(_WORD.findall(f"{turn.question} {turn.answer}"))
    scores = [(len(words & {colour, figure}), token) for colour, figure, token in canvas.things]
    best = max(score for score, _ in scores)
    named = [token for score, token in scores if score == best]
    return (0, named[0], -1) if best and len(named) == 1 else None
