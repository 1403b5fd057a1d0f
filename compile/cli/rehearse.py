"""`speceyes-compile rehearse`: run every shape that requests will need, and keep in the bundle what became of it."""

import json
from dataclasses import asdict, replace

import click
from rich.progress import Progress

from ...engines.bundle import Bundle, write_manifest
from ...engines.manifest import RehearsalEntry
from .tables import make_console


@click.command("rehearse")
@click.argument("bundle", type=click.Path())
@click.option("--target", help="One of the bundle's targets; the best that runs here by default.")
@click.option(
    "--batch", "batches", type=click.IntRange(1, 64), multiple=True, default=(1,), help="Requests at once; repeatable."
)
@click.option("--tokens", type=click.IntRange(1), default=1024, show_default=True, help="Longest prompt and answer.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
def command(bundle: str, target: str | None, batches: tuple[int, ...], tokens: int, as_json: bool) -> int:
    """Run every width and number of rows that decoding with BUNDLE can come to, and compare repeated runs.

    On a target with graphs each is captured, and the first replay compared with a run that was not. The result is
    written into the manifest. Exit code 1 when runs differ or a capture was refused.
    """
    from ...runtime.session import load

    with load(bundle, target=target) as model, Progress(console=make_console(stderr=True), transient=True) as bar:
        task = bar.add_task("rehearsing", total=None)
        found = model.rehearse(batches, tokens, lambda done, total: bar.update(task, completed=done, total=total))
        name, device, has_graphs = model.target, model.device, bool(model.graphs())
    entry = RehearsalEntry(device, len(found.shapes), found.captured, found.refused, found.differing)
    opened = Bundle.open(bundle, verify=False)
    builds = opened.manifest.targets
    write_manifest(
        opened.path, replace(opened.manifest, targets={**builds, name: replace(builds[name], rehearsal=entry)})
    )
    if as_json:
        print(json.dumps({"target": name, **asdict(entry)}))
    else:
        console = make_console()
        captured = f"{entry.captured} captured" if has_graphs else "the target has no graphs"
        console.print(f"{name} on {device}: {entry.shapes} shapes, {captured}", soft_wrap=True)
        for shape, why in entry.refused.items():
            console.print(f"  {shape}: refused: {why}", soft_wrap=True, markup=False)
        for shape in entry.differing:
            console.print(f"  {shape}: runs differ", soft_wrap=True)
    return 1 if entry.refused or entry.differing else 0
