"""`speceyes-compile ask`: one question to a bundle, answered on the terminal."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ...engines.errors import ImageError
from ...runtime.options import Options
from ...runtime.results import Result, Statistics
from ...runtime.speculation.statistics import SpeculationStatistics
from .tables import make_console

DEFAULTS = Options()
STAGES = {"process": "text and pixels", "vision": "image tiles", "prefill": "prompt", "decode": "answer"}


@click.command("ask")
@click.argument("bundle", type=click.Path())
@click.argument("question")
@click.option("--image", "images", type=click.Path(), multiple=True, help="A picture; may be given several times.")
@click.option("--system", help="A system message before the question.")
@click.option("--raw", is_flag=True, help="Send QUESTION as it stands, without the chat template.")
@click.option("--max-new-tokens", type=int, default=DEFAULTS.max_new_tokens, show_default=True)
@click.option(
    "--temperature", type=float, default=DEFAULTS.temperature, show_default=True, help="0 takes the likeliest token."
)
@click.option("--top-p", type=float, default=DEFAULTS.top_p, show_default=True)
@click.option("--top-k", type=int, default=DEFAULTS.top_k, show_default=True, help="0 keeps every token.")
@click.option("--repetition-penalty", type=float, default=DEFAULTS.repetition_penalty, show_default=True)
@click.option("--seed", type=int, default=DEFAULTS.seed, help="Makes a sampled answer repeatable.")
@click.option("--stop", multiple=True, default=DEFAULTS.stop, help="A text that ends the answer; may be repeated.")
@click.option("--settings", type=click.Path(), help="A YAML file with the sections speculation and memory.")
@click.option(
    "--speculate/--no-speculate", default=DEFAULTS.speculate, show_default=True, help="The tokens are the same."
)
@click.option("--target", help="One of the bundle's targets; the best that runs here by default.")
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use; all by default.")
@click.option("--stats", is_flag=True, help="Print the time of each stage.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when the answer is complete.")
def command(
    bundle: str,
    question: str,
    images: tuple[str, ...],
    system: str | None,
    raw: bool,
    settings: str | None,
    target: str | None,
    threads: int | None,
    stats: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Ask BUNDLE a QUESTION, about pictures or not, and stream the answer."""
    if raw and system:
        raise click.UsageError("--system needs the chat template; leave out --raw")
    Options.make(options)
    for image in images:
        if not Path(image).is_file():
            raise ImageError(f"image {image!r}: there is no such file")

    from ...runtime.session import load

    with load(bundle, target=target, threads=threads, settings=settings) as model:
        asked: dict[str, Any] = (
            {"prompt": question} if raw else {"messages": make_messages(question, system, len(images))}
        )
        stream = model.stream(**asked, images=images, **options)
        for piece in stream:
            if not as_json:
                print(piece, end="", flush=True)
        result = stream.result
    if as_json:
        print(json.dumps(as_plain(result)))
        return
    print(flush=True)
    console = make_console(stderr=True)
    console.print(summary(result), style="dim")
    if stats:
        for stage, seconds in result.stats.seconds.items():
            console.print(f"  {STAGES.get(stage, stage):16}{seconds * 1e3:9.1f} ms", style="dim")
        console.print(f"  {'cache':16}{result.stats.cache_bytes / 1e6:9.1f} MB", style="dim")
        if (speculation := result.stats.speculation) is not None:
            console.print(f"  {'speculation':16}{describe(speculation)}", style="dim", soft_wrap=True)


def describe(found: SpeculationStatistics) -> str:
    """What speculation did, in one line; tokens that the model would not have chosen are never left unsaid."""
    approximated = f", {found.approximated} of {found.emitted} tokens approximated" if found.approximated else ""
    return (
        f"{found.rounds} rounds, {found.tokens_per_round:.2f} tokens each; {found.accepted} of {found.drafted} drafted "
        f"tokens accepted{approximated}"
    )


def make_messages(question: str, system: str | None, images: int) -> list[dict[str, Any]]:
    """The conversation: an optional system turn, then the pictures and the question."""
    user: Any = question
    if images:
        user = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": question}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": user}]


def summary(result: Result) -> str:
    """Counts, first token and rate in one line."""
    stats: Statistics = result.stats
    images = f" ({stats.image_tokens} of images)" if stats.image_tokens else ""
    rate = f", {stats.tokens_per_second:.1f} tokens/s" if stats.tokens_per_second else ""
    approximated = stats.speculation.approximated if stats.speculation else 0
    warning = f"; {approximated} tokens approximated" if approximated else ""
    return (
        f"{stats.prompt_tokens} prompt tokens{images}, {stats.new_tokens} new, finished by {result.finish_reason}; "
        f"first token {stats.first_token_seconds:.2f} s{rate}{warning}"
    )


def as_plain(result: Result) -> dict[str, Any]:
    """The result as JSON values."""
    plain = asdict(result)
    plain["stats"] |= {
        "first_token_seconds": result.stats.first_token_seconds,
        "tokens_per_second": result.stats.tokens_per_second,
    }
    return plain
