"""`speceyes-compile check`: do a bundle's engines still give what the fp32 model gave?"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from ...engines.bundle import Bundle
from ...engines.files import whole_file
from .tables import make_console, plain_table

if TYPE_CHECKING:
    from ..accuracy.check import PartReport, Report


@click.command("check")
@click.argument("bundle", type=click.Path())
@click.option("--target", help="One of the bundle's targets; the best that runs here by default.")
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use; all by default.")
@click.option("--commands", is_flag=True, help="Print the `polygraphy run` command of each engine, and run nothing.")
@click.option("--report", type=click.Path(path_type=Path), help="A file for the JSON, beside what is printed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
def command(
    bundle: str, target: str | None, threads: int | None, commands: bool, report: Path | None, as_json: bool
) -> int:
    """Run the engines of BUNDLE on its accuracy packs, and a request with accepted and rejected drafts.

    Exit code 1 when a part is further from the fp32 model than the manifest allows.
    """
    opened = Bundle.open(bundle)
    console = make_console()
    if commands:
        show_commands(opened, target)
        return 0

    from ..accuracy.check import check_bundle

    progress = make_console(stderr=True)
    with progress.status("checking") as status:
        found = check_bundle(opened, target, threads=threads, progress=lambda part: status.update(f"checking: {part}"))
    text = json.dumps(asdict(found))
    if report is not None:
        with whole_file(report) as partial:
            partial.write_text(text + "\n")
    if as_json:
        print(text)
    else:
        show(found, console)
    return 0 if found.passed else 1


def show_commands(bundle: Bundle, target: str | None) -> None:
    """Print the commands of the packs, one a line, with paths from the current folder."""
    from ...engines.target import choose_target
    from ..accuracy.commands import list_commands

    chosen, _ = choose_target(bundle, target)
    for line in list_commands(chosen.name, bundle.manifest.targets[chosen.name], bundle.path).values():
        print(line)


def show(found: "Report", console: Console) -> None:
    """The report for people."""
    table = plain_table("part", "precision")
    for title in ("lowest cosine", "allowed", "largest error", "allowed", "of", "same token", "allowed", ""):
        table.add_column(title, justify="right")
    for name, part in found.parts.items():
        verdict = "passed" if part.passed else "FAILED"
        table.add_row(name, part.precision, *cells(part), verdict)
    console.print(f"{found.bundle}, {found.target}: {'passed' if found.passed else 'FAILED'}", style="bold")
    console.print(table)
    session = found.parts.get("session")
    if session is not None and session.replay_error is not None:
        console.print(f"logits with drafts against those without: largest difference {session.replay_error:.2g}")
    for name, part in found.parts.items():
        if part.fault is not None:
            console.print(f"{name}: {part.fault}", soft_wrap=True)


def cells(part: "PartReport") -> tuple[str, ...]:
    """Figures of a part with the bound beside each; empty where there are none."""
    worst = part.outputs[part.worst_output] if part.outputs and part.worst_output else None
    return (
        number(part.cosine, ".6f"),
        number(part.cosine_bound, ".6f"),
        number(part.max_abs_error, ".2g"),
        number(worst.atol if worst else None, ".2g"),
        part.worst_output or "",
        number(part.agreement, ".0%"),
        number(part.agreement_bound, ".0%"),
    )


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
