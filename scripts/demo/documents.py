"""Receipts, forms, tickets, labels and tables, rendered with the fields that they show."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from . import words
from .canvas import ALPHABET, SIZE, Canvas, Pen
from .sample import Sample, Turn

COLUMNS = 20
READ = "Read the document as JSON."

Fields = dict[str, "str | Fields"]


@dataclass(frozen=True)
class Document:
    """The rows of a page (each a string of at most `COLUMNS` characters, "-" for a rule), its fields, its questions."""

    rows: tuple[str, ...]
    fields: Fields
    questions: tuple[tuple[str, str], ...]


def _spread(left: str, right: str) -> str:
    return left + right.rjust(COLUMNS - len(left))


def _receipt(rng: Random) -> Document:
    goods = words.distinct(rng, words.GOODS, rng.randint(2, 3))
    prices = [words.price(rng, 30) for _ in goods]
    total = f"{sum(round(float(p) * 100) for p in prices) / 100:.2f}"
    shop = f"{words.name(rng, words.LAST)} {rng.choice(words.SHOPS)}"
    day, paid = words.date(rng), rng.choice(("CASH", "CARD", "CHECK", "PHONE"))
    label = rng.choice(("TOTAL", "SUM", "AMOUNT"))
    rows = [shop.center(COLUMNS) if rng.random() < 0.5 else shop, day, "-"]
    rows += [_spread(good, cost) for good, cost in zip(goods, prices, strict=True)]
    rows += ["-", _spread(label, total), rng.choice((f"PAID BY {paid}", _spread("PAYMENT", paid)))]
    asked = rng.randrange(len(goods))
    return Document(
        tuple(row.rstrip() for row in rows),
        {"store": shop, "date": day, "items": dict(zip(goods, prices, strict=True)), "total": total, "payment": paid},
        (
            (rng.choice(("What is the total?", "How much was paid?")), total),
            (rng.choice(("Which store is this receipt from?", "What is the name of the store?")), shop),
            ("What is the date?", day),
            (rng.choice(("How was it paid?", "What is the payment method?")), paid),
            (f"What is the price of {goods[asked]}?", prices[asked]),
            ("How many items are listed?", str(len(goods))),
        ),
    )


def _form(rng: Random, title: str, entries: list[tuple[str, tuple[str, ...], str]]) -> Document:
    """A titled page of labelled values: each entry is (field, labels to choose from, value)."""
    rng.shuffle(entries)
    style = rng.randrange(3)
    rows = [title.center(COLUMNS).rstrip() if rng.random() < 0.5 else title]
    if rng.random() < 0.5:
        rows.append("-")
    for _, labels, value in entries:
        label = rng.choice(labels)
        rows.append((f"{label}: {value}", _spread(label, value), f"{label.ljust(7)} {value}")[style])
    fields: Fields = {"type": title.lower(), **{field: value for field, _, value in entries}}
    questions = tuple(
        (rng.choice((f"What is the {field}?", f"Which {field} is shown?")), value) for field, _, value in entries
    )
    return Document(tuple(rows), fields, (*questions, ("What kind of document is this?", title.lower())))


def _invoice(rng: Random) -> Document:
    entries = [
        ("number", ("NO", "NUMBER"), words.digits(rng, 5)),
        ("date", ("DATE", "ISSUED"), words.date(rng)),
        ("client", ("CLIENT", "BILL TO"), words.name(rng, words.LAST)),
        ("amount", ("AMOUNT", "DUE"), f"${words.price(rng, 999)}"),
    ]
    return _form(rng, "INVOICE", entries)


def _badge(rng: Random) -> Document:
    person = f"{rng.choice('ABCDEFGHJKLMNPRSTW')}. {words.name(rng, words.LAST)}"
    entries = [
        ("name", ("NAME",), person),
        ("id", ("ID", "ID NO"), f"{words.letters(rng, 2)}{words.digits(rng, 4)}"),
        ("role", ("ROLE", "JOB"), words.name(rng, words.ROLES)),
        ("floor", ("FLOOR", "LEVEL"), str(rng.randint(1, 40))),
    ]
    return _form(rng, rng.choice(("BADGE", "PASS")), entries)


def _ticket(rng: Random) -> Document:
    start, end = words.distinct(rng, words.CITIES, 2)
    entries = [
        ("origin", ("FROM", "ORIGIN"), start),
        ("destination", ("TO",), end),
        ("date", ("DATE", "DAY"), words.date(rng)),
        ("time", ("TIME", "DEPARTS"), words.time(rng)),
        ("seat", ("SEAT",), f"{rng.randint(1, 60)}{rng.choice('ABCDEF')}"),
    ]
    return _form(rng, rng.choice(("TICKET", "BOARDING PASS")), entries)


def _label(rng: Random) -> Document:
    person, town, code = words.person(rng), words.name(rng, words.CITIES), words.digits(rng, 5)
    street = f"{rng.randint(1, 199)} {words.name(rng, words.TREES)} {rng.choice(('ST', 'ROAD', 'LANE'))}"
    weight = f"{rng.randint(0, 19)}.{rng.randint(1, 9)} KG"
    place = rng.choice((f"{town} {code}", f"{code} {town}"))
    rows = ["SHIP TO", person, street, place, "-", rng.choice((f"WEIGHT {weight}", _spread("WEIGHT", weight)))]
    fields: Fields = {"name": person, "street": street, "city": town, "code": code, "weight": weight}
    questions = (
        ("Who is the parcel for?", person),
        ("What is the street?", street),
        ("What is the city?", town),
        ("What is the postal code?", code),
        ("What is the weight?", weight),
    )
    return Document(tuple(rows), fields, questions)


def _table(rng: Random) -> Document:
    goods = words.distinct(rng, words.GOODS, rng.randint(2, 4))
    heads = rng.choice((("QTY", "PRICE"), ("STOCK", "SOLD"), ("MIN", "MAX")))
    cells = []
    for _ in goods:
        second = words.price(rng, 20) if heads[1] == "PRICE" else str(rng.randint(10, 99))
        cells.append((str(rng.randint(1, 99)), second))
    rows = ["ITEM".ljust(8) + heads[0].rjust(5) + heads[1].rjust(7), "-"]
    rows += [good.ljust(8) + a.rjust(5) + b.rjust(7) for good, (a, b) in zip(goods, cells, strict=True)]
    names = [head.lower() for head in heads]
    fields: Fields = {good: dict(zip(names, pair, strict=True)) for good, pair in zip(goods, cells, strict=True)}
    questions = [(f"What is the {names[k]} of {g}?", cells[i][k]) for i, g in enumerate(goods) for k in (0, 1)]
    rng.shuffle(questions)
    count = ("How many rows are in the table?", str(len(goods)))
    return Document(tuple(rows), fields, (*questions[:3], count))


_LAYOUTS: dict[str, Callable[[Random], Document]] = {
    "receipt": _receipt,
    "invoice": _invoice,
    "badge": _badge,
    "ticket": _ticket,
    "label": _label,
    "table": _table,
}
LAYOUTS = tuple(_LAYOUTS)


def render(rng: Random, rows: tuple[str, ...], level: float) -> Canvas:
    """A page of `rows`; `level` from 0 to 1 widens the choice of faces, inks, places and pitches."""
    shade = rng.randint(255 - round(25 * level), 255)
    canvas = Canvas((shade, shade, rng.randint(shade - round(15 * level), shade)))
    dark = round(70 * level)
    faces = ("DejaVuSansMono", "DejaVuSansMono-Bold") if level > 0.3 else ("DejaVuSansMono",)
    cell = rng.choice((8, 9))
    pen = Pen(rng.choice(faces), cell + 5, cell, (rng.randint(0, dark), rng.randint(0, dark), rng.randint(0, dark)))
    written = sum(row != "-" for row in rows)
    widest = max(len(row) for row in rows) * cell
    pitch = min(24 + rng.randint(-round(3 * level), round(5 * level)), (SIZE - 8) // written)
    x = 4 + rng.randint(0, max(0, round(level * (SIZE - 8 - widest))))
    y = 4 + rng.randint(0, max(0, round(level * (SIZE - 8 - pitch * written))))
    for row in rows:
        if row == "-":
            canvas.rule(y + 1, pen.ink)
            continue
        canvas.text(x, y + pitch / 2 + pen.size * 0.36, row, pen)
        y += pitch
    return canvas


def document(rng: Random, level: float = 1.0, layout: str | None = None) -> Sample:
    """A document of one of `LAYOUTS`: its reading as JSON and questions about its fields."""
    layout = layout or rng.choice(LAYOUTS)
    page = _LAYOUTS[layout](rng)
    reading = Turn(READ, json.dumps(page.fields, separators=(",", ":")), f"fields/{layout}")
    questions = tuple(Turn(question, answer, f"document/{layout}") for question, answer in page.questions)
    return Sample((render(rng, page.rows, level),), (reading, *questions))


def _line(rng: Random) -> str:
    choice = rng.randrange(6)
    if choice == 0:
        return "".join(rng.choice(ALPHABET) for _ in range(rng.randint(3, 10)))
    if choice == 1:
        return words.person(rng)
    if choice == 2:
        return f"{words.name(rng, words.GOODS)} {words.price(rng)}"
    if choice == 3:
        return words.date(rng)
    if choice == 4:
        return f"{words.name(rng, words.CITIES)} {words.digits(rng, rng.randint(1, 6))}"
    return " ".join(words.invented(rng) for _ in range(rng.randint(1, 2)))


def lines(rng: Random, level: float = 1.0) -> Sample:
    """Loose lines of text: all of them, or the one asked for."""
    texts = [_line(rng) for _ in range(rng.randint(1, 2 + round(5 * level)))]
    turns = [Turn(f"Read line {i + 1}.", text, "line") for i, text in enumerate(texts)]
    rng.shuffle(turns)
    everything = Turn("Read the text.", "\n".join(texts), "text")
    return Sample((render(rng, tuple(texts), level),), (everything, *turns[:3]))


def noise(rng: Random) -> Canvas:
    """A page full of random characters, for the auxiliary supervision alone."""
    count = rng.randint(7, 9)
    rows = tuple("".join(rng.choice(ALPHABET + "  ") for _ in range(COLUMNS)) for _ in range(count))
    return render(rng, rows, 1.0)
