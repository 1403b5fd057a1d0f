"""Steps of a device engine: issued one by one at first, then captured into a CUDA graph and replayed."""

from collections.abc import Callable, Sequence
from typing import Protocol

from .cuda import Device, Graph
from .device_buffer import DeviceBuffer
from .engine import GraphCounts
from .errors import EngineError


class Program(Protocol):
    """An engine's work with shapes and addresses fixed."""

    def issue(self) -> None:
        """Issue it on the device's stream. Raises EngineError."""
        ...


class EagerStep:
    """Uploads, the engine's work and downloads, issued at every run."""

    def __init__(
        self,
        device: Device,
        program: Program,
        uploads: Sequence[DeviceBuffer],
        downloads: Sequence[DeviceBuffer],
        counts: GraphCounts,
    ) -> None:
        self._device, self._program, self._counts = device, program, counts
        self._uploads, self._downloads = uploads, downloads

    def run(self) -> None:
        with self._device.lock:
            self.issue()
            self._device.synchronize()
            self._counts.misses += 1

    def issue(self) -> None:
        for buffer in self._uploads:
            buffer.upload()
        self._program.issue()
        for buffer in self._downloads:
            buffer.download()

    def results(self) -> list[bytes]:
        """What was downloaded last."""
        return [buffer.array.tobytes() for buffer in self._downloads]


class GraphStep:
    """A step that is run over and over: the first run is eager, the second captures, later ones replay.

    The first replay has to give the very bytes of an eager run. A step whose capture fails or differs stays eager, with
    the reason in the counts: nothing is refused in silence.
    """

    def __init__(
        self, device: Device, eager: EagerStep, own: Callable[[], EagerStep], counts: GraphCounts, label: str
    ) -> None:
        """`own` makes the step to capture, with a program that nothing else will ever change."""
        self._device, self._eager, self._own = device, eager, own
        self._counts, self._label = counts, label
        self._runs = 0
        self._captured: tuple[Graph, EagerStep] | None = None

    def run(self) -> None:
        self._runs += 1
        if self._captured is not None:
            with self._device.lock:
                self._captured[0].launch()
                self._device.synchronize()
                self._counts.replays += 1
        else:
            self._eager.run()
            if self._runs == 2:
                self._capture()

    def _capture(self) -> None:
        device, counts = self._device, self._counts
        with device.lock:
            try:
                step = self._own()
                # A program may settle what it puts off to its first run, and none of that belongs into the graph.
                step.issue()
                device.synchronize()
                expected = step.results()
                graph = device.capture(step.issue)
                graph.launch()
                device.synchronize()
                if step.results() != expected:
                    raise EngineError("the first replay differs from the eager run")
            except EngineError as fault:
                counts.refused[self._label] = str(fault)
                self._eager.run()
                return
            self._captured = graph, step
            counts.captured += 1
