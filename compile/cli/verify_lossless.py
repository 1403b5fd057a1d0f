"""`speceyes-compile verify-lossless`: does speculation change a token?"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress

from .tables import make_console

if TYPE_CHECKING:
    from ..lossless import Lossless


@click.command("verify-lossless")
@click.argument("bundle", type=click.Path())
@click.option(
    "--prompts", type=click.Path(), help="A file of requests, see docs/predictor.md; a few of ours by default."
)
@click.option("--settings", type=click.Path(), help="A YAML file with the section `speculation`.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=48, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use; all by default.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
def command(
    bundle: str, prompts: str | None, settings: str | None, max_new_tokens: int, threads: int | None, as_json: bool
) -> int:
    """Answer requests with BUNDLE plainly and speculatively and compare every token.

    Greedy and sampled, alone and in batches of four; with the bundle's own drafters, and with drafts that are forced to
    be right for a random length. Exit code 1 when a token differs.
    """
    from ..lossless import verify_lossless

    with Progress(console=make_console(stderr=True), transient=True) as bar:
        task = bar.add_task("comparing", total=None)
        found = verify_lossless(
            bundle,
            prompts,
            threads=threads,
            max_new_tokens=max_new_tokens,
            settings=settings,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        show(found, make_console(), Path(bundle).name)
    return 1 if found.divergence else 0


def show(found: "Lossless", console: Console, name: str) -> None:
    """The report for people."""
    counts = f"{found.answers} answers to {found.requests} requests, {found.tokens} tokens"
    drafts = f"{found.drafted} drafted, {found.accepted} accepted"
    if found.divergence is None:
        console.print(f"{name}: no token differs; {counts}; {drafts}", soft_wrap=True)
        return
    at = found.divergence
    console.print(
        f"{name}: request {at.request} ({at.way}) differs at token {at.position}: plain {at.plain_token}, speculative "
        f"{at.speculative_token}, logit margin {at.margin:.2g}; {counts}",
        soft_wrap=True,
    )
    console.print("the rounds of that call:", style="dim")
    console.print(at.journal, style="dim", soft_wrap=True, markup=False)
