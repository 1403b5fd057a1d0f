"""The kernels as the package brings them: PTX for compute capability 8.0 and above, one kernel at a time."""

from __future__ import annotations

import gzip
import re
from functools import cache
from pathlib import Path

BASELINE = 80
SHIPPED = Path(__file__).with_name("kernels.ptx.gz")

HEAD_DIMS = (64, 80, 96, 128, 256)
TYPES = ("float", "half", "bfloat16")
THREADS, ROWS = 128, 8
"""Threads of a block, and the query rows that one block of the attend kernels serves (arithmetic.h)."""


@cache
def shipped() -> str:
    """All kernels."""
    return gzip.decompress(SHIPPED.read_bytes()).decode()


def names(ptx: str) -> list[str]:
    """The kernels of a module, in its order."""
    return re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE)


def only(ptx: str, name: str) -> str:
    """The module with this kernel alone, for what is embedded once a layer. Raises ValueError for an unknown name."""
    header, *bodies = re.split(r"(?=^\.visible \.entry )", ptx, flags=re.MULTILINE)
    for body in bodies:
        if body.startswith(f".visible .entry {name}("):
            return re.sub(r"^\s*//.*\n", "", header, flags=re.MULTILINE) + body[: body.index("\n}") + 3]
    raise ValueError(f"kernel: found {name!r}; {', '.join(names(ptx))} exist")


def compiler(ptx: str) -> str:
    """The compiler's own words on its version; PTX of another one may differ from the same source."""
    found = re.search(r"^// (Cuda compilation tools.*)$", ptx, re.MULTILINE)
    return found[1] if found else "unknown compiler"
