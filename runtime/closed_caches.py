"""Caches that no request uses: they keep their bindings, and what stands in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .cache import Cache
from .memory.pool import Pool
from .prefix import Content


class ClosedCaches:
    """The cache that was closed last is always kept; those before it are entries of the pool, as long as it has room.

    Not safe for several threads: whoever calls holds the pool's lock.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._caches: list[Cache] = []

    def take(self, fits: Callable[[Cache], bool], wanted: Sequence[Content]) -> Cache | None:
        """Of those that fit the one whose first rows hold the most of `wanted`, the latest of equals."""
        fitting = [cache for cache in self._caches if fits(cache)]
        if not fitting:
            return None
        cache = max(fitting, key=lambda c: sum(c.held_of(row, content) for row, content in enumerate(wanted)))
        self._caches.remove(cache)
        self._pool.remove(_key(cache))
        if self._caches:
            self._pool.remove(_key(self._caches[0]))
        return cache

    def put(self, cache: Cache) -> None:
        """Keep a cache."""
        self._caches.insert(0, cache)
        if len(self._caches) > 1:
            before = self._caches[1]
            self._pool.store(_key(before), _Entry(self._caches, before))

    def recall(self, cache: Cache, row: int, content: Content) -> int:
        """Bring the most of `content` that any cache holds into a row of `cache`; gives the number of its tokens."""
        own = cache.held_of(row, content)
        sources = [(c.held_of(place, content), c, place) for c in self._caches for place in range(len(c.lengths))]
        most, source, place = max(sources, key=lambda found: found[0], default=(0, cache, row))
        if most <= own:
            return own
        cache.take_over(source, place, row, own, most)
        return most


class _Entry:
    """A cache in the pool; without its entry it is kept only as the last one."""

    def __init__(self, caches: list[Cache], cache: Cache) -> None:
        self._caches, self._cache = caches, cache

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    def drop(self) -> None:
        if self._cache in self._caches[1:]:
            self._caches.remove(self._cache)


def _key(cache: Cache) -> tuple[str, int]:
    return "cache", id(cache)
