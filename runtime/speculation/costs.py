"""What a pass costs, by rows and width: measured at the build, measured again at load, corrected by every pass."""

from collections.abc import Mapping

import numpy as np

SMOOTHING = 0.1
_OUTLIER = 3.0


class Average:
    """A running mean of seconds; a busy moment of the machine counts as `_OUTLIER` times the mean at most."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, seconds: float) -> None:
        known = self.value or seconds
        self.value = known + SMOOTHING * (min(seconds, _OUTLIER * known) - known)


def refresh(table: Mapping[str, float], measured: Mapping[int, float]) -> dict[str, float]:
    """`table`, milliseconds by width, as this machine is now: `measured` gives the seconds of a few of its widths."""
    at = {int(width): cost for width, cost in table.items()}
    known = sorted(width for width in measured if at.get(width))
    if not known:
        return dict(table)
    ratios = [measured[width] * 1e3 / at[width] for width in known]
    return {str(width): cost * float(np.interp(width, known, ratios)) for width, cost in at.items()}


class Costs:
    """Seconds of passes.

    `table`: milliseconds by width of one row; `min_width`: what narrower passes are padded to.
    """

    def __init__(self, table: Mapping[str, float], min_width: int = 1) -> None:
        self._min_width = min_width
        pairs = sorted((int(width), cost / 1e3) for width, cost in table.items())
        self._widths = [width for width, _ in pairs] or [1, 16]
        # A pass costs no less than a narrower one: what says otherwise was a busy moment of the machine.
        seconds = [seconds for _, seconds in pairs] or [1e-3, 1e-3]
        self._seconds = [min(seconds[index:]) for index in range(len(seconds))]
        self._scale = 1.0
        self._measured: dict[tuple[int, int], float] = {}

    def seconds(self, rows: int, width: int) -> float:
        """Seconds of a pass over `rows` sequences of `width` tokens."""
        known = self._measured.get((rows, width))
        if known is not None:
            return known
        # Between drafts a pass finds colder caches than plain steps do: if it takes longer, that says nothing of them.
        scale = self._scale if width > 1 else min(self._scale, 1.0)
        return self._prior(rows, width) * scale

    def observe(self, rows: int, width: int, seconds: float) -> None:
        """A pass took so long."""
        expected = self.seconds(rows, width)
        seconds = min(seconds, _OUTLIER * expected)
        self._measured[rows, width] = expected + SMOOTHING * (seconds - expected)
        prior = self._prior(rows, width)
        self._scale += SMOOTHING * (seconds / prior - self._scale) if prior else 0.0

    def _prior(self, rows: int, width: int) -> float:
        """The build's curve, straight between its points and beyond the last ones."""
        tokens = rows * max(width, self._min_width)
        widths, seconds = self._widths, self._seconds
        if tokens <= widths[-1] or len(widths) < 2:
            return float(np.interp(tokens, widths, seconds))
        slope = (seconds[-1] - seconds[0]) / (widths[-1] - widths[0])
        return seconds[-1] + max(slope, 0.0) * (tokens - widths[-1])
