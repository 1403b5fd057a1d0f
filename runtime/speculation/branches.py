"""Rows of the cache for further branches: copies of a request's row, brought up to date by what is missing."""

from dataclasses import dataclass

from ..cache import Cache


@dataclass
class _Copy:
    """A row that equals the first `length` tokens of a request's."""

    request: int
    length: int


class BranchRows:
    """The rows of a cache behind those of the active requests."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._copies: dict[int, _Copy] = {}

    def lend(self, row: int, source: int, request: int) -> None:
        """Make `row` equal to row `source`, which belongs to `request`; copies what it does not hold already."""
        copy = self._copies.get(row)
        have = copy.length if copy and copy.request == request else 0
        length = self._cache.lengths[source]
        self._cache.copy(source, row, min(have, length), length)
        self._copies[row] = _Copy(request, length)

    def keep(self, row: int, length: int) -> None:
        """Only the first `length` tokens of `row` still equal its request's."""
        self._copies[row].length = length

    def forget(self, row: int) -> None:
        """`row` was overwritten."""
        self._copies.pop(row, None)
