"""An engine file for the host's driver: ONNX Runtime as a host function in the stream, on the device's memory."""

import ctypes
import itertools
from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort
from cuda.bindings import driver
from speceyes.engines.cuda import Device
from speceyes.engines.device_buffer import DeviceBuffer
from speceyes.engines.errors import EngineError
from speceyes.engines.onnxruntime import NUMPY_TYPES, OnnxRuntimeEngine

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class HostProgram:
    """One run of a session."""

    def __init__(self, device: Device, session: ort.InferenceSession, buffers: Mapping[str, DeviceBuffer]) -> None:
        self._device = device
        binding = session.io_binding()
        for argument, bind in (
            *((argument, binding.bind_input) for argument in session.get_inputs()),
            *((argument, binding.bind_output) for argument in session.get_outputs()),
        ):
            buffer = buffers.get(argument.name)
            if buffer is not None:
                bind(argument.name, "cpu", 0, NUMPY_TYPES[argument.type], list(buffer.shape), buffer.address)
        self._run = HOST_FUNCTION(lambda _: session.run_with_iobinding(binding))

    def issue(self) -> None:
        (error,) = driver.cuLaunchHostFunc(self._device.stream, ctypes.cast(self._run, ctypes.c_void_p).value, 0)
        if int(error):
            raise EngineError(f"host function: {error}")


class HostCompiled:
    def __init__(self, device: Device, path: Path, options: Mapping[str, str]) -> None:
        self._device, self._engine = device, OnnxRuntimeEngine(path, threads=1, options=options)
        self.inputs, self.outputs = self._engine.inputs, self._engine.outputs
        self.programs = {"own": 0, "shared": 0}

    def prepare(self, buffers: Mapping[str, DeviceBuffer], *, own: bool) -> HostProgram:
        self.programs["own" if own else "shared"] += 1
        return HostProgram(self._device, self._engine._session, buffers)

    def close(self) -> None:
        self._engine.close()


class Faulty:
    """A program that fails in its capture, by `kind`: `allocates` meanwhile, `waits`, or gives another result then."""

    def __init__(self, kind: str, device: Device, target: DeviceBuffer) -> None:
        self._kind, self._device, self._target = kind, device, target
        self._values = itertools.count(1)
        self._issued = 0

    def issue(self) -> None:
        self._issued += 1
        if self._issued == 2 and self._kind == "allocates":
            self._device.allocate(16)
        if self._issued == 2 and self._kind == "waits":
            self._device.synchronize()
        value = next(self._values) if self._kind == "changes" else 7
        driver.cuMemsetD8Async(self._target.address, value, self._target.nbytes, self._device.stream)
