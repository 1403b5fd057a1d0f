"""The pipeline: checkpoint → canonical graphs → engines → check → measure → sealed bundle."""

import hashlib
import importlib.metadata
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx_ir as ir
import yaml

from .. import __version__
from ..engines.bundle import Bundle, check_output, hash_file, seal, write_bundle
from ..engines.manifest import FileEntry, Manifest, ModelEntry, Provenance
from ..engines.schema import decode, encode
from ..engines.tensorrt_library import FLAVOURS
from ..runtime.processing.golden import IMAGE_FILE
from ..runtime.processing.processor import Processor
from ..runtime.speculation.settings import FILE as SETTINGS_FILE
from ..runtime.speculation.settings import read_settings
from .accuracy.bind import bind_packs, write_readme
from .accuracy.pack import Pack, pack_path
from .accuracy.record import Recorder
from .accuracy.sample import Sample, cut_prompt
from .check import Reference, check_decoder, check_vision, encode_tiles, golden_prompt, make_reference
from .checkpoint import Checkpoint, open_checkpoint
from .engine_set import EngineSet, Source, make_engine_set
from .export import export_decoder, export_vision, save_graph
from .measure import measure_decoder, measure_vision
from .plan import Plan, check_plan, make_plan
from .predictor.artifact import Artifact, read_artifact
from .predictor.export import STEP, compile_predictor
from .predictor.measure import measure_predictor
from .processing import write_processing
from .recipe import DecoderBounds, Recipe, dump_recipe
from .tensorrt.parts import TensorRtParts

EXPORTERS = {"decoder": export_decoder, "vision": export_vision}
COMPILER = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript")
CHECKPOINT_FILES = (".json", ".safetensors", ".jinja", ".txt", ".model")

Progress = Callable[[str, int, int], AbstractContextManager[object]]
"""Called with a stage's name, its number from 1, and how many there are; entered for as long as the stage takes."""


@dataclass(frozen=True)
class Build:
    """A finished build: the bundle, and the seconds of each stage in order."""

    bundle: Bundle
    seconds: dict[str, float]


def prepare(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], recipe: Recipe) -> tuple[Checkpoint, Plan]:
    """Find what can be found wrong before the long work.

    Raises CheckpointError, ResourceError, BundleError, PredictorError for a predictor of another checkpoint, or
    EngineError and LoweringError for a target that cannot be built here.
    """
    target = check_output(out)
    opened = open_checkpoint(os.fspath(checkpoint))
    read_settings(recipe.settings)
    if recipe.predictor is not None:
        read_artifact(recipe.predictor).check_target(hash_checkpoint(opened.folder), opened.source)
    for name in recipe.targets:
        if name in FLAVOURS:
            TensorRtParts(name, recipe.tensorrt).check(opened.head_dim)
    plan = make_plan(opened, recipe)
    check_plan(plan, target)
    return opened, plan


def build(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    progress: Progress = lambda name, number, total: nullcontext(),
) -> Build:
    """Compile a checkpoint (folder or hub id) into the bundle `out`; an interrupted build leaves nothing behind.

    Raises CheckpointError, ResourceError, ExportError, LoweringError, AccuracyError, or BundleError when `out` is
    something else than a bundle.
    """
    recipe = recipe or Recipe()
    opened, plan = prepare(checkpoint, out, recipe)
    with write_bundle(out) as folder:
        pipeline = _Pipeline(opened, plan, recipe, folder)
        stages, seconds = pipeline.stages(), {}
        for number, (name, work) in enumerate(stages, 1):
            began = time.perf_counter()
            with progress(name, number, len(stages)):
                work()
            seconds[name] = time.perf_counter() - began
    return Build(Bundle.open(out, verify=False), seconds)


class _Pipeline:
    """What one stage leaves for the next. Only one part's graph is held at a time."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan, recipe: Recipe, folder: Path) -> None:
        self.checkpoint, self.plan, self.recipe, self.folder = checkpoint, plan, recipe, folder
        self.sets = [make_engine_set(name, recipe, folder) for name in recipe.targets]
        self.running = [each for each in self.sets if each.runs_here]
        # The range audit of fp16 engines runs on the packs' inputs.
        self.records = recipe.accuracy.enabled or any(name in FLAVOURS for name in recipe.targets)
        self.graph: ir.Model | None = None
        self.reference: Reference | None = None
        self.predictor: Artifact | None = None
        self.recorder: Recorder | None = None

    def stages(self) -> list[tuple[str, Callable[[], None]]]:
        """Names and work, in order."""
        stages: list[tuple[str, Callable[[], None]]] = [("load", self.load), ("processing", self.write_processing)]
        for part in self.plan.parts:
            stages.append((f"export {part}", partial(self.export, part)))
            if self.records:
                stages.append((f"record {part}", partial(self.record, part)))
            stages += [(self._name("lower", part, each), partial(self.lower, part, each)) for each in self.sets]
        if self.recipe.predictor is not None:
            stages.append(("predictor", self.compile_predictor))
        stages.append(("open engines", self.open_engines))
        if self.recipe.check.enabled and self.running:
            stages.append(("reference", self.make_reference))
            stages += self._of_each("check", self.check)
        if self.recipe.accuracy.enabled:
            stages.append(("accuracy packs", self.bind_packs))
        if self.recipe.measure.enabled:
            stages += self._of_each("measure", self.measure)
            if self.recipe.predictor is not None:
                stages += [
                    (self._name("measure", STEP, each), partial(self.measure_predictor, each)) for each in self.running
                ]
        return [*stages, ("seal", self.seal)]

    def _of_each(self, verb: str, work: Callable[[str, EngineSet], None]) -> list[tuple[str, Callable[[], None]]]:
        """A stage for every part of every target that runs here."""
        pairs = [(part, each) for each in self.running for part in self.plan.parts]
        return [(self._name(verb, part, each), partial(work, part, each)) for part, each in pairs]

    def _name(self, verb: str, part: str, engines: EngineSet) -> str:
        return f"{verb} {part}" if len(self.sets) == 1 else f"{verb} {part}, {engines.name}"

    def load(self) -> None:
        self.checkpoint.model  # noqa: B018 - loads when first read
        self.model = decode(
            ModelEntry,
            {
                **self.checkpoint.describe(),
                "architecture": type(self.checkpoint.model).__name__,
                "parameters": sum(part.parameters for part in self.plan.parts.values()),
            },
            "model",
        )

    def export(self, part: str) -> None:
        self.graph = EXPORTERS[part](self.checkpoint)
        if self.recipe.keep_graphs:
            save_graph(self.graph, self.folder / "graphs" / f"{part}.onnx")

    def record(self, part: str) -> None:
        assert self.graph is not None and self.recorder is not None
        self.recorder.record(part, self.graph)

    def lower(self, part: str, engines: EngineSet) -> None:
        assert self.graph is not None
        self._add(part, self.graph, self.plan.parts[part].parameters, engines)
        if engines is self.sets[-1]:
            self.graph = None

    def _add(self, part: str, graph: ir.Model, parameters: int, engines: EngineSet, turns: int = 0) -> None:
        """Lowering changes the graph: all but the last set take a copy, which shares the weights."""
        own = graph if engines is self.sets[-1] else graph.clone()
        feeds = Pack(self.folder, pack_path(part)).feeds() if engines.name in FLAVOURS else ()
        tower = None
        if part == "vision" and engines.name in FLAVOURS and self.recipe.tensorrt.builder == "torch-tensorrt":
            tower = self.checkpoint.family.vision_part(self.checkpoint.model)
        engines.add(part, Source(own, parameters, feeds, turns, tower), self.model)

    def write_processing(self) -> None:
        write_processing(self.checkpoint.folder, self.folder)
        (self.folder / "recipe.yaml").write_text(dump_recipe(self.recipe))
        if self.recipe.settings is not None:
            settings = yaml.safe_dump(encode(read_settings(self.recipe.settings)), sort_keys=False)
            (self.folder / SETTINGS_FILE).write_text(settings)
        images = [self.folder / IMAGE_FILE] if "vision" in self.plan.parts else []
        self.prompt = golden_prompt(Processor.load(self.folder), images)
        if self.records:
            prompt = cut_prompt(self.prompt)
            features = encode_tiles(self.checkpoint, prompt.tiles)
            sample = Sample(prompt, features, prompt.tiles[-1] if prompt.tiles else None)
            self.recorder = Recorder(self.folder, sample, self.recipe.accuracy.steps)

    def compile_predictor(self) -> None:
        assert self.recipe.predictor is not None
        self.predictor = read_artifact(self.recipe.predictor)
        tokenizer = hash_file(self.folder / "tokenizer" / "tokenizer.json")
        self.predictor.check_tokenizer(tokenizer, self.checkpoint.source)
        for part, graph, parameters in compile_predictor(self.predictor, self.checkpoint):
            if self.recorder is not None:
                self.recorder.record(part, graph)
            for engines in self.sets:
                self._add(part, graph, parameters, engines, self.predictor.entry.window)

    def open_engines(self) -> None:
        for engines in self.sets:
            engines.open()

    def make_reference(self) -> None:
        self.reference = make_reference(self.checkpoint, self.prompt, self.recipe.check.steps)

    def check(self, part: str, engines: EngineSet) -> None:
        assert self.reference is not None
        engine, entry = engines.engines[part], engines.entries[part]
        bounds = self.recipe.check.bounds(part, entry.precision, self.recipe.kv)
        if isinstance(bounds, DecoderBounds):
            figures = check_decoder(engine, self.model, entry.min_width, self.reference, bounds)
        else:
            figures = check_vision(engine, self.model, self.reference, bounds)
        engines.note(part, accuracy=figures)

    def bind_packs(self) -> None:
        margin = self.recipe.accuracy.margin
        for each in self.running:
            each.packs = bind_packs(self.folder, each.engines, each.entries, self.model, margin)
        first = next((each for each in self.sets if each.packs), self.sets[0])
        write_readme(self.folder, first.name, first.describe())

    def measure(self, part: str, engines: EngineSet) -> None:
        engine, measure = engines.engines[part], self.recipe.measure
        if part == "decoder":
            engines.note(part, cost_ms=measure_decoder(engine, self.model, measure))
        else:
            engines.note(part, cost_ms=measure_vision(engine, self.model, self.prompt.tiles[0], measure))

    def measure_predictor(self, engines: EngineSet) -> None:
        engines.note(STEP, cost_ms=measure_predictor(engines.engines[STEP], self.recipe.measure))

    def seal(self) -> None:
        for engines in self.sets:
            engines.close()
        seal(self.folder, self._make_manifest)

    def _make_manifest(self, files: tuple[FileEntry, ...]) -> Manifest:
        hashes = {entry.path: entry.sha256 for entry in files}
        versions = {"speceyes": __version__, **{name: importlib.metadata.version(name) for name in COMPILER}}
        source = self.checkpoint.source
        return Manifest(
            model=self.model,
            provenance=Provenance(
                checkpoint=source if not Path(source).exists() else self.checkpoint.folder.resolve().name,
                checkpoint_sha256=hash_checkpoint(self.checkpoint.folder),
                versions=versions,
            ),
            processing_sha256=hashes["processing.json"],
            tokenizer_sha256=hashes["tokenizer/tokenizer.json"],
            targets={engines.name: engines.describe() for engines in self.sets},
            files=files,
            predictor=self.predictor.entry if self.predictor is not None else None,
        )


def hash_checkpoint(folder: Path) -> str:
    """SHA-256 over the names and hashes of a checkpoint's configuration, tokenizer and weights."""
    files = sorted(path for path in folder.iterdir() if path.suffix in CHECKPOINT_FILES)
    return hashlib.sha256("".join(f"{path.name} {hash_file(path)}\n" for path in files).encode()).hexdigest()
