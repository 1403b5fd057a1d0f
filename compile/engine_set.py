"""The engines of one target while a bundle is built."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from ..engines.engine import Array, Engine
from ..engines.manifest import EngineEntry, ModelEntry, PackEntry, TargetEntry
from ..engines.target import find_target
from ..engines.tensorrt_library import FLAVOURS
from ..runtime.threads import choose_threads
from .export import save_graph
from .families.family import VisionPart
from .lowering import MIN_WIDTH, OPTIONS, lower, seams
from .predictor.export import MEMORY
from .recipe import Recipe
from .tensorrt.parts import TensorRtParts


@dataclass(frozen=True)
class Source:
    """A part's canonical graph, which is used up; its weights in the model; `feeds`: inputs to see its ranges with.

    `turns`: tokens of a predictor's draft. `tower`: the vision part as it is traced.
    """

    graph: ir.Model
    parameters: int
    feeds: Iterable[Mapping[str, Array]] = ()
    turns: int = 0
    tower: VisionPart | None = None


class EngineSet:
    """Engines in the bundle's `folder`, what the manifest says of them and, where they run here, the loaded ones."""

    def __init__(self, name: str, recipe: Recipe, folder: Path) -> None:
        self.name, self.recipe, self.folder = name, recipe, folder
        self.target = find_target(name)
        self.entries: dict[str, EngineEntry] = {}
        self.engines: dict[str, Engine] = {}
        self.packs: dict[str, PackEntry] = {}

    @property
    def runs_here(self) -> bool:
        """Whether this machine can run the engines."""
        return True

    def add(self, part: str, source: Source, model: ModelEntry) -> None:
        """Make a part's engine. Raises LoweringError, or EngineError where a builder refuses."""
        precision = "fp32" if part == MEMORY else getattr(self.recipe.precision, part)
        lower(source.graph, part, precision, self.recipe.kv)
        path = save_graph(source.graph, self.folder / "engines" / self.name / f"{part}.onnx")
        self.entries[part] = EngineEntry(
            path=path.relative_to(self.folder).as_posix(),
            precision=precision,
            inputs=(),
            outputs=(),
            parameters=source.parameters,
            min_width=MIN_WIDTH.get(part, 1),
            seams=seams(model.head_dim, self.recipe.kv) if part == "decoder" else (),
            weight_bytes=path.with_name(f"{path.name}.data").stat().st_size,
            options=dict(OPTIONS.get(part, {})),
        )

    def open(self) -> None:
        """Load the engines, where they run."""
        for part, entry in self.entries.items() if self.runs_here else ():
            engine = self.target.load(self.folder / entry.path, choose_threads(part, entry, None), entry)
            self.engines[part] = engine
            self.note(part, inputs=tuple(engine.inputs.values()), outputs=tuple(engine.outputs.values()))

    def close(self) -> None:
        """Free them."""
        for engine in self.engines.values():
            engine.close()

    def note(self, part: str, **values: object) -> None:
        """Change what the manifest says of a part."""
        self.entries[part] = replace(self.entries[part], **values)  # type: ignore[arg-type]

    def describe(self) -> TargetEntry:
        """The target in the manifest."""
        versions = {"onnxruntime": importlib.metadata.version("onnxruntime")}
        return TargetEntry(versions=versions, engines=self.entries, packs=self.packs)


class TensorRtSet(EngineSet):
    """The same for tensorrt and tensorrt-rtx. Raises EngineError or LoweringError when they cannot be built here."""

    def __init__(self, name: str, recipe: Recipe, folder: Path) -> None:
        super().__init__(name, recipe, folder)
        self._parts = TensorRtParts(name, recipe.tensorrt)

    @property
    def runs_here(self) -> bool:
        return self._parts.runs_here()

    def add(self, part: str, source: Source, model: ModelEntry) -> None:
        self.entries[part] = self._parts.build(
            part, source.graph, model, source.parameters, source.feeds, source.turns, self.folder, source.tower
        )

    def describe(self) -> TargetEntry:
        versions = {self._parts.library.__name__: self._parts.version}
        return TargetEntry(versions, self.entries, self.packs, tensorrt=self._parts.entry())


def make_engine_set(name: str, recipe: Recipe, folder: Path) -> EngineSet:
    """The set of a target. Raises EngineError or LoweringError."""
    return (TensorRtSet if name in FLAVOURS else EngineSet)(name, recipe, folder)
