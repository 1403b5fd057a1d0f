"""`speceyes-compile inspect`: what a bundle holds, after checking its files."""

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ...engines.bundle import Bundle
from ...engines.engine import TensorSpec
from ...engines.manifest import EngineEntry
from ...engines.schema import encode
from .tables import costs_table, engines_table, make_console, megabytes, plain_table


@click.command("inspect")
@click.argument("bundle", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the manifest and totals as one JSON object.")
def command(bundle: str, as_json: bool) -> None:
    """Check every file of BUNDLE and show its engines, sizes, accuracy and costs."""
    opened = Bundle.open(bundle)
    if as_json:
        print(json.dumps(describe(opened)))
        return
    show(opened, make_console())


def describe(bundle: Bundle) -> dict[str, Any]:
    """The bundle as JSON values; its files were verified when it was opened."""
    return {
        "path": str(bundle.path),
        "bytes": bundle.size,
        "files_verified": len(bundle.manifest.files),
        "manifest": encode(bundle.manifest),
    }


def show(bundle: Bundle, console: Console) -> None:
    """Print the bundle for people."""
    manifest, model, origin = bundle.manifest, bundle.manifest.model, bundle.manifest.provenance
    console.print(f"{bundle.path.name}: {megabytes(bundle.size)}, {len(manifest.files)} files verified", style="bold")
    console.print(
        f"{model.architecture} ({model.family}), {model.parameters / 1e6:.1f} M parameters: {model.layers} layers of "
        f"{model.hidden}, heads {model.heads}/{model.kv_heads} of {model.head_dim}, vocabulary {model.vocabulary}, "
        f"context {model.context_length}"
    )
    console.print(f"from {origin.checkpoint} (SHA-256 {origin.checkpoint_sha256[:12]}…), {versions(origin.versions)}")
    if (predictor := manifest.predictor) is not None:
        shares = ", ".join(f"{share:.2f}" for share in predictor.acceptance)
        console.print(
            f"predictor: {predictor.own_parameters / 1e6:.1f} M parameters of its own, {predictor.slice} tokens, "
            f"window {predictor.window}; accepted by position {shares}; calibration error {predictor.ece:.3f}"
        )
    for target, build in manifest.targets.items():
        console.print(f"\n{target}: {versions(build.versions)}", style="bold")
        for part, engine in build.engines.items():
            console.print(tensors_table(part, engine))
        console.print()
        console.print(engines_table(build.engines))
        if any(engine.cost_ms for engine in build.engines.values()):
            console.print(costs_table(build.engines))
    files = plain_table("file", "bytes", "SHA-256")
    for entry in manifest.files:
        files.add_row(entry.path, f"{entry.size:,}", entry.sha256[:16] + "…")
    console.print()
    console.print(files)


def tensors_table(part: str, engine: EngineEntry) -> Table:
    """Inputs and outputs; the cache's tensors, one pair per layer, take one line."""
    table = plain_table("", "name", "type", "shape")
    table.title, table.title_justify = f"{part}  {engine.path}", "left"
    for kind, tensors in (("in", engine.inputs), ("out", engine.outputs)):
        for name, tensor in grouped(tensors).items():
            table.add_row(kind, name, tensor.dtype, " × ".join(map(str, tensor.shape)), style="dim")
    return table


def grouped(tensors: tuple[TensorSpec, ...]) -> dict[str, TensorSpec]:
    """Tensors by name, those that differ in a trailing layer number as one: `cache_k.0 … 29`."""
    families: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        stem, _, layer = tensor.name.rpartition(".")
        families.setdefault(stem if layer.isdigit() else tensor.name, []).append(tensor)
    return {
        f"{stem}.0 … {len(members) - 1}" if len(members) > 1 else members[0].name: members[0]
        for stem, members in families.items()
    }


def versions(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
