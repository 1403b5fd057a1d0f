"""Tables about engines, shared by `build` and `inspect`."""

from collections.abc import Mapping

from rich.table import Table

from ...engines.manifest import EngineEntry


def accuracy_table(engines: Mapping[str, EngineEntry]) -> Table:
    """Each figure of the check beside the fp32 model, with the bound that was applied."""
    table = Table("accuracy", "figure", "found", "bound", box=None, pad_edge=False, header_style="dim")
    for part, engine in engines.items():
        if not engine.accuracy:
            table.add_row(part, "not checked", "", "")
        for name, value in engine.accuracy.items():
            if not name.endswith("_bound"):
                bound = engine.accuracy.get(f"{name}_bound")
                table.add_row(part, name, f"{value:.5f}", "" if bound is None else f"{bound:g}")
    return table


def cost_table(engines: Mapping[str, EngineEntry]) -> Table:
    """Measured milliseconds: of a decoder's step by token rows, of one image tile."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("milliseconds")
    decoder = engines["decoder"].cost_ms if "decoder" in engines else {}
    for width in decoder:
        table.add_column(f"width {width}", justify="right")
    table.add_row("decoder step", *(f"{cost:.2f}" for cost in decoder.values()) if decoder else ("not measured",))
    if "vision" in engines:
        tile = engines["vision"].cost_ms.get("1")
        table.add_row("vision tile", "not measured" if tile is None else f"{tile:.2f}")
    return table


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
