"""Launch the kernels through CUDA's driver interface, outside of TensorRT. Never run on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from .launches import Step
from .ptx import THREADS, only, shipped


class Kernels:
    """Kernels of the shipped PTX in the thread's current CUDA context, each compiled by the driver at its first use."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._modules: list[Any] = []
        self._functions: dict[str, Any] = {}

    def issue(self, step: Step, addresses: Mapping[str, int], stream: int) -> None:
        """Put a launch into the stream; `addresses` are of C-contiguous arrays on the device, by name.

        Raises RuntimeError with the driver's word for what it refuses, ValueError for a kernel that does not exist.
        """
        launch = step.launch
        values = [
            *(ctypes.c_uint64(addresses[name]) for name in step.inputs),
            *(ctypes.c_int32(size) for size in launch.sizes),
            *(ctypes.c_uint64(addresses[name]) for name in step.outputs),
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        function, block = self._function(launch.kernel), (THREADS, 1, 1)
        self._call("cuLaunchKernel", function, *launch.grid, *block, 0, stream, ctypes.addressof(pointers), 0)

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            module = self._call("cuModuleLoadData", only(shipped(), name).encode() + b"\0")
            self._modules.append(module)
            self._functions[name] = self._call("cuModuleGetFunction", module, name.encode())
        return self._functions[name]

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._driver, name)(*arguments)
        if int(error):
            raise RuntimeError(f"{name}: {error.name}")
        return results[0] if results else None
