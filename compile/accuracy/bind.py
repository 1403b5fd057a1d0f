"""The engine's side of the packs while a bundle is built: how close it comes, and what it is held to from then on."""

from collections.abc import Mapping
from pathlib import Path

from ...engines.engine import Engine
from ...engines.manifest import EngineEntry, ModelEntry, PackEntry, TargetEntry
from .bounds import REST, make_entry
from .check import figures_of, judge_runs, run_pack
from .commands import make_readme
from .pack import FOLDER, SESSION, Pack, pack_path

_ANYTHING = PackEntry(FOLDER, {REST: 0.0}, 0.0, -1.0, 0.0)


def bind_packs(
    folder: Path, engines: Mapping[str, Engine], entries: Mapping[str, EngineEntry], model: ModelEntry, margin: float
) -> dict[str, PackEntry]:
    """Run the packs in a bundle's folder on its engines and give the bounds that follow. Raises EngineError."""
    packs = {}
    for part, entry in entries.items():
        for name in (part, SESSION) if part == "decoder" else (part,):
            reference, found, *_ = run_pack(name, Pack(folder, pack_path(name)), engines[part], model, entry)
            figures = figures_of(judge_runs(reference, found, _ANYTHING))
            packs[name] = make_entry(pack_path(name), figures, margin)
    return packs


def write_readme(folder: Path, target: str, build: TargetEntry) -> None:
    """Write the commands beside the packs."""
    (folder / FOLDER / "README.md").write_text(make_readme(target, build))
