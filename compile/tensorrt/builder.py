"""From an ONNX file to an engine: parse, profile, build."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ...engines.errors import EngineError
from ...engines.files import whole_file
from .options import BuilderOptions

Profile = Mapping[str, tuple[tuple[int, ...], ...]]

FATAL = ("Unused Input", "is unused or used only at compile-time")
"""Warnings that mean that an engine would not compute what the graph says."""

_MIB = 1 << 20


@dataclass(frozen=True)
class Built:
    """An engine file: its SHA-256 and its size in bytes."""

    sha256: str
    size: int


def build_engine(
    graph: Path, out: Path, library: ModuleType, options: BuilderOptions, profile: Profile, capabilities: Sequence[int]
) -> Built:
    """Build the ONNX file `graph` with `tensorrt` or `tensorrt_rtx` and write the engine to `out`.

    `capabilities`: compute capabilities to build for; none for the GPU at hand. Raises EngineError with TensorRT's own
    words, naming the node where it is known; nothing half-written is left.
    """
    return write_engine(out, _build(graph, library, options, profile, capabilities))


def write_engine(out: Path, data: bytes | memoryview) -> Built:
    """Write a serialised engine; nothing half-written is left."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(out) as partial:
        partial.write_bytes(data)
    return Built(hashlib.sha256(data).hexdigest(), len(data))


def build_again(
    graph: Path, library: ModuleType, options: BuilderOptions, profile: Profile, capabilities: Sequence[int]
) -> str:
    """SHA-256 of the engine that the same build gives once more."""
    return hashlib.sha256(_build(graph, library, options, profile, capabilities)).hexdigest()


def _build(
    graph: Path, library: ModuleType, options: BuilderOptions, profile: Profile, capabilities: Sequence[int]
) -> memoryview:
    messages = _collect_messages(library)
    builder = library.Builder(messages)
    network = builder.create_network(_flags(library))
    parser = library.OnnxParser(network, messages)
    if not parser.parse_from_file(str(graph)):
        raise EngineError(f"{graph.name}: TensorRT {library.__version__} cannot read it: {_first_error(parser)}")
    _refuse(graph, messages)
    config = builder.create_builder_config()
    _configure(config, library, options, capabilities)
    cache = _read_timing_cache(config, library, options)
    _add_profile(builder, config, network, profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise EngineError(f"{graph.name}: TensorRT {library.__version__} cannot build it: {messages.first_error()}")
    _refuse(graph, messages)
    if cache is not None and options.timing_cache is not None:
        with whole_file(Path(options.timing_cache)) as partial:
            partial.write_bytes(memoryview(cache.serialize()))
    return memoryview(engine)


def _flags(library: ModuleType) -> int:
    """Networks are strongly typed; from TensorRT 11 on there are no others."""
    flag = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _configure(config: Any, library: ModuleType, options: BuilderOptions, capabilities: Sequence[int]) -> None:
    config.builder_optimization_level = options.builder_optimization_level
    config.profiling_verbosity = getattr(library.ProfilingVerbosity, options.profiling_verbosity.upper())
    if options.workspace is not None:
        config.set_memory_pool_limit(library.MemoryPoolType.WORKSPACE, options.workspace * _MIB)
    if capabilities:
        config.num_compute_capabilities = len(capabilities)
        for place, capability in enumerate(capabilities):
            config.set_compute_capability(getattr(library.ComputeCapability, f"SM{capability}"), place)


def _read_timing_cache(config: Any, library: ModuleType, options: BuilderOptions) -> Any:
    """The timing cache in use. TensorRT for RTX times nothing while it builds and has none."""
    if options.timing_cache is None or hasattr(library, "ComputeCapability"):
        return None
    path = Path(options.timing_cache)
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if not config.set_timing_cache(cache, ignore_mismatch=False):
        raise EngineError(f"timing cache {path}: it belongs to another TensorRT or GPU; delete it or name another file")
    return cache


def _add_profile(builder: Any, config: Any, network: Any, profile: Profile) -> None:
    free = [tensor.name for tensor in map(network.get_input, range(network.num_inputs)) if -1 in tuple(tensor.shape)]
    if missing := [name for name in free if name not in profile]:
        raise EngineError(f"{missing[0]}: its shape is free and no profile has it")
    if not free:
        return
    bounds = builder.create_optimization_profile()
    for name in free:
        bounds.set_shape(name, *profile[name])
    if config.add_optimization_profile(bounds) < 0:
        raise EngineError(f"shapes: TensorRT refused the profile {dict(profile)}")


def _first_error(parser: Any) -> str:
    if not parser.num_errors:
        return "no reason given"
    fault = parser.get_error(0)
    reason = " ".join(str(fault.desc()).split())
    return f"node {fault.node_name()!r} ({fault.node_operator()}): {reason}" if fault.node_name() else reason


def _refuse(graph: Path, messages: Any) -> None:
    """Raise EngineError for a warning that is none."""
    for text in messages.warnings:
        if any(phrase in text for phrase in FATAL):
            raise EngineError(f"{graph.name}: TensorRT warns: {text}; an input without effect is an error")


def _collect_messages(library: ModuleType) -> Any:
    class Messages(library.ILogger):  # type: ignore[name-defined, misc]
        """What TensorRT says while it builds."""

        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self.warnings: list[str] = []
            self._errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity == library.ILogger.Severity.WARNING:
                self.warnings.append(message)
            elif severity in (library.ILogger.Severity.INTERNAL_ERROR, library.ILogger.Severity.ERROR):
                self._errors.append(" ".join(message.split()))

        def first_error(self) -> str:
            """The cause; what comes after it are consequences. Notes about the missing driver are not."""
            causes = [text for text in self._errors if "cudaError 35" not in text]
            return (causes or self._errors or ["no reason given"])[0][:400]

    return Messages()
