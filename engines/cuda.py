"""A CUDA device through the driver's own interface: memory, one stream, copies, graphs."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from .errors import EngineError


@functools.cache
def refusal() -> str | None:
    """Why no CUDA device can be used in this process, or None."""
    try:
        open_device()
    except EngineError as fault:
        return str(fault)
    return None


@functools.cache
def open_device(ordinal: int = 0) -> Device:
    """The device of that number, opened once. Raises EngineError, in one line, when there is none."""
    try:
        from cuda.bindings import driver
    except ImportError as fault:
        raise EngineError("CUDA: the package cuda-bindings is missing; `pip install cuda-bindings`") from fault
    try:
        _call(driver.cuInit, 0)
        count = _call(driver.cuDeviceGetCount)
    except EngineError:
        raise
    except Exception as fault:
        raise EngineError("CUDA: no driver found (libcuda.so.1); install NVIDIA's driver") from fault
    if ordinal >= count:
        raise EngineError(f"CUDA: the driver knows {count} devices, number {ordinal} is wanted")
    return Device(driver, ordinal)


class Device:
    """A device with its primary context and one stream, on which everything is issued in order.

    Addresses are integers, sizes bytes. Whoever issues work holds `lock`; it makes the context the thread's own.
    What is no longer referenced is freed with the next allocation: freeing in the midst of a capture would spoil it.
    """

    def __init__(self, driver: Any, ordinal: int) -> None:
        self._driver = driver
        handle = _call(driver.cuDeviceGet, ordinal)
        attributes = driver.CUdevice_attribute
        major = _call(driver.cuDeviceGetAttribute, attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)
        minor = _call(driver.cuDeviceGetAttribute, attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)
        self.name = _call(driver.cuDeviceGetName, 256, handle).split(b"\0")[0].decode()
        self.compute_capability = 10 * major + minor
        self.driver_version = _call(driver.cuDriverGetVersion)
        self._context = _call(driver.cuDevicePrimaryCtxRetain, handle)
        self.lock = _ContextLock(driver, self._context)
        self._dead: deque[Callable[[], Any]] = deque()
        with self.lock:
            self._stream = _call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)

    @property
    def description(self) -> str:
        """Name, compute capability, and the newest CUDA that the driver runs."""
        major, minor = divmod(self.driver_version, 1000)
        capability = "{}.{}".format(*divmod(self.compute_capability, 10))
        return f"{self.name}, compute capability {capability}, CUDA {major}.{minor // 10}"

    @property
    def stream(self) -> int:
        """Handle of the stream."""
        return int(self._stream)

    def allocate(self, nbytes: int) -> Memory:
        """Zeroed memory of the device."""
        driver = self._driver
        with self.lock:
            self._bury()
            address = int(_call(driver.cuMemAlloc, max(nbytes, 1)))
            _call(driver.cuMemsetD8Async, address, 0, max(nbytes, 1), self._stream)
        return Memory(address, nbytes, self._later(driver.cuMemFree, address))

    def allocate_host(self, nbytes: int) -> Memory:
        """Page-locked memory of the host: the device copies from and to it by itself, in the order of the stream."""
        driver = self._driver
        with self.lock:
            self._bury()
            address = int(_call(driver.cuMemHostAlloc, max(nbytes, 1), 0))
        return Memory(address, nbytes, self._later(driver.cuMemFreeHost, address))

    def upload(self, target: int, source: int, nbytes: int) -> None:
        """Issue a copy from page-locked host memory to the device."""
        _call(self._driver.cuMemcpyHtoDAsync, target, source, nbytes, self._stream)

    def download(self, target: int, source: int, nbytes: int) -> None:
        """Issue a copy from the device to page-locked host memory."""
        _call(self._driver.cuMemcpyDtoHAsync, target, source, nbytes, self._stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Issue a copy within the device."""
        _call(self._driver.cuMemcpyDtoDAsync, target, source, nbytes, self._stream)

    def copy_strided(
        self, target: int, target_pitch: int, source: int, source_pitch: int, nbytes: int, count: int
    ) -> None:
        """Issue `count` copies of `nbytes` within the device, each a pitch of bytes after the one before."""
        driver = self._driver
        what = driver.CUDA_MEMCPY2D()
        what.srcMemoryType = what.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        what.srcDevice, what.dstDevice = driver.CUdeviceptr(source), driver.CUdeviceptr(target)
        what.srcPitch, what.dstPitch = source_pitch, target_pitch
        what.WidthInBytes, what.Height = nbytes, count
        _call(driver.cuMemcpy2DAsync, what, self._stream)

    def synchronize(self) -> None:
        """Wait until all that was issued is done. Raises EngineError for what failed on the device."""
        _call(self._driver.cuStreamSynchronize, self._stream)

    def capture(self, issue: Callable[[], None]) -> Graph:
        """Record what `issue` issues, instead of running it. Raises EngineError when it cannot be captured."""
        driver = self._driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _call(driver.cuStreamBeginCapture, self._stream, mode)
        try:
            issue()
        except Exception:
            # The stream is of no use until the capture is ended; what it gives then is an invalid graph's error.
            driver.cuStreamEndCapture(self._stream)
            raise
        template = _call(driver.cuStreamEndCapture, self._stream)
        try:
            executable = _call(driver.cuGraphInstantiate, template, 0)
        finally:
            driver.cuGraphDestroy(template)
        launch = functools.partial(_call, driver.cuGraphLaunch, executable, self._stream)
        return Graph(launch, self._later(driver.cuGraphExecDestroy, executable))

    def _later(self, free: Callable[[Any], Any], what: Any) -> Callable[[], None]:
        return functools.partial(self._dead.append, functools.partial(free, what))

    def _bury(self) -> None:
        if self._dead:
            self.synchronize()
        while self._dead:
            self._dead.popleft()()


class Memory:
    """An allocation, freed with its last reference."""

    def __init__(self, address: int, nbytes: int, free: Callable[[], None]) -> None:
        self.address, self.nbytes = address, nbytes
        weakref.finalize(self, free).atexit = False


class Graph:
    """Captured work that one call issues."""

    def __init__(self, launch: Callable[[], None], free: Callable[[], None]) -> None:
        self.launch = launch
        weakref.finalize(self, free).atexit = False


class _ContextLock:
    """One thread at a time issues work, with the device's context as its current one."""

    def __init__(self, driver: Any, context: Any) -> None:
        self._driver, self._context, self._lock = driver, context, threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()
        _call(self._driver.cuCtxSetCurrent, self._context)

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a driver function, None without one. Raises EngineError naming function, error and its text."""
    error, *results = function(*arguments)
    if int(error):
        from cuda.bindings import driver

        name, text = (ask(error)[1] or b"" for ask in (driver.cuGetErrorName, driver.cuGetErrorString))
        raise EngineError(f"CUDA: {function.__name__}: {name.decode()} ({text.decode()})")
    return results[0] if results else None
