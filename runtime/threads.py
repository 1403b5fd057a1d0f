"""How many threads an engine gets."""

from ..engines.manifest import EngineEntry

SMALL_STEP = 16_000_000
"""Weights in bytes below which a second thread costs a step more in waiting than it saves."""


def choose_threads(part: str, entry: EngineEntry, wanted: int | None) -> int | None:
    """Threads for an engine, None for all cores: those wanted, but one where a step is too short to be shared.

    The vision part is never that short: it reads its weights once for a whole tile.
    """
    if part.startswith("predictor"):
        return 1
    if wanted is None and part == "decoder" and entry.weight_bytes < SMALL_STEP:
        return 1
    return wanted
