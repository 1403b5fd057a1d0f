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
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import click
from rich.console import Console

from ...engines.manifest import TargetEntry
from ...engines.schema import encode
from ...engines.target import TARGETS
from ..recipe import Kv, Recipe, make_recipe, precision_changes
from .tables import costs_table, engines_table, make_console, megabytes, part_cells, parts_table
from .tensorrt_options import tensorrt_changes, tensorrt_options

if TYPE_CHECKING:
    from ..build import Build
    from ..plan import Plan

DEFAULTS = Recipe()


@click.command("build")
@click.argument("checkpoint")
@click.option("-o", "--out", required=True, type=click.Path(), help="The bundle to write: NAME.speceyes.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    help=f"One of {', '.join(TARGETS)}, several by repeating it; {DEFAULTS.target} by default.",
)
@click.option(
    "--precision",
    help="int8 for all parts, or decoder=int8,vision=fp32. fp32, int8, and int4 for the decoder; for TensorRT fp16 or "
    "bf16, and -w8a16 or -w8a8 behind it.",
)
@click.option(
    "--kv",
    type=click.Choice(get_args(Kv)),
    help=f"What the decoder's cache holds on onnxruntime-cpu; {DEFAULTS.kv} by default.",
)
@click.option(
    "--settings", type=click.Path(), help="A YAML file that the bundle is loaded with, see docs/speculation.md."
)
@click.option("--predictor", type=click.Path(), help="A folder written by train-predictor: drafts for the model.")
@click.option("--recipe", "recipe_file", type=click.Path(), help="A YAML file with options, see docs/recipe.md.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="One option: --set check.steps=16.")
@click.option("--no-check", is_flag=True, help="Do not compare the engines with the fp32 model.")
@click.option("--dry-run", is_flag=True, help="Say what would be built and what it needs, then stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
@tensorrt_options
def command(
    checkpoint: str,
    out: str,
    targets: tuple[str, ...],
    precision: str | None,
    kv: str | None,
    settings: str | None,
    predictor: str | None,
    recipe_file: str | None,
    assignments: tuple[str, ...],
    no_check: bool,
    dry_run: bool,
    as_json: bool,
    **tensorrt: Any,
) -> None:
    """Compile CHECKPOINT, a Hugging Face folder or hub id, into a bundle of engines."""
    changes: dict[str, Any] = {}
    if targets:
        changes["target"] = targets[0] if len(targets) == 1 else list(targets)
    if precision is not None:
        changes |= precision_changes(precision)
    if kv is not None:
        changes["kv"] = kv
    changes.setdefault("tensorrt", {}).update(tensorrt_changes(tensorrt))
    if settings is not None:
        changes["settings"] = settings
    if predictor is not None:
        changes["predictor"] = predictor
    if no_check:
        changes["check"] = {"enabled": False}
    recipe = make_recipe(recipe_file, changes, assignments)
    signal.signal(signal.SIGTERM, _stop)
    console = make_console()
    with contextlib.redirect_stdout(sys.stderr), quiet_libraries():
        from ..build import build, prepare

        if dry_run:
            _, plan = prepare(checkpoint, out, recipe)
        else:
            made = build(checkpoint, out, recipe, progress=Stages())
    if as_json:
        print(json.dumps({"plan": asdict(plan), "recipe": encode(recipe)} if dry_run else describe(made)))
    elif dry_run:
        show_plan(plan, console)
    else:
        show_build(made, console)


def show_plan(plan: "Plan", console: Console) -> None:
    """Parts with estimated sizes, and what the build needs."""
    table = parts_table("estimated size")
    for name, part in plan.parts.items():
        table.add_row(*part_cells(name, part.precision, part.parameters, part.engine_bytes))
    console.print(table)
    for target, needed in plan.tensorrt.items():
        console.print(
            f"{target}: about {needed.memory / 1e9:.1f} GB of memory, {needed.seconds:.0f} s on one core, "
            f"{needed.disk / 1e9:.2f} GB of disk"
        )
    console.print(f"peak memory about {plan.memory / 1e9:.1f} GB, disk {plan.disk / 1e9:.1f} GB")


def show_build(made: "Build", console: Console) -> None:
    """Sizes, accuracy and costs of what was built."""
    builds = made.bundle.manifest.targets
    for target, build in builds.items():
        if len(builds) > 1 or build.tensorrt is not None:
            console.print(describe_target(target, build))
        console.print(engines_table(build.engines))
        if any(engine.cost_ms for engine in build.engines.values()):
            console.print(costs_table(build.engines))
    size, seconds = megabytes(made.bundle.size), sum(made.seconds.values())
    console.print(f"{made.bundle.path}: {size}, built in {seconds:.0f} s", soft_wrap=True)


def describe_target(target: str, build: TargetEntry) -> str:
    """A line about a target: what built it, for which GPUs, and whether another build gives the same bytes."""
    built = build.tensorrt
    if built is None:
        return f"{target}:"
    differing = [part for part, same in built.deterministic.items() if not same]
    again = f"; another build differs in the bytes of {', '.join(differing)}" if differing else ""
    return f"{target} {built.version}, compute capability {', '.join(map(str, built.compute_capabilities))}{again}:"


def describe(made: "Build") -> dict[str, Any]:
    """The finished build as JSON values."""
    manifest = made.bundle.manifest
    return {
        "bundle": str(made.bundle.path),
        "bytes": made.bundle.size,
        "seconds": made.seconds,
        "model": encode(manifest.model),
        "targets": encode(manifest.targets),
    }


class Stages:
    """Progress on stderr: a spinner where there is a terminal, and a line for each finished stage."""

    def __init__(self) -> None:
        self._console = make_console(stderr=True)

    @contextlib.contextmanager
    def __call__(self, name: str, number: int, total: int) -> Iterator[None]:
        began = time.perf_counter()
        with self._console.status(f"{name} ({number} of {total})"):
            yield
        self._console.print(f"{number:3} of {total}  {name:18}{time.perf_counter() - began:7.1f} s", style="dim")


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


def _stop(signal_number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
