"""TensorRT's Python package, full or for RTX: finding it, its version, and whether it can run what a bundle holds."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

from . import cuda
from .errors import EngineError
from .manifest import TargetEntry


@dataclass(frozen=True)
class Flavour:
    """`target` is built with the Python package `package`, installed by SpecEyes's extra of the target's name.

    `capabilities`: compute capabilities that it can build for without such a GPU; none if it needs the GPU itself.
    """

    target: str
    package: str
    capabilities: tuple[int, ...] = ()


FLAVOURS: Mapping[str, Flavour] = MappingProxyType(
    {
        flavour.target: flavour
        for flavour in (
            Flavour("tensorrt", "tensorrt"),
            Flavour("tensorrt-rtx", "tensorrt_rtx", (75, 80, 86, 89, 120, 121)),
        )
    }
)


def import_library(target: str) -> ModuleType:
    """The package of a target. Raises EngineError, in one line, where it is missing or cannot be imported."""
    flavour = FLAVOURS[target]
    install = f"`pip install 'speceyes[{target}]'`"
    if importlib.util.find_spec(flavour.package) is None:
        raise EngineError(f"target {target}: the package {flavour.package} is missing; {install}")
    try:
        library = importlib.import_module(flavour.package)
    except Exception as fault:
        reason = " ".join(str(fault).split())
        raise EngineError(
            f"target {target}: the package {flavour.package} cannot be imported ({type(fault).__name__}: {reason}); "
            f"{install} again"
        ) from fault
    if not hasattr(library, "Builder"):
        raise EngineError(
            f"target {target}: the package {flavour.package} is installed without its libraries; {install} again"
        )
    return library


def refusal(target: str, build: TargetEntry) -> str | None:
    """Why this machine cannot run the engines that a bundle holds for a target, in one line, or None.

    The device is asked first: without one, TensorRT itself may crash while it reads an engine.
    """
    if reason := cuda.refusal():
        return reason
    try:
        library = import_library(target)
    except EngineError as fault:
        return str(fault)
    device = cuda.open_device()
    return mismatch(target, build, library.__version__, device.compute_capability)


def mismatch(target: str, build: TargetEntry, version: str, capability: int) -> str | None:
    """Why engines do not fit a TensorRT of `version` and a GPU of `capability` (89 is 8.9), or None."""
    again = f"build it again with `speceyes-compile build CHECKPOINT -o BUNDLE --target {target}`"
    built = build.tensorrt
    if built is None:
        return f"the bundle does not say which TensorRT built it; {again}"
    if built.flavour != target:
        return f"built by {built.flavour}, the target is {target}; {again}"
    if built.version != version:
        return f"built by TensorRT {built.version}, this is {version}; install that version or {again}"
    if capability not in built.compute_capabilities:
        known = ", ".join(map(str, built.compute_capabilities))
        wanted = f" --compute-capability {capability}`" if FLAVOURS[target].capabilities else "` on this GPU"
        return f"built for compute capability {known}, this GPU has {capability}; {again[:-1]}{wanted}"
    return None
