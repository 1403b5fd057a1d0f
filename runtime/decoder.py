"""The decoder engine of a bundle, and its caches as they are opened and closed."""

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ..engines.engine import Engine
from ..engines.errors import EngineError
from ..engines.manifest import ModelEntry
from .cache import Cache
from .closed_caches import ClosedCaches
from .memory.pool import Pool
from .prefix import Content

CAPACITY_STEP = 128
PREFILL_CHUNK = 128
EVEN_ABOVE = 32


class Decoder:
    """The decoder engine of a bundle."""

    def __init__(
        self,
        engine: Engine,
        model: ModelEntry,
        min_width: int,
        seams: Sequence[int] = (),
        pool: Pool | None = None,
        max_width: int | None = None,
    ) -> None:
        """`min_width`, `seams`, `max_width`: what the manifest says of steps that give the same bits.

        `pool` keeps closed caches, but for the last one, which is always kept; without a budget none remembers what
        stands in it.
        """
        self.max_width = max_width
        self.engine, self.model, self.min_width, self.seams = engine, model, min_width, seams
        self.has_vision = "image_features" in engine.inputs
        self._no_features = engine.allocate((1, model.hidden), np.float32)
        self.places = np.arange(model.context_length)
        self._pool = pool or Pool(0)
        self._closed = ClosedCaches(self._pool)

    def pad(self, width: int) -> int:
        """The width of a pass that holds `width` tokens: at least the engine's minimal one, and even.

        Attention kernels cut the rows of a pass into blocks; a last row alone in its block differs in its last bits.
        """
        wide = max(width, self.min_width)
        return wide + wide % 2 if wide > EVEN_ABOVE else wide

    def open(self, rows: int, tokens: int, wanted: Sequence[Content] = ()) -> Cache:
        """A cache for `rows` sequences of at most `tokens` tokens; a closed one, with its bindings, where it fits.

        Its first rows hold as much of the beginnings of `wanted` as closed caches held, but for the last token of each.
        """
        capacity = self._capacity(self.pad(tokens + self.min_width))
        with self.lock:
            closed = self._closed.take(
                lambda c: len(c.lengths) == rows and capacity <= c.capacity <= 2 * capacity, wanted
            )
            cache = closed or Cache(self, rows, capacity)
            for row, content in enumerate(wanted):
                cache.lengths[row] = self._closed.recall(cache, row, content)
            cache.held = [None] * rows
        return cache

    def close(self, cache: Cache, held: Mapping[int, Content] = MappingProxyType({})) -> None:
        """`cache` is not needed any more. `held`: what stands in some of its rows, for requests that begin alike."""
        cache.lengths[:] = [0] * len(cache.lengths)
        cache.held = [held.get(row) if self.remembers else None for row in range(len(cache.lengths))]
        with self.lock:
            self._closed.put(cache)

    @property
    def lock(self) -> threading.RLock:
        """Held while caches change hands; whoever closes one to open it at once for somebody holds it meanwhile."""
        return self._pool.lock

    @property
    def remembers(self) -> bool:
        """Whether what stands in closed caches may serve requests that begin alike.

        There is a budget for it, and tokens have the same bits whatever steps they came by.
        """
        return bool(self._pool.budget) and self.max_width is None

    @property
    def room(self) -> int:
        """The most tokens that a prompt and its answer may have together, beside a draft being verified."""
        fixed = self._fixed
        return self.model.context_length if fixed is None else min(self.model.context_length, fixed - self.min_width)

    @property
    def _fixed(self) -> int | None:
        slots = next((spec.shape[2] for name, spec in self.engine.inputs.items() if name.startswith("cache_")), "")
        return slots if isinstance(slots, int) else None

    def _capacity(self, wanted: int) -> int:
        """The slots of a cache that has room for `wanted`; an engine may have been built for one number alone."""
        fixed = self._fixed
        if fixed is None:
            return -(-wanted // CAPACITY_STEP) * CAPACITY_STEP
        if wanted > fixed:
            raise EngineError(
                f"cache: {wanted} slots are needed and the engine was built for {fixed}; shorten the request, or build "
                f"with `--set tensorrt.capacity={wanted}`"
            )
        return fixed
