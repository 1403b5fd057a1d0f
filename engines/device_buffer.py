"""Memory of a CUDA device, with a mirror in page-locked memory where the host reads or writes it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from .cuda import Device, Memory
from .engine import Array, Buffer
from .errors import EngineError


class DeviceBuffer:
    """A C-contiguous array on the device; `array`, its mirror, is current after an upload or a download."""

    def __init__(
        self, device: Device, shape: Sequence[int], dtype: DTypeLike, memory: Memory, mirror: Array | None, offset: int
    ) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self._device, self._memory, self._mirror, self._offset = device, memory, mirror, offset

    @classmethod
    def allocate(cls, device: Device, shape: Sequence[int], dtype: DTypeLike, resident: bool) -> DeviceBuffer:
        """Zeroed memory; a `resident` buffer has no mirror."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        mirror = None if resident else _mirror(device.allocate_host(nbytes), shape, dtype)
        return cls(device, shape, dtype, device.allocate(nbytes), mirror, 0)

    @property
    def address(self) -> int:
        return self._memory.address + self._offset

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def array(self) -> Array:
        if self._mirror is None:
            raise EngineError("buffer: found one that stays on the device; the host cannot read it")
        return self._mirror

    @property
    def resident(self) -> bool:
        return self._mirror is None

    def row(self, start: int, stop: int) -> DeviceBuffer:
        pitch = self.nbytes // self.shape[0]
        mirror = None if self._mirror is None else self._mirror[start:stop]
        shape = (stop - start, *self.shape[1:])
        return DeviceBuffer(self._device, shape, self.dtype, self._memory, mirror, self._offset + start * pitch)

    def copy_tokens(self, source: int, target: int, start: int, stop: int) -> None:
        self.copy_from(self, source, target, start, stop)

    def copy_from(self, other: Buffer, source: int, target: int, start: int, stop: int) -> None:
        """The copy is issued, and done before whatever is issued later."""
        if not isinstance(other, DeviceBuffer):
            raise EngineError(f"buffer: found a {type(other).__name__}; caches of one device copy from each other")
        (begin, from_pitch, size), (end, to_pitch, _) = other._place(source, start), self._place(target, start)
        with self._device.lock:
            self._device.copy_strided(end, to_pitch, begin, from_pitch, (stop - start) * size, self.shape[1])

    def _place(self, row: int, token: int) -> tuple[int, int, int]:
        """Of the layout [rows, heads, tokens, …]: address of a token of a row's first head, bytes from head to head,
        and bytes of a token."""
        rows, heads, tokens = self.shape[:3]
        size = self.nbytes // (rows * heads * tokens)
        return self.address + (row * heads * tokens + token) * size, tokens * size, size

    def upload(self) -> None:
        """Issue the copy of the mirror to the device."""
        self._device.upload(self.address, self.array.ctypes.data, self.nbytes)

    def download(self) -> None:
        """Issue the copy of the device's memory to the mirror."""
        self._device.download(self.array.ctypes.data, self.address, self.nbytes)


def _mirror(memory: Memory, shape: Sequence[int], dtype: DTypeLike) -> Array:
    raw = (ctypes.c_byte * max(memory.nbytes, 1)).from_address(memory.address)
    # The array's base is the ctypes object: it has to keep the memory alive.
    raw.memory = memory  # type: ignore[attr-defined]
    array: Array = np.ctypeslib.as_array(raw)[: memory.nbytes].view(dtype).reshape(shape)
    array[...] = np.zeros((), dtype)
    return array
