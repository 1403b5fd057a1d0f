"""Tables about engines, shared by `build` and `inspect`."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from ...engines.manifest import EngineEntry

FIGURES = ("cosine", "agreement", "divergence")


def engines_table(engines: Mapping[str, EngineEntry]) -> Table:
    """Size of each part against fp32 and, beside the fp32 model, its accuracy (`-` where it was not checked)."""
    table = parts_table("size", *FIGURES)
    for part, engine in engines.items():
        figures = (f"{engine.accuracy[name]:.4f}" if name in engine.accuracy else "-" for name in FIGURES)
        table.add_row(*part_cells(part, engine.precision, engine.parameters, engine.weight_bytes), *figures)
    return table


def parts_table(*columns: str) -> Table:
    """An empty table with a row per part; `part_cells` fills all but the columns after the first of `columns`."""
    size, *more = columns
    table = plain_table("part", "precision")
    for title in ("weights", size, "against fp32", *more):
        table.add_column(title, justify="right")
    return table


def part_cells(part: str, precision: str, parameters: int, size: int) -> tuple[str, ...]:
    """Cells of `parts_table`; the share is of the size in fp32."""
    return part, precision, f"{parameters / 1e6:.1f} M", megabytes(size), f"{size / 4 / parameters:.0%}"


def costs_table(engines: Mapping[str, EngineEntry]) -> Table:
    """Measured milliseconds: of a decoder's step by token rows, of one image tile."""
    table = plain_table("ms by tokens in a step")
    measured = {part: engine.cost_ms for part, engine in engines.items() if engine.cost_ms}
    widths = sorted({width for costs in measured.values() for width in costs}, key=lambda width: (len(width), width))
    for width in widths:
        table.add_column(width, justify="right")
    for part, costs in measured.items():
        title = "vision, one tile" if part == "vision" else part
        table.add_row(title, *(f"{costs[width]:.2f}" if width in costs else "" for width in widths))
    return table


def make_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is; outside a terminal wide enough for every table."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 120
    return console


def plain_table(*columns: str) -> Table:
    """Columns without lines."""
    return Table(*columns, box=None, pad_edge=False, header_style="dim")


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
