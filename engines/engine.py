"""What every backend offers: named tensors, buffers allocated once, steps that run on bound buffers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .errors import EngineError

Array = NDArray[np.generic]


@dataclass(frozen=True)
class TensorSpec:
    """Name, numpy dtype name and shape of an input or output; strings in the shape are free dimensions."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def check(self, buffer: "Buffer") -> None:
        """Raise EngineError unless `buffer` has this dtype and fits this shape."""
        fits = len(buffer.shape) == len(self.shape) and all(
            isinstance(want, str) or want == have for want, have in zip(self.shape, buffer.shape, strict=True)
        )
        if not fits or np.dtype(self.dtype) != buffer.dtype:
            shape = "×".join(map(str, self.shape))
            found = "×".join(map(str, buffer.shape))
            raise EngineError(f"{self.name}: found {buffer.dtype} {found}; the engine takes {self.dtype} {shape}")


class Buffer(Protocol):
    """Memory that an engine can read and write. `array` is its view from the host, where it has one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> "np.dtype[np.generic]": ...

    @property
    def array(self) -> Array: ...

    @property
    def nbytes(self) -> int: ...

    def row(self, start: int, stop: int) -> "Buffer":
        """The same memory, rows `start` to `stop` of the first dimension."""
        ...

    def copy_tokens(self, source: int, target: int, start: int, stop: int) -> None:
        """Of a cache [rows, heads, tokens, …]: copy tokens `start` to `stop` of one row into another."""
        ...

    def copy_from(self, other: "Buffer", source: int, target: int, start: int, stop: int) -> None:
        """As `copy_tokens`, out of row `source` of another cache, which may have more tokens or fewer."""
        ...


class Step(Protocol):
    """An engine bound to buffers; `run` reads the inputs and writes the outputs in place, allocating nothing."""

    def run(self) -> None: ...


@dataclass
class GraphCounts:
    """Of one engine: steps captured into a graph, runs that replayed one, runs that did not, and the steps whose
    capture was refused, with the reason."""

    captured: int = 0
    replays: int = 0
    misses: int = 0
    refused: dict[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """A graph built for one target and loaded. Steps of one engine may run in several threads."""

    @property
    def inputs(self) -> Mapping[str, TensorSpec]: ...

    @property
    def outputs(self) -> Mapping[str, TensorSpec]: ...

    @property
    def device(self) -> str:
        """What it runs on, in words."""
        ...

    @property
    def graphs(self) -> GraphCounts | None:
        """What became of captured steps; None where the backend has no graphs."""
        ...

    def allocate(self, shape: Sequence[int], dtype: DTypeLike, *, resident: bool = False) -> Buffer:
        """Zeroed memory that `bind` takes. A `resident` buffer may stay where the host cannot see it."""
        ...

    def bind(self, buffers: Mapping[str, Buffer], *, repeated: bool = False) -> Step:
        """Bind a buffer to every input and to the wanted outputs. The same buffer may serve as an input and an output.

        A `repeated` step runs over and over with the same buffers, which makes a graph of it worth its capture.
        Raises EngineError for an unknown or missing name, another dtype, or a shape that does not fit.
        """
        ...

    def close(self) -> None: ...


def check_binding(engine: Engine, buffers: Mapping[str, Buffer]) -> None:
    """Raise EngineError unless `buffers` names every input, nothing unknown, and fits dtypes and shapes."""
    for name, buffer in buffers.items():
        spec = engine.inputs.get(name) or engine.outputs.get(name)
        if spec is None:
            known = ", ".join([*engine.inputs, *engine.outputs])
            raise EngineError(f"{name}: the engine has no such tensor; it has {known}")
        spec.check(buffer)
    missing = [name for name in engine.inputs if name not in buffers]
    if missing:
        raise EngineError(f"{', '.join(missing)}: no buffer bound; every input of the engine needs one")
