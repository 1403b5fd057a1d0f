"""The parts of a bundle for one TensorRT target: lowered, checked, built, and what the manifest says of them."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import onnx_ir as ir

from ...engines import cuda
from ...engines.engine import Array, TensorSpec
from ...engines.manifest import EngineEntry, ModelEntry, TensorRtEntry
from ...engines.tensorrt_library import FLAVOURS, import_library
from ...runtime.decoder import CAPACITY_STEP, PREFILL_CHUNK
from ..export import save_graph
from ..families.family import VisionPart
from ..lowering.tensorrt import lower_for_tensorrt
from ..lowering.tensorrt_loop import write_out_turns
from .builder import build_again, build_engine, write_engine
from .options import BuilderOptions
from .preflight import check_graph, check_head_dim, check_machine
from .ranges import audit, find_lifted
from .shapes import Range, make_profile
from .torch_route import convert, import_torch_tensorrt, trace_tower

SUFFIX = ".engine"
MAX_BATCH = 4

_NUMPY = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "uint16", ir.DataType.FLOAT: "float32"}
"""numpy has no bfloat16: such tensors stay on the device, where only their size counts."""


class TensorRtParts:
    """Builds the engines of one target into a bundle's folder.

    `target`: tensorrt or tensorrt-rtx. Raises EngineError where its package is missing or there is no GPU to build for,
    LoweringError for what the preflight refuses.
    """

    def __init__(self, target: str, options: BuilderOptions) -> None:
        self.target, self.options = target, options
        self.library: ModuleType = import_library(target)
        self.capabilities = options.compute_capability if FLAVOURS[target].capabilities else ()
        self.device = cuda.open_device() if not self.capabilities else None
        precisions = (options.precision.decoder, options.precision.vision, options.precision.predictor)
        check_machine(target, self.version, self.built_for, precisions)
        self._torch = import_torch_tensorrt(target) if options.builder == "torch-tensorrt" else None
        # Building rewrites the cache: what the builds began with is known only now.
        self._timing_cache = None if options.timing_cache is None else _hash(Path(options.timing_cache))
        self._hashes: dict[str, str] = {}
        self._deterministic: dict[str, bool] = {}
        self._lifted: dict[str, int] = {}

    def check(self, head_dim: int) -> None:
        """What can be known of a decoder before it is exported. Raises LoweringError."""
        check_head_dim("decoder", head_dim)

    @property
    def version(self) -> str:
        return str(self.library.__version__)

    @property
    def built_for(self) -> tuple[int, ...]:
        """The compute capabilities that the engines run on."""
        return self.capabilities or ((self.device.compute_capability,) if self.device is not None else ())

    def runs_here(self) -> bool:
        """Whether this machine has a GPU that the engines are built for."""
        return cuda.refusal() is None and cuda.open_device().compute_capability in self.built_for

    def build(
        self,
        part: str,
        graph: ir.Model,
        model: ModelEntry,
        parameters: int,
        feeds: Iterable[Mapping[str, Array]],
        turns: int,
        folder: Path,
        tower: VisionPart | None = None,
    ) -> EngineEntry:
        """Lower a canonical graph in place and build its engine.

        `feeds`: inputs for the range audit. `turns`: tokens of a predictor's draft. `folder`: the bundle's.
        `tower`: the vision part itself, for Torch-TensorRT.
        """
        options, precision = self.options, precision_of(self.options, part)
        if part.startswith("predictor"):
            write_out_turns(graph, turns)
        lifted = find_lifted(audit(graph, feeds, folder), precision) if precision.startswith("fp16") else ()
        capacity = min(options.capacity, -(-(model.context_length + options.width) // CAPACITY_STEP) * CAPACITY_STEP)
        lower_for_tensorrt(graph, part, precision, capacity=capacity, turns=turns, lifted=lifted)
        check_graph(part, graph.graph)
        inputs, outputs = (tuple(map(_spec, values)) for values in (graph.graph.inputs, graph.graph.outputs))
        profile = make_profile(inputs, ranges_of(part, options, model), options.shapes)
        out = folder / "engines" / self.target / f"{part}{SUFFIX}"
        with tempfile.TemporaryDirectory(dir=folder, prefix=".lowered-") as scratch:
            path = save_graph(graph, Path(scratch) / f"{part}.onnx")
            weight_bytes = path.with_name(f"{path.name}.data").stat().st_size
            if self._torch is not None and tower is not None:
                built = write_engine(out, convert(self._torch, trace_tower(tower, precision), options))
            else:
                built = build_engine(path, out, self.library, options, profile, self.capabilities)
            if options.build_twice and tower is None:
                again = build_again(path, self.library, options, profile, self.capabilities)
                self._deterministic[part] = again == built.sha256
        self._hashes[part], self._lifted[part] = built.sha256, len(lifted)
        return EngineEntry(
            path=out.relative_to(folder).as_posix(),
            precision=precision,
            inputs=inputs,
            outputs=outputs,
            parameters=parameters,
            min_width=options.width if part == "decoder" else 1,
            max_width=options.width if part == "decoder" else None,
            weight_bytes=weight_bytes,
        )

    def entry(self) -> TensorRtEntry:
        """What the manifest says of the target."""
        return TensorRtEntry(
            flavour=self.target,
            version=self.version,
            compute_capabilities=self.built_for,
            engines_sha256=dict(self._hashes),
            deterministic=dict(self._deterministic),
            lifted=dict(self._lifted),
            driver=None if self.device is None else str(self.device.driver_version),
            timing_cache_sha256=self._timing_cache,
        )


def precision_of(options: BuilderOptions, part: str) -> str:
    """The precision of a part; a predictor's two graphs have one."""
    return str(getattr(options.precision, "predictor" if part.startswith("predictor") else part))


def ranges_of(part: str, options: BuilderOptions, model: ModelEntry) -> dict[str, Range]:
    """What the dimensions of a part's inputs may be, as the runtime uses them.

    A decoder takes up to MAX_BATCH rows, and prompts in pieces of PREFILL_CHUNK tokens. Tiles are encoded one by one.
    """
    features = min(model.context_length, options.capacity)
    if part == "decoder":
        rows = MAX_BATCH * PREFILL_CHUNK
        return {
            "batch": (1, 1, MAX_BATCH),
            "width": (1, options.width, PREFILL_CHUNK),
            "rows": (1, options.width, rows),
            "features": (1, min(64, features), features),
        }
    if part == "vision":
        return {"tiles": (1, 1, 1), "patches": (16, min(1024, 4 * features), 4 * features)}
    return {"rows": (1, 1, MAX_BATCH), "features": (1, min(64, features), features)}


def _spec(value: ir.Value) -> TensorSpec:
    assert value.dtype is not None and value.shape is not None
    shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return TensorSpec(str(value.name), _NUMPY.get(value.dtype, value.dtype.name.lower()), shape)


def _hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
