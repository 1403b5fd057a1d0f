"""What engines on a CUDA device have in common: buffers, steps, graphs; the programs are their own."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from numpy.typing import DTypeLike

from .cuda import Device
from .device_buffer import DeviceBuffer
from .engine import Buffer, GraphCounts, Step, TensorSpec, check_binding
from .errors import EngineError
from .graphs import EagerStep, GraphStep, Program


class Compiled(Protocol):
    """An engine file that was loaded onto the device."""

    @property
    def inputs(self) -> Mapping[str, TensorSpec]: ...

    @property
    def outputs(self) -> Mapping[str, TensorSpec]: ...

    def prepare(self, buffers: Mapping[str, DeviceBuffer], *, own: bool) -> Program:
        """The work on these buffers. An `own` program shares no state with any other, as a graph needs it.

        Raises EngineError for shapes that the engine was not built for.
        """
        ...

    def close(self) -> None: ...


class DeviceEngine:
    """An engine of the device. Its steps take turns on one stream."""

    def __init__(self, device: Device, compiled: Compiled) -> None:
        self._device, self._compiled = device, compiled
        self.graphs = GraphCounts()

    @property
    def device(self) -> str:
        return self._device.description

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        return self._compiled.inputs

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return self._compiled.outputs

    def allocate(self, shape: Sequence[int], dtype: DTypeLike, *, resident: bool = False) -> DeviceBuffer:
        return DeviceBuffer.allocate(self._device, shape, dtype, resident)

    def bind(self, buffers: Mapping[str, Buffer], *, repeated: bool = False) -> Step:
        check_binding(self, buffers)
        held = {name: _of_device(name, buffer) for name, buffer in buffers.items()}
        uploads = [held[name] for name in self.inputs if not held[name].resident]
        downloads = [held[name] for name in self.outputs if name in held and not held[name].resident]

        def step(own: bool) -> EagerStep:
            program = self._compiled.prepare(held, own=own)
            return EagerStep(self._device, program, uploads, downloads, self.graphs)

        if not repeated:
            return step(own=False)
        label = ", ".join(f"{n} {'×'.join(map(str, held[n].shape))}" for n in self.inputs if not held[n].resident)
        return GraphStep(self._device, step(own=False), lambda: step(own=True), self.graphs, label)

    def close(self) -> None:
        self._compiled.close()


def _of_device(name: str, buffer: Buffer) -> DeviceBuffer:
    if not isinstance(buffer, DeviceBuffer):
        raise EngineError(f"{name}: found a {type(buffer).__name__}; the engine's own `allocate` makes its buffers")
    return buffer
