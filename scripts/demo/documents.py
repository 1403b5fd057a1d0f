"""Receipts, forms, tickets, labels and tables, rendered with the fields that they show."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from . import words
from .canvas import ALPHABET, CELL, LINE, SIZE, Canvas, Pen, write
from .sample import Sample, Turn

COLUMNS = SIZE // CELL
LINES = SIZE // LINE
READ = "Read the document as JSON."

Fields = dict[str, "str | Fields"]
Entry = tuple[str, tuple[str, ...], str]


@dataclass(frozen=True)
class Document:
    """The rows of a page (each a string of at most `COLUMNS` characters, "-" for a rule), its fields, its questions."""

    rows: tuple[str, ...]
    fields: Fields
    questions: tuple[tuple[str, str], ...]


def _tab(left: str, column: int, right: str) -> str:
    return left.ljust(column) + right


def _receipt(rng: Random) -> Document:
    goods = words.distinct(rng, words.GOODS, rng.randint(1, 2))
    prices = [words.price(rng, 30) for _ in goods]
    total = f"{sum(round(float(p) * 100) for p in prices) / 100:.2f}"
    shop = f"{words.name(rng, words.LAST)} {rng.choice(words.SHOPS)}"
    day, paid = words.date(rng), rng.choice(("CASH", "CARD", "CHECK", "PHONE"))
    label = rng.choice(("TOTAL", "SUM", "AMOUNT"))
    column = rng.choice((8, 12, 16))
    rows = [shop, day] if rng.random() < 0.5 else [day, shop]
    rows += ["-", *(_tab(good, column, cost) for good, cost in zip(goods, prices, strict=True))]
    rows += ["-", _tab(label, column, total), _tab(rng.choice(("PAID BY", "PAYMENT")), column, paid)]
    asked = rng.randrange(len(goods))
    return Document(
        tuple(rows),
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


def _form(rng: Random, title: str, entries: list[Entry]) -> Document:
    """A titled page of labelled values: each entry is (field, labels to choose from, value)."""
    rng.shuffle(entries)
    column = rng.choice((8, 12, -16))
    rows = [" " * rng.choice((0, 4, 8)) + title]
    if rng.random() < 0.5:
        rows.append("-")
    for _, labels, value in entries:
        label = rng.choice(labels)
        rows.append(_tab(label, column, value) if column > 0 else _tab(value, -column, label))
    fields: Fields = {"type": title.lower(), **{field: value for field, _, value in entries}}
    questions = tuple(
        (rng.choice((f"What is the {field}?", f"Which {field} is shown?")), value) for field, _, value in entries
    )
    return Document(tuple(rows), fields, (*questions, ("What kind of document is this?", title.lower())))


def _invoice(rng: Random) -> Document:
    entries: list[Entry] = [
        ("number", ("NO", "NUMBER"), words.digits(rng, 5)),
        ("date", ("DATE", "ISSUED"), words.date(rng)),
        ("client", ("CLIENT", "BILL TO"), words.name(rng, words.LAST)),
        ("amount", ("AMOUNT", "DUE"), f"${words.price(rng, 999)}"),
    ]
    return _form(rng, "INVOICE", entries)


def _badge(rng: Random) -> Document:
    person = f"{rng.choice('ABCDEFGHJKLMNPRSTW')}. {words.name(rng, words.LAST)}"
    entries: list[Entry] = [
        ("name", ("NAME",), person),
        ("id", ("ID", "ID NO"), f"{words.letters(rng, 2)}{words.digits(rng, 4)}"),
        ("role", ("ROLE", "JOB"), words.name(rng, words.ROLES)),
        ("floor", ("FLOOR", "LEVEL"), str(rng.randint(1, 40))),
    ]
    return _form(rng, rng.choice(("BADGE", "PASS")), entries)


def _ticket(rng: Random) -> Document:
    start, end = words.distinct(rng, words.CITIES, 2)
    entries: list[Entry] = [
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
    place = rng.choice((_tab(town, 12, code), _tab(code, 8, town)))
    rows = ["SHIP TO", person, street, place, "-", _tab("WEIGHT", rng.choice((8, 12)), weight)]
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
        amount = words.price(rng, 20) if heads[1] == "PRICE" else str(rng.randint(10, 99))
        cells.append((str(rng.randint(1, 99)), amount))
    first, second = rng.choice(((8, 16), (12, 20), (8, 12)) if heads[1] != "PRICE" else ((8, 16), (12, 16)))
    rows = [_tab(_tab("ITEM", first, heads[0]), second, heads[1])]
    rows += ["-", *(_tab(_tab(good, first, a), second, b) for good, (a, b) in zip(goods, cells, strict=True))]
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


def render(rng: Random, rows: tuple[str, ...]) -> Canvas:
    """A page of `rows` on a raster of `LINE` x `CELL` pixels, each page a little off it, in varying faces and inks."""
    shade = rng.randint(230, 255)
    canvas = Canvas((shade, shade, rng.randint(shade - 15, shade)))
    ink = (rng.randint(0, 70), rng.randint(0, 70), rng.randint(0, 70))
    pen = Pen(rng.choice(("DejaVuSansMono", "DejaVuSansMono-Bold")), 13, ink)
    dx, dy = rng.randint(0, 2), rng.randint(-2, 2)
    written = sum(row != "-" for row in rows)
    line = rng.randint(0, LINES - written)
    indent = CELL * rng.choice((0, 4)) if max(map(len, rows)) <= COLUMNS - 4 else 0
    for row in rows:
        if row == "-":
            canvas.rule(LINE * line - 6, ink)
            continue
        write(canvas, indent + dx, LINE * line + dy, row, pen)
        line += 1
    return canvas


def document(rng: Random, layout: str | None = None) -> Sample:
    """A document of one of `LAYOUTS`: its reading as JSON and questions about its fields."""
    layout = layout or rng.choice(LAYOUTS)
    page = _LAYOUTS[layout](rng)
    reading = Turn(READ, json.dumps(page.fields, separators=(",", ":")), f"fields/{layout}")
    questions = tuple(Turn(question, answer, f"document/{layout}") for question, answer in page.questions)
    return Sample((render(rng, page.rows),), (reading, *questions))


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


def lines(rng: Random) -> Sample:
    """Loose lines of text: all of them, or the one asked for."""
    texts = [_line(rng) for _ in range(rng.randint(1, LINES))]
    turns = [Turn(f"Read line {i + 1}.", text, "line") for i, text in enumerate(texts)]
    rng.shuffle(turns)
    everything = Turn("Read the text.", "\n".join(texts), "text")
    return Sample((render(rng, tuple(texts)),), (everything, *turns[:3]))


def noise(rng: Random) -> Canvas:
    """A page full of random characters, for the auxiliary supervision alone."""
    rows = tuple("".join(rng.choice(ALPHABET + "  ") for _ in range(COLUMNS)) for _ in range(LINES))
    return render(rng, rows)
