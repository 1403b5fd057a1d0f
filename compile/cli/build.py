"""`speceyes-compile build`: a checkpoint becomes a bundle."""

import contextlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

from ...engines.schema import encode
from ...engines.target import TARGETS
from ..recipe import Recipe, make_recipe, parse_precision
from .tables import accuracy_table, cost_table, megabytes

if TYPE_CHECKING:
    from ..build import Build
    from ..plan import Plan

DEFAULTS = Recipe()


@click.command("build")
@click.argument("checkpoint")
@click.option("-o", "--out", required=True, type=click.Path(), help="The bundle to write: NAME.speceyes.")
@click.option("--target", help=f"One of {', '.join(TARGETS)}; {DEFAULTS.target} by default.")
@click.option(
    "--precision", help="int8 for all parts, or decoder=int8,vision=fp32. fp32, int8, and int4 for the decoder."
)
@click.option("--recipe", "recipe_file", type=click.Path(), help="A YAML file with options, see docs/recipe.md.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="One option: --set check.steps=16.")
@click.option("--no-check", is_flag=True, help="Do not compare the engines with the fp32 model.")
@click.option("--dry-run", is_flag=True, help="Say what would be built and what it needs, then stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
def command(
    checkpoint: str,
    out: str,
    target: str | None,
    precision: str | None,
    recipe_file: str | None,
    assignments: tuple[str, ...],
    no_check: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Compile CHECKPOINT, a Hugging Face folder or hub id, into a bundle of engines."""
    changes: dict[str, Any] = {}
    if target is not None:
        changes["target"] = target
    if precision is not None:
        changes["precision"] = parse_precision(precision)
    if no_check:
        changes["check"] = {"enabled": False}
    recipe = make_recipe(recipe_file, changes, assignments)
    signal.signal(signal.SIGTERM, _stop)
    console = Console(highlight=False)
    with contextlib.redirect_stdout(sys.stderr), quiet_libraries():
        from ..build import build, prepare

        if dry_run:
            _, plan = prepare(checkpoint, out, recipe)
            report, table = {"plan": asdict(plan), "recipe": encode(recipe)}, plan_table(plan)
        else:
            made = build(checkpoint, out, recipe, progress=Stages())
            report, table = describe(made), build_table(made)
    if as_json:
        print(json.dumps(report))
        return
    console.print(table)
    if not dry_run:
        show_measurements(made, console)


def plan_table(plan: "Plan") -> Table:
    """Parts with estimated sizes, and what the build needs."""
    table = _part_table(
        "estimated size", caption=f"peak memory about {plan.memory / 1e9:.1f} GB, disk {plan.disk / 1e9:.1f} GB"
    )
    for name, part in plan.parts.items():
        table.add_row(
            name,
            part.precision,
            f"{part.parameters / 1e6:.1f} M",
            megabytes(part.engine_bytes),
            _ratio(part.fp32_bytes, part.engine_bytes),
        )
    return table


def build_table(made: "Build") -> Table:
    """Parts with their sizes as written."""
    bundle, (build,) = made.bundle, made.bundle.manifest.targets.values()
    table = _part_table(
        "size", caption=f"{bundle.path}: {megabytes(bundle.size)}, built in {sum(made.seconds.values()):.0f} s"
    )
    for name, part in made.plan.parts.items():
        size = build.engines[name].weight_bytes
        table.add_row(
            name, part.precision, f"{part.parameters / 1e6:.1f} M", megabytes(size), _ratio(part.fp32_bytes, size)
        )
    return table


def show_measurements(made: "Build", console: Console) -> None:
    """Accuracy and costs, as far as they were taken."""
    (build,) = made.bundle.manifest.targets.values()
    console.print(accuracy_table(build.engines))
    console.print(cost_table(build.engines))


def describe(made: "Build") -> dict[str, Any]:
    """The finished build as JSON values."""
    manifest = made.bundle.manifest
    return {
        "bundle": str(made.bundle.path),
        "bytes": made.bundle.size,
        "seconds": made.seconds,
        "plan": asdict(made.plan),
        "model": encode(manifest.model),
        "targets": encode(manifest.targets),
    }


class Stages:
    """Progress on stderr: a spinner where there is a terminal, and a line for each finished stage."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    @contextlib.contextmanager
    def __call__(self, name: str, number: int, total: int) -> Iterator[None]:
        began = time.perf_counter()
        with self._console.status(f"{name} ({number} of {total})"):
            yield
        self._console.print(f"[dim]{number:3} of {total}[/]  {name:18} [dim]{time.perf_counter() - began:7.1f} s[/]")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the notes of torch and transformers off the terminal; what they raise still arrives."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        logging.disable_progress_bar()
        yield


def _part_table(size: str, caption: str) -> Table:
    table = Table(
        "part", "precision", box=None, pad_edge=False, header_style="dim", caption=caption, caption_justify="left"
    )
    for title in ("parameters", size, "against fp32"):
        table.add_column(title, justify="right")
    return table


def _ratio(whole: int, part: int) -> str:
    return f"{whole / part:.1f} x smaller"


def _stop(signal_number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
