"""The pool: its budget, what is evicted, and what the audit counts."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from speceyes.runtime.memory.pool import Audit, Pool
from speceyes.runtime.memory.slabs import PAGE, Slabs, size_class


@dataclass
class Entry:
    nbytes: int
    dropped: list[int] = field(default_factory=list)

    def drop(self) -> None:
        self.dropped.append(self.nbytes)


def test_the_least_recently_used_entry_goes_first():
    pool, entries = Pool(100), {name: Entry(40) for name in "abc"}
    assert pool.store("a", entries["a"])
    assert pool.store("b", entries["b"])
    assert pool.find("a") is entries["a"]
    assert pool.store("c", entries["c"])
    assert (pool.find("b"), entries["b"].dropped) == (None, [40])
    assert pool.find("a") is entries["a"]
    assert not pool.store("d", Entry(101))
    assert pool.find("a") is entries["a"]
    assert (pool.statistics.evicted, pool.statistics.refused, pool.statistics.peak) == (1, 1, 80)


def test_an_entry_in_place_of_another_is_counted_once():
    pool, first = Pool(100), Entry(60)
    pool.store("a", first)
    assert pool.store("a", Entry(70))
    assert first.dropped == [60]
    assert pool.audit() == Audit(entries=1, entry_bytes=70)


def test_slabs_of_a_size_serve_again_until_their_time_is_over():
    now = [0.0]
    slabs = Slabs(5.0, lambda: now[0])
    slab = slabs.take(5000, "draft")
    slab.array((2, 3), np.float32)[...] = 7
    slabs.give(slab)
    now[0] = 4.9
    slabs.trim()
    again = slabs.take(8000, "draft")
    assert again.memory is slab.memory
    assert (again.array((6,), np.float32) == 7).all()
    slabs.give(again)
    now[0] = 20.0
    slabs.trim()
    assert slabs.waiting == 0
    assert slabs.take(5000, "draft").memory is not slab.memory


def test_a_slab_drives_entries_out_but_no_other_slab():
    pool, entry = Pool(4 * PAGE, delay=60), Entry(2 * PAGE)
    pool.store("a", entry)
    slab = pool.take(3 * PAGE, "draft")
    assert slab is not None
    assert entry.dropped == [2 * PAGE]
    assert pool.take(2 * PAGE, "draft") is None
    assert pool.audit() == Audit(live={"draft": 1}, live_bytes=3 * PAGE)
    pool.give(slab)
    assert pool.audit() == Audit(waiting_bytes=3 * PAGE)
    assert pool.store("a", Entry(2 * PAGE))
    assert pool.audit().waiting_bytes == 0


@given(st.integers(1, 1 << 30))
def test_a_size_class_holds_what_was_asked_and_little_more(nbytes):
    size = size_class(nbytes)
    assert nbytes <= size < nbytes + max(PAGE, nbytes / 4)
    assert size % PAGE == 0
    assert size_class(size) == size


@given(st.integers(0, 40 * PAGE), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 30 * PAGE))))
def test_whatever_happens_the_budget_holds_and_bytes_are_what_is_there(budget, events):
    now = [0.0]
    pool = Pool(budget, 2.0, lambda: now[0])
    entries: dict[int, Entry] = {}
    slabs = []
    for kind, key, nbytes in events:
        now[0] += 1
        if kind == 0:
            entry = Entry(nbytes)
            if pool.store(key, entry):
                entries[key] = entry
        elif kind == 1 and slabs:
            pool.give(slabs.pop(key % len(slabs)))
        elif kind == 2:
            slab = pool.take(nbytes, "draft")
            slabs += [slab] if slab else []
        else:
            pool.remove(key)
        kept = {key: entry for key, entry in entries.items() if not entry.dropped}
        found = pool.audit()
        assert found.entry_bytes == sum(entry.nbytes for entry in kept.values())
        assert found.entries == len(kept)
        assert found.live_bytes == sum(slab.nbytes for slab in slabs)
        assert found.live.get("draft", 0) == len(slabs)
        assert found.entry_bytes + found.live_bytes + found.waiting_bytes <= budget
        assert pool.statistics.peak <= budget


@pytest.mark.parametrize("delay", [0.0, 60.0])
def test_the_memory_of_slabs_in_use_is_never_shared(delay):
    pool = Pool(1 << 24, delay)
    slabs = [pool.take(5000 + number, "draft") for number in range(20)]
    for slab in slabs[::2]:
        pool.give(slab)
    more = [pool.take(5000, "draft") for _ in range(20)]
    used = [*slabs[1::2], *more]
    for number, slab in enumerate(used):
        slab.memory[:] = number
    assert [int(slab.memory[0]) for slab in used] == list(range(len(used)))
    assert all((slab.memory == slab.memory[0]).all() for slab in used)
