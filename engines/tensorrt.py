"""TensorRT engines, of the full package or of TensorRT for RTX, whose Python interfaces are alike.

What is used of them is checked against the bindings of both; what of it has run on a device is told in docs/gpu.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from .cuda import Device, Memory, open_device
from .device_buffer import DeviceBuffer
from .device_engine import DeviceEngine
from .engine import TensorSpec
from .errors import EngineError

# numpy has no bfloat16: such tensors stay on the device, where only their size counts.
NUMPY_TYPES = MappingProxyType(
    {
        "FLOAT": "float32",
        "HALF": "float16",
        "BF16": "uint16",
        "INT64": "int64",
        "INT32": "int32",
        "INT8": "int8",
        "UINT8": "uint8",
        "BOOL": "bool",
    }
)

Shapes = Mapping[str, tuple[int, ...]]


def load_engine(path: Path, library: ModuleType, specs: Sequence[TensorSpec] = ()) -> DeviceEngine:
    """Load an engine file with `tensorrt` or `tensorrt_rtx`.

    `specs`: its tensors as the manifest has them, with the names of free dimensions, which the file does not keep.
    Raises EngineError without a device, or with TensorRT's own words when it refuses the file.
    """
    device = open_device()
    return DeviceEngine(device, TensorRtCompiled(path, library, device, specs))


class TensorRtCompiled:
    """A deserialised engine, the context that steps share, and the scratch memory of all contexts."""

    def __init__(self, path: Path, library: ModuleType, device: Device, specs: Sequence[TensorSpec] = ()) -> None:
        self._library, self._device = library, device
        self._messages = _collect_messages(library)
        runtime = library.Runtime(self._messages)
        with device.lock:
            blob = path.read_bytes()
            engine = None if _invalid(runtime, library, blob) else runtime.deserialize_cuda_engine(blob)
            if engine is None:
                words = _invalid(runtime, library, blob) or self._messages.take()
                raise EngineError(f"{path.name}: TensorRT {library.__version__} could not load it: {words}")
            self._runtime, self._engine = runtime, engine
            self._scratch = device.allocate(engine.device_memory_size_v2)
            self._shared = self.make_context()
        inputs: dict[str, TensorSpec] = {}
        outputs: dict[str, TensorSpec] = {}
        named = {spec.name: spec for spec in specs}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            is_input = engine.get_tensor_mode(name) == library.TensorIOMode.INPUT
            (inputs if is_input else outputs)[name] = named.get(name) or _spec(engine, name)
        self.inputs, self.outputs = MappingProxyType(inputs), MappingProxyType(outputs)
        aliased = {name: engine.get_aliased_input_tensor(name) for name in outputs}
        self.aliases = {name: source for name, source in aliased.items() if source}

    def prepare(self, buffers: Mapping[str, DeviceBuffer], *, own: bool) -> TensorRtProgram:
        shapes = {name: buffers[name].shape for name in self.inputs}
        profile = self._find_profile(shapes)
        with self._device.lock:
            context = self.make_context() if own else self._shared
            bound = self._bound(context, profile, shapes, buffers)
            return TensorRtProgram(self, context, profile, shapes, bound, fixed=own)

    def make_context(self) -> Any:
        """An execution context in the common scratch memory. Contexts run one after the other, on one stream."""
        library, engine = self._library, self._engine
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(library.ExecutionContextAllocationStrategy.USER_MANAGED)
        if hasattr(config, "cuda_graph_strategy"):
            config.cuda_graph_strategy = library.CudaGraphStrategy.DISABLED
        if hasattr(config, "dynamic_shapes_kernel_specialization_strategy"):
            # Kernels that are exchanged in the background would change a step's bits from one run to the next.
            strategies = library.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
        context = engine.create_execution_context(config)
        if context is None:
            raise EngineError(f"TensorRT could not make an execution context: {self._messages.take()}")
        context.set_device_memory(self._scratch.address, self._scratch.nbytes)
        return context

    def set_shapes(self, context: Any, profile: int, shapes: Shapes) -> None:
        """Tell a context what it is to run."""
        if context.active_optimization_profile != profile:
            self._expect(context.set_optimization_profile_async(profile, self._device.stream), "profile", profile)
        for name, shape in shapes.items():
            self._expect(context.set_input_shape(name, shape), name, shape)

    def execute(self, context: Any) -> None:
        """Issue a run."""
        self._expect(context.execute_async_v3(self._device.stream), "run", "a run that could not be issued")

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Issue a copy."""
        self._device.copy(target, source, nbytes)

    def close(self) -> None:
        del self._shared, self._engine, self._runtime, self._scratch

    def _bound(
        self, context: Any, profile: int, shapes: Shapes, buffers: Mapping[str, DeviceBuffer]
    ) -> tuple[dict[str, int], list[tuple[int, Memory]]]:
        """Addresses of all tensors, and what is to be copied after a run: an output that was given an input's memory
        without TensorRT updating that in place gets memory of its own; so does one that nobody asked for."""
        self.set_shapes(context, profile, shapes)
        addresses = {name: buffers[name].address for name in self.inputs}
        taken, apart = set(addresses.values()), []
        for name in self.outputs:
            wanted = buffers.get(name)
            in_place = name in self.aliases
            if wanted is not None and (in_place or wanted.address not in taken):
                addresses[name] = wanted.address
                continue
            nbytes = wanted.nbytes if wanted is not None else self._size(context, name)
            memory = self._device.allocate(nbytes)
            addresses[name] = memory.address
            apart.append((wanted.address if wanted is not None else 0, memory))
        return addresses, apart

    def _size(self, context: Any, name: str) -> int:
        count = 1
        for dimension in context.get_tensor_shape(name):
            count *= dimension
        return int(count * self._engine.get_tensor_bytes_per_component(name, 0))

    def _find_profile(self, shapes: Shapes) -> int:
        """The first optimisation profile that all shapes fit into."""
        found = ""
        for profile in range(self._engine.num_optimization_profiles):
            fault = next((f for name, shape in shapes.items() if (f := self._misfit(name, shape, profile))), None)
            if fault is None:
                return profile
            found = found or fault
        raise EngineError(f"{found}; build with other `--min-shapes` and `--max-shapes`")

    def _misfit(self, name: str, shape: tuple[int, ...], profile: int) -> str | None:
        least, _, most = (tuple(dims) for dims in self._engine.get_tensor_profile_shape(name, profile))
        if all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True)):
            return None
        found, low, high = ("×".join(map(str, dims)) for dims in (shape, least, most))
        return f"{name}: found {found}; the engine was built for {low} to {high}"

    def _expect(self, well: bool, what: str, value: object) -> None:
        if not well:
            raise EngineError(f"{what}: TensorRT refused {value}: {self._messages.take()}")


class TensorRtProgram:
    """A context with shapes and addresses; they are set once in a context that is `fixed`, else before every run."""

    def __init__(
        self,
        compiled: TensorRtCompiled,
        context: Any,
        profile: int,
        shapes: Shapes,
        bound: tuple[dict[str, int], list[tuple[int, Memory]]],
        *,
        fixed: bool,
    ) -> None:
        self._compiled, self._context, self._fixed = compiled, context, fixed
        self._profile, self._shapes = profile, shapes
        self._addresses, self._apart = bound
        self._set()

    def issue(self) -> None:
        if not self._fixed:
            self._set()
        self._compiled.execute(self._context)
        for target, memory in self._apart:
            if target:
                self._compiled.copy(target, memory.address, memory.nbytes)

    def _set(self) -> None:
        self._compiled.set_shapes(self._context, self._profile, self._shapes)
        for name, address in self._addresses.items():
            self._context.set_tensor_address(name, address)


def _invalid(runtime: Any, library: ModuleType, blob: bytes) -> str | None:
    """What TensorRT for RTX says against an engine on this machine, or None; the full package says it on loading."""
    if not hasattr(runtime, "get_engine_validity"):
        return None
    validity, diagnostics = runtime.get_engine_validity(blob)
    if validity != library.EngineValidity.INVALID:
        return None
    names = [
        name for name, bit in library.EngineInvalidityDiagnostics.__members__.items() if int(diagnostics) & int(bit)
    ]
    return ", ".join(names) or "the engine is invalid"


def _spec(engine: Any, name: str) -> TensorSpec:
    shape = tuple(size if size >= 0 else f"{name}.{axis}" for axis, size in enumerate(engine.get_tensor_shape(name)))
    return TensorSpec(name, NUMPY_TYPES.get(engine.get_tensor_dtype(name).name, "unknown"), shape)


def _collect_messages(library: ModuleType) -> Any:
    class Collector(library.ILogger):  # type: ignore[name-defined, misc]
        """Keeps what TensorRT complains of, for the error that follows."""

        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self._said: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (library.ILogger.Severity.INTERNAL_ERROR, library.ILogger.Severity.ERROR):
                self._said = [*self._said[-4:], message]

        def take(self) -> str:
            said, self._said = "; ".join(self._said), []
            return said or "no reason given"

    return Collector()
