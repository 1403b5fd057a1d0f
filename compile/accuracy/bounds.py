"""What a pack demands: a margin around the error that the engine had when it was built."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...engines.manifest import PackEntry
from .figures import Figures

RTOL = 1e-5

FLOOR = 1e-4
"""Least tolerance, as a share of the largest magnitude: other kernels of fp32 sum up in another order."""

NAMED = ("logits", "hidden")
"""Outputs with tolerances of their own; the others share one, so that a command line names no layer."""

DRAFTED = ("next_token",)
"""Token ids that get one too, where the engine's are not the reference's; elsewhere they are counted alone."""

REST = "*"


@dataclass(frozen=True)
class Judged:
    """An output's figures beside its tolerances; true when it keeps them."""

    figures: Figures
    atol: float
    within: bool
    cosine_bound: float

    def __bool__(self) -> bool:
        return self.figures.discrete or (self.within and self._turned_little())

    def _turned_little(self) -> bool:
        return self.figures.cosine is None or self.figures.cosine >= self.cosine_bound


def tolerance(entry: PackEntry, name: str) -> float:
    """Largest absolute error allowed for an output, beside the relative one."""
    return entry.atol.get(name, entry.atol.get(REST, 0.0))


def make_entry(path: str, figures: Iterable[Mapping[str, Figures]], margin: float) -> PackEntry:
    """Bounds from the figures of each run by output.

    Agreement may be lower by one row, whose best elements may lie closer than the error.
    """
    runs = list(figures)
    atol: dict[str, float] = {REST: 0.0}
    for name, found in ((name, found) for run in runs for name, found in run.items()):
        if not found.discrete:
            key = name if name in NAMED else REST
            wanted = round_up(max(margin * found.max_abs_error, FLOOR * found.largest))
            atol[key] = max(atol.get(key, 0.0), wanted)
        elif found.max_abs_error and name in DRAFTED:
            atol[name] = max(atol.get(name, 0.0), margin * found.max_abs_error)
    agreed, rows = count_agreement(runs)
    return PackEntry(
        path=path,
        atol=atol,
        rtol=RTOL,
        cosine=math.floor((1 - max(margin * (1 - lowest(runs)), FLOOR)) * 1e6) / 1e6,
        agreement=max(0.0, agreed - 1) / rows if rows else 0.0,
    )


def lowest(runs: Iterable[Mapping[str, Figures]]) -> float:
    """The lowest cosine of any row of any output."""
    found = (figures.cosine for run in runs for figures in run.values())
    return min((cosine for cosine in found if cosine is not None), default=1.0)


CHOICES = ("tokens", "logits", "next_token")
"""Outputs that choose tokens; the first that a part has tells its agreement."""


def count_agreement(runs: Iterable[Mapping[str, Figures]]) -> tuple[int, int]:
    """Rows that choose the reference's token, and all rows; none for a part that chooses no tokens."""
    agreed = rows = 0
    for run in runs:
        name = next((name for name in CHOICES if name in run), None)
        if name is not None:
            agreed, rows = agreed + run[name].agreed, rows + run[name].rows
    return agreed, rows


def round_up(value: float) -> float:
    """To two significant digits."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")
