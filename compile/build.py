"""The pipeline: checkpoint → canonical graphs → engines → check → measure → sealed bundle."""

import hashlib
import importlib.metadata
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx_ir as ir
import yaml

from .. import __version__
from ..engines.bundle import Bundle, check_output, hash_file, seal, write_bundle
from ..engines.engine import Engine
from ..engines.manifest import EngineEntry, FileEntry, Manifest, ModelEntry, PackEntry, Provenance, TargetEntry
from ..engines.schema import decode, encode
from ..engines.target import find_target
from ..runtime.processing.golden import IMAGE_FILE
from ..runtime.processing.processor import Processor
from ..runtime.speculation.settings import FILE as SETTINGS_FILE
from ..runtime.speculation.settings import read_settings
from ..runtime.threads import choose_threads
from .accuracy.bind import bind_packs, write_readme
from .accuracy.record import Recorder
from .accuracy.sample import Sample, cut_prompt
from .check import Reference, check_decoder, check_vision, encode_tiles, golden_prompt, make_reference
from .checkpoint import Checkpoint, open_checkpoint
from .export import export_decoder, export_vision, save_graph
from .lowering import MIN_WIDTH, OPTIONS, lower, seams
from .measure import measure_decoder, measure_vision
from .plan import Plan, check_plan, make_plan
from .predictor.artifact import Artifact, read_artifact
from .predictor.export import STEP, compile_predictor
from .predictor.measure import measure_predictor
from .processing import write_processing
from .recipe import Recipe, dump_recipe

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

    Raises CheckpointError, ResourceError, BundleError, or PredictorError for a predictor of another checkpoint.
    """
    target = check_output(out)
    opened = open_checkpoint(os.fspath(checkpoint))
    read_settings(recipe.settings)
    if recipe.predictor is not None:
        read_artifact(recipe.predictor).check_target(hash_checkpoint(opened.folder), opened.source)
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
        self.target = find_target(recipe.target)
        self.graph: ir.Model | None = None
        self.entries: dict[str, EngineEntry] = {}
        self.engines: dict[str, Engine] = {}
        self.reference: Reference | None = None
        self.predictor: Artifact | None = None
        self.recorder: Recorder | None = None
        self.packs: dict[str, PackEntry] = {}

    def stages(self) -> list[tuple[str, Callable[[], None]]]:
        """Names and work, in order."""
        stages: list[tuple[str, Callable[[], None]]] = [("load", self.load), ("processing", self.write_processing)]
        for part in self.plan.parts:
            stages.append((f"export {part}", partial(self.export, part)))
            if self.recipe.accuracy.enabled:
                stages.append((f"record {part}", partial(self.record, part)))
            stages.append((f"lower {part}", partial(self.lower, part)))
        if self.recipe.predictor is not None:
            stages.append(("predictor", self.compile_predictor))
        stages.append(("open engines", self.open_engines))
        if self.recipe.check.enabled:
            stages.append(("reference", self.make_reference))
            stages += [(f"check {part}", partial(self.check, part)) for part in self.plan.parts]
        if self.recipe.accuracy.enabled:
            stages.append(("accuracy packs", self.bind_packs))
        if self.recipe.measure.enabled:
            stages += [(f"measure {part}", partial(self.measure, part)) for part in self.plan.parts]
            if self.recipe.predictor is not None:
                stages.append(("measure predictor", self.measure_predictor))
        return [*stages, ("seal", self.seal)]

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

    def lower(self, part: str) -> None:
        assert self.graph is not None
        precision = self.plan.parts[part].precision
        graph, self.graph = self.graph, None
        lower(graph, part, precision)
        self._store(part, graph, precision, self.plan.parts[part].parameters)

    def _store(self, part: str, graph: ir.Model, precision: str, parameters: int) -> None:
        path = save_graph(graph, self.folder / "engines" / self.target.name / f"{part}.onnx")
        self.entries[part] = EngineEntry(
            path=path.relative_to(self.folder).as_posix(),
            precision=precision,
            inputs=(),
            outputs=(),
            parameters=parameters,
            min_width=MIN_WIDTH.get(part, 1),
            seams=seams(self.model.head_dim) if part == "decoder" else (),
            weight_bytes=path.with_name(f"{path.name}.data").stat().st_size,
            options=dict(OPTIONS.get(part, {})),
        )

    def write_processing(self) -> None:
        write_processing(self.checkpoint.folder, self.folder)
        (self.folder / "recipe.yaml").write_text(dump_recipe(self.recipe))
        if self.recipe.settings is not None:
            settings = yaml.safe_dump(encode(read_settings(self.recipe.settings)), sort_keys=False)
            (self.folder / SETTINGS_FILE).write_text(settings)
        images = [self.folder / IMAGE_FILE] if "vision" in self.plan.parts else []
        self.prompt = golden_prompt(Processor.load(self.folder), images)
        if self.recipe.accuracy.enabled:
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
            precision = self.recipe.precision.predictor if part == STEP else "fp32"
            if self.recorder is not None:
                self.recorder.record(part, graph)
            lower(graph, part, precision)
            self._store(part, graph, precision, parameters)

    def open_engines(self) -> None:
        for part, entry in self.entries.items():
            engine = self.target.load(self.folder / entry.path, choose_threads(part, entry, None), entry)
            self.engines[part] = engine
            self._note(part, inputs=tuple(engine.inputs.values()), outputs=tuple(engine.outputs.values()))

    def make_reference(self) -> None:
        self.reference = make_reference(self.checkpoint, self.prompt, self.recipe.check.steps)

    def check(self, part: str) -> None:
        assert self.reference is not None
        engine, entry = self.engines[part], self.entries[part]
        bounds = getattr(getattr(self.recipe.check, part), entry.precision)
        if part == "decoder":
            figures = check_decoder(engine, self.model, entry.min_width, self.reference, bounds)
        else:
            figures = check_vision(engine, self.model, self.reference, bounds)
        self._note(part, accuracy=figures)

    def bind_packs(self) -> None:
        self.packs = bind_packs(self.folder, self.engines, self.entries, self.model, self.recipe.accuracy.margin)
        write_readme(self.folder, self.target.name, self._target_entry())

    def measure(self, part: str) -> None:
        engine, measure = self.engines[part], self.recipe.measure
        if part == "decoder":
            self._note(part, cost_ms=measure_decoder(engine, self.model, measure))
        else:
            self._note(part, cost_ms=measure_vision(engine, self.model, self.prompt.tiles[0], measure))

    def measure_predictor(self) -> None:
        self._note(STEP, cost_ms=measure_predictor(self.engines[STEP], self.recipe.measure))

    def seal(self) -> None:
        for engine in self.engines.values():
            engine.close()
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
            targets={self.target.name: self._target_entry()},
            files=files,
            predictor=self.predictor.entry if self.predictor is not None else None,
        )

    def _target_entry(self) -> TargetEntry:
        versions = {"onnxruntime": importlib.metadata.version("onnxruntime")}
        return TargetEntry(versions=versions, engines=self.entries, packs=self.packs)

    def _note(self, part: str, **values: object) -> None:
        self.entries[part] = replace(self.entries[part], **values)  # type: ignore[arg-type]


def hash_checkpoint(folder: Path) -> str:
    """SHA-256 over the names and hashes of a checkpoint's configuration, tokenizer and weights."""
    files = sorted(path for path in folder.iterdir() if path.suffix in CHECKPOINT_FILES)
    return hashlib.sha256("".join(f"{path.name} {hash_file(path)}\n" for path in files).encode()).hexdigest()
