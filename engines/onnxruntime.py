"""The embedded backend: ONNX Runtime's CPU provider, with every input and output bound in place."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnxruntime as ort
from numpy.typing import DTypeLike

from .engine import Array, Buffer, TensorSpec, check_binding
from .errors import EngineError

NUMPY_TYPES = MappingProxyType(
    {
        "tensor(float)": "float32",
        "tensor(float16)": "float16",
        "tensor(int64)": "int64",
        "tensor(int32)": "int32",
        "tensor(int8)": "int8",
        "tensor(uint8)": "uint8",
        "tensor(bool)": "bool",
    }
)

MEMORY_REUSE = "speceyes.memory_reuse"
"""Option of an engine, `0` or `1` (the default): whether buffers of one size take turns.

They live from their first use to their last, one set for each size: a tower's large tensors then take half as much
memory again. A decoder's step of many small ones is 7 % slower without.
"""


class HostBuffer:
    """A C-contiguous numpy array that ONNX Runtime reads and writes through its address."""

    def __init__(self, array: Array) -> None:
        if not array.flags.c_contiguous:
            raise EngineError("buffer: found a strided array; a C-contiguous one is needed")
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> "np.dtype[np.generic]":
        return self.array.dtype

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def row(self, start: int, stop: int) -> "HostBuffer":
        return HostBuffer(self.array[start:stop])

    def copy_tokens(self, source: int, target: int, start: int, stop: int) -> None:
        self.copy_from(self, source, target, start, stop)

    def copy_from(self, other: Buffer, source: int, target: int, start: int, stop: int) -> None:
        self.array[target, :, start:stop] = other.array[source, :, start:stop]


class OnnxRuntimeStep:
    """One IOBinding, kept: binding some sixty cache buffers anew at each step would cost more than the host's work."""

    def __init__(self, session: ort.InferenceSession, binding: ort.IOBinding, buffers: Mapping[str, Buffer]) -> None:
        self._session, self._binding, self._buffers = session, binding, buffers

    def run(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as fault:
            raise EngineError(f"ONNX Runtime could not run the step: {fault}") from fault


class OnnxRuntimeEngine:
    """A lowered ONNX file in an inference session."""

    device = "CPU"
    graphs = None

    def __init__(self, path: Path, *, threads: int | None = None, options: Mapping[str, str] | None = None) -> None:
        """Load `path` (external weights beside it are mapped, not read).

        `threads`: intra-operator threads, all cores of this process when None. `options`: MEMORY_REUSE, and session
        configuration entries, that the compiler recorded with the engine. Raises EngineError when ONNX Runtime refuses
        the file.
        """
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        settings.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
        settings.inter_op_num_threads = 1
        # A pattern is kept for every input shape: memory would grow with each new length of prompt.
        settings.enable_mem_pattern = False
        settings.enable_mem_reuse = (options or {}).get(MEMORY_REUSE) != "0"
        for key, value in (options or {}).items():
            if key != MEMORY_REUSE:
                settings.add_session_config_entry(key, value)
        try:
            self._session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        except Exception as fault:
            raise EngineError(f"{path.name}: ONNX Runtime {ort.__version__} could not load it: {fault}") from fault
        self.inputs = MappingProxyType({i.name: _spec(i) for i in self._session.get_inputs()})
        self.outputs = MappingProxyType({o.name: _spec(o) for o in self._session.get_outputs()})

    def allocate(self, shape: Sequence[int], dtype: DTypeLike, *, resident: bool = False) -> HostBuffer:
        return HostBuffer(np.zeros(shape, dtype))

    def bind(self, buffers: Mapping[str, Buffer], *, repeated: bool = False) -> OnnxRuntimeStep:
        check_binding(self, buffers)
        binding = self._session.io_binding()
        for name, buffer in buffers.items():
            bind = binding.bind_input if name in self.inputs else binding.bind_output
            array = buffer.array
            bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        return OnnxRuntimeStep(self._session, binding, buffers)

    def close(self) -> None:
        del self._session


def _spec(argument: ort.NodeArg) -> TensorSpec:
    shape = tuple(d if isinstance(d, int) else str(d) for d in argument.shape)
    return TensorSpec(argument.name, NUMPY_TYPES.get(argument.type, argument.type), shape)
