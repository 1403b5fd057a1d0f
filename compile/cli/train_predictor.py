"""`speceyes-compile train-predictor`: a drafter learns from the answers of the model that it will draft for."""

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...engines.schema import encode
from ..predictor.settings import Shape, Training
from .build import quiet_libraries
from .tables import make_console, plain_table

if TYPE_CHECKING:
    from ..predictor.pipeline import Trained

SHAPE, TRAINING = Shape(), Training()


@click.command("train-predictor", context_settings={"show_default": True})
@click.argument("source", metavar="CHECKPOINT|BUNDLE")
@click.option("--data", required=True, type=click.Path(path_type=Path), help="A folder with requests.jsonl and images.")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="Folder to write: NAME.predictor.")
@click.option("--checkpoint", help="The checkpoint of a BUNDLE.")
@click.option("--work", type=click.Path(path_type=Path), help="Keeps traces and progress; OUT.work unless given.")
@click.option("--form", type=click.Choice(["recurrent", "document"]), default=SHAPE.form, help="document: an ablation.")
@click.option("--state", type=int, default=SHAPE.state, help="Width of the recurrent cell.")
@click.option("--slice", type=int, default=SHAPE.slice, help="The most frequent tokens, which it can draft.")
@click.option("--window", type=int, default=SHAPE.window, help="Drafted tokens that training unrolls.")
@click.option("--epochs", type=int, default=TRAINING.epochs, help="Passes over the recorded answers.")
@click.option("--batch", type=int, default=TRAINING.batch, help="Answers per step.")
@click.option("--learning-rate", type=float, default=TRAINING.learning_rate, help="The highest one.")
@click.option("--max-new-tokens", type=int, default=TRAINING.max_new_tokens, help="Longest answer recorded.")
@click.option("--seed", type=int, default=TRAINING.seed, help="Of first weights, order and dropout.")
@click.option("--gradient-checkpointing", is_flag=True, help="Less memory for more time: activations are recomputed.")
@click.option("--threads", type=int, help="Cores to use; all unless given.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
def command(
    source: str,
    data: Path,
    out: Path,
    checkpoint: str | None,
    work: Path | None,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a predictor for CHECKPOINT or BUNDLE from its own answers to the requests in DATA.

    Interrupted, it goes on where it was when called again.
    """
    shape = Shape(**{name: options.pop(name) for name in ("form", "state", "slice", "window")})
    training = Training(**options)
    with contextlib.redirect_stdout(sys.stderr), quiet_libraries(), bars() as bar:
        from ..predictor.pipeline import train_predictor

        trained = train_predictor(
            source,
            data,
            out,
            checkpoint=checkpoint,
            work=work,
            shape=shape,
            training=training,
            threads=threads,
            command=shlex.join(["speceyes-compile", *sys.argv[1:]]),
            progress=bar,
        )
    if as_json:
        print(json.dumps(describe(trained)))
    else:
        show(trained, make_console())


class Bars:
    """A bar for each stage, on stderr; where that is no terminal, a line for each tenth."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, Any] = {}

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        if not self._progress.console.is_terminal:
            self._say(stage, done, total, note)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total, note="")
        self._progress.update(self._tasks[stage], completed=done, note=note)

    def _say(self, stage: str, done: int, total: int, note: str) -> None:
        tenth = 10 * done // total
        if self._tasks.get(stage, 0) < tenth:
            self._tasks[stage] = tenth
            self._progress.console.print(f"{stage:20} {done} of {total}  {note}")


@contextlib.contextmanager
def bars() -> Iterator[Bars]:
    """Progress of the stages, with what is left."""
    columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=make_console(stderr=True)) as progress:
        yield Bars(progress)


def describe(trained: "Trained") -> dict[str, Any]:
    """The training's figures as JSON values."""
    return {
        "path": str(trained.path),
        "predictor": encode(trained.entry),
        "tokens_per_pass": trained.tokens_per_pass,
        "reliability": encode(trained.curve),
        "answers": trained.requests,
    }


def show(trained: "Trained", console: Console) -> None:
    """The same for people."""
    entry = trained.entry
    console.print(
        f"{trained.path}: {entry.own_parameters:,} parameters of its own, {entry.shared_parameters:,} shared with the "
        f"target, drafts {entry.slice} tokens",
        soft_wrap=True,
    )
    counts = ", ".join(f"{count} {split}" for split, count in trained.requests.items())
    console.print(f"answers: {counts}; what follows is of the test")
    table = plain_table("acceptance by position", *(str(place) for place in range(1, len(entry.acceptance) + 1)))
    table.add_row("if all before were", *(f"{share:.3f}" for share in entry.acceptance))
    console.print(table)
    console.print(f"tokens of a pass with whole windows: {trained.tokens_per_pass:.2f}")
    console.print(f"confidence: expected calibration error {entry.ece:.3f}")
    table = plain_table("confidence", "drafts", "accepted")
    for bin in trained.curve:
        table.add_row(f"{bin.confidence:.3f}", str(bin.count), f"{bin.accepted:.3f}")
    console.print(table)
    table = plain_table("work plan", "share", "precision", "recall", "Brier score")
    for module, figures in entry.plan.items():
        table.add_row(module, *(f"{figures[name]:.3f}" for name in ("share", "precision", "recall", "brier")))
    console.print(table)
