"""Targets: for each, whether this machine can run it and how its engines are loaded."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from .bundle import Bundle
from .engine import Engine
from .errors import EngineError
from .manifest import EngineEntry, TargetEntry
from .schema import nearest


@dataclass(frozen=True)
class Target:
    """`refusal` gives the reason why this machine cannot run a build, or None; `load` opens one engine file.

    `load` takes the file's path, the threads to run it with (None for all) and what the manifest says of the engine.
    """

    name: str
    refusal: Callable[[TargetEntry], str | None]
    load: Callable[[Path, int | None, EngineEntry], Engine]


def _refuse_onnxruntime(build: TargetEntry) -> str | None:
    have = importlib.metadata.version("onnxruntime")
    built = build.versions.get("onnxruntime", have)
    if tuple(map(int, have.split(".")[:2])) < tuple(map(int, built.split(".")[:2])):
        return f"built for ONNX Runtime {built}, this is {have}; `pip install 'onnxruntime>={built}'`"
    return None


def _load_onnxruntime(path: Path, threads: int | None, entry: EngineEntry) -> Engine:
    from .onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine(path, threads=threads, options=entry.options)


def _refuse_tensorrt(name: str, build: TargetEntry) -> str | None:
    from .tensorrt_library import refusal

    return refusal(name, build)


def _load_tensorrt(name: str, path: Path, threads: int | None, entry: EngineEntry) -> Engine:
    from .tensorrt import load_engine
    from .tensorrt_library import import_library

    return load_engine(path, import_library(name), (*entry.inputs, *entry.outputs))


def _tensorrt(name: str) -> Target:
    return Target(name, partial(_refuse_tensorrt, name), partial(_load_tensorrt, name))


ONNXRUNTIME = Target("onnxruntime-cpu", _refuse_onnxruntime, _load_onnxruntime)

# Best first: loading takes the first that the bundle holds and the machine can run.
TARGETS = MappingProxyType({t.name: t for t in (_tensorrt("tensorrt"), _tensorrt("tensorrt-rtx"), ONNXRUNTIME)})


def find_target(name: str) -> Target:
    """The target of that name. Raises EngineError naming the known ones."""
    if name not in TARGETS:
        raise EngineError(f"target {name!r}: unknown; {nearest(name, TARGETS)}")
    return TARGETS[name]


def choose_target(bundle: Bundle, wanted: str | None = None) -> tuple[Target, dict[str, str]]:
    """The best target that the bundle holds and this machine can run, and why others were passed over.

    Raises EngineError when none fits, with the reason for each.
    """
    builds = bundle.manifest.targets
    if wanted is not None and wanted not in builds:
        held = ", ".join(builds)
        raise EngineError(f"target {wanted!r}: the bundle holds {held}; build it with `--target {wanted}`")
    passed: dict[str, str] = {}
    ranked = [*(name for name in TARGETS if name in builds), *(name for name in builds if name not in TARGETS)]
    for name in [wanted] if wanted else ranked:
        if name not in TARGETS:
            passed[name] = "this release does not know the target"
        elif reason := TARGETS[name].refusal(builds[name]):
            passed[name] = reason
        else:
            return TARGETS[name], passed
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed.items())
    raise EngineError(f"no engine of the bundle runs here: {reasons}")
