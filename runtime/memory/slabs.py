"""Buffers by size class: what is released serves the next taker for a while, then goes back to the system."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

PAGE = 4096


@dataclass(eq=False)
class Slab:
    """Memory that somebody holds. `nbytes` is what it takes, at least what was asked for."""

    memory: NDArray[np.uint8]
    kind: str

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def array(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[np.generic]:
        """The beginning of the memory as an array; it holds whatever was there before."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array: NDArray[np.generic] = self.memory[:nbytes].view(dtype).reshape(shape)
        return array


def size_class(nbytes: int) -> int:
    """The bytes of a slab that holds `nbytes`: whole pages, then steps that waste a quarter at most."""
    step = PAGE
    while nbytes > 8 * step:
        step *= 2
    return max(-(-nbytes // step), 1) * step


class Slabs:
    """Allocates and takes back. Not safe for several threads; the pool that owns it is.

    `delay`: seconds that a released slab waits for a taker of its size.
    """

    def __init__(self, delay: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._delay, self._clock = delay, clock
        self._free: dict[int, deque[NDArray[np.uint8]]] = {}
        self._released: deque[tuple[float, int]] = deque()
        self.waiting = 0

    def take(self, nbytes: int, kind: str) -> Slab:
        """A slab of at least `nbytes`."""
        size = size_class(nbytes)
        free = self._free.get(size)
        if free:
            self.waiting -= size
            return Slab(free.pop(), kind)
        return Slab(np.empty(size, np.uint8), kind)

    def give(self, slab: Slab) -> None:
        """Take a slab back; nobody may use it any more."""
        self._free.setdefault(slab.nbytes, deque()).append(slab.memory)
        self._released.append((self._clock() + self._delay, slab.nbytes))
        self.waiting += slab.nbytes

    def trim(self, *, all_of_them: bool = False) -> None:
        """Let go of those that have waited long enough."""
        now = self._clock()
        while self._released and (all_of_them or self._released[0][0] <= now):
            _, size = self._released.popleft()
            if free := self._free.get(size):
                free.popleft()
                self.waiting -= size
