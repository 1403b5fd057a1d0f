"""One budget of bytes for what is kept in case it is needed again, and for what speculation holds meanwhile."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from .slabs import Slab, Slabs, size_class


class Kept(Protocol):
    """What a pool keeps under a key."""

    @property
    def nbytes(self) -> int: ...

    def drop(self) -> None:
        """It is kept no longer."""
        ...


@dataclass
class PoolStatistics:
    """Counts since the pool was made. `refused`: slabs and entries for which there was no room; `peak`: most bytes."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    refused: int = 0
    peak: int = 0


@dataclass
class Audit:
    """Bytes at a moment: of entries, of slabs in use by their kind with their number, and of slabs that wait."""

    entries: int = 0
    entry_bytes: int = 0
    live: dict[str, int] = field(default_factory=dict)
    live_bytes: int = 0
    waiting_bytes: int = 0


class Pool:
    """Entries by key, the least recently used evicted first, and slabs; together they stay within `budget` bytes.

    Several threads may use one pool; who needs several calls to be one holds its `lock`.
    """

    def __init__(self, budget: int, delay: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`delay`: seconds that a released slab waits for a taker of its size before the memory is given back."""
        self.budget = budget
        self.statistics = PoolStatistics()
        self._slabs = Slabs(delay, clock)
        self._entries: OrderedDict[Hashable, Kept] = OrderedDict()
        self._entry_bytes = 0
        self._live: Counter[str] = Counter()
        self._live_bytes = 0
        self.lock = threading.RLock()

    def find(self, key: Hashable) -> Kept | None:
        """The entry of that key, which counts as used now."""
        with self.lock:
            entry = self._entries.get(key)
            if entry is None:
                self.statistics.misses += 1
                return None
            self.statistics.hits += 1
            self._entries.move_to_end(key)
            return entry

    def store(self, key: Hashable, entry: Kept) -> bool:
        """Keep an entry, in place of one with the same key; False, and not kept, when it does not fit the budget."""
        with self.lock:
            self.remove(key)
            if not self._make_room(entry.nbytes):
                self.statistics.refused += 1
                entry.drop()
                return False
            self._entries[key] = entry
            self._entry_bytes += entry.nbytes
            self.statistics.stored += 1
            self._note_peak()
            return True

    def remove(self, key: Hashable) -> None:
        """Keep the entry of that key no longer, if there is one."""
        with self.lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._entry_bytes -= entry.nbytes
                entry.drop()

    def take(self, nbytes: int, kind: str) -> Slab | None:
        """A slab of at least `nbytes`; None when the budget has no room for it even without entries."""
        with self.lock:
            if not self._make_room(size_class(nbytes)):
                self.statistics.refused += 1
                return None
            slab = self._slabs.take(nbytes, kind)
            self._live[kind] += 1
            self._live_bytes += slab.nbytes
            self._note_peak()
            return slab

    def give(self, slab: Slab) -> None:
        """Release a slab."""
        with self.lock:
            self._live[slab.kind] -= 1
            self._live_bytes -= slab.nbytes
            self._slabs.give(slab)
            self._slabs.trim()

    def audit(self) -> Audit:
        """What there is now."""
        with self.lock:
            self._slabs.trim()
            live = {kind: count for kind, count in self._live.items() if count}
            return Audit(len(self._entries), self._entry_bytes, live, self._live_bytes, self._slabs.waiting)

    def _make_room(self, nbytes: int) -> bool:
        if self._live_bytes + nbytes > self.budget:
            return False
        if self._used() + nbytes > self.budget:
            self._slabs.trim(all_of_them=True)
        while self._used() + nbytes > self.budget:
            key = next(iter(self._entries))
            self.remove(key)
            self.statistics.evicted += 1
        return True

    def _used(self) -> int:
        return self._entry_bytes + self._live_bytes + self._slabs.waiting

    def _note_peak(self) -> None:
        self.statistics.peak = max(self.statistics.peak, self._used())
