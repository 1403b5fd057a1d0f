"""How far two token sequences agree."""

from collections.abc import Sequence


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
