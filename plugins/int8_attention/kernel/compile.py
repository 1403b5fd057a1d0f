"""Compile the kernels with nvcc; no GPU is needed.

`python -m speceyes.plugins.int8_attention.kernel.compile` prints what they take.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CAPABILITIES = (80, 86, 89, 90, 100, 120)
SOURCE = Path(__file__).with_name("kernels.cu")


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor: registers a thread, bytes of shared memory, bytes spilled."""

    registers: int
    shared: int
    spilled: int


def missing_tools() -> list[str]:
    """Of nvcc and ptxas those that are not on the path."""
    return [name for name in ("nvcc", "ptxas") if shutil.which(name) is None]


def compile_ptx(capability: int, out: Path) -> Path:
    """PTX for a compute capability (86 for 8.6). Raises CalledProcessError with nvcc's words in `stderr`."""
    _run("nvcc", "-std=c++17", f"-arch=compute_{capability}", "-ptx", str(SOURCE), "-o", str(out))
    return out


def assemble(ptx: Path, capability: int) -> dict[str, Resources]:
    """Assemble PTX with ptxas; what each kernel takes. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        told = _run("ptxas", f"-arch=sm_{capability}", "-v", str(ptx), "-o", str(Path(folder) / "kernels.cubin"))
    found = {}
    for part in told.split("Compiling entry function '")[1:]:
        numbers = {
            name: int(match[1]) if (match := re.search(pattern, part)) else 0
            for name, pattern in (
                ("registers", r"Used (\d+) registers"),
                ("shared", r"(\d+) bytes smem"),
                ("spilled", r"(\d+) bytes spill stores"),
            )
        }
        found[part.split("'")[0]] = Resources(**numbers)
    return found


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def main() -> int:
    """Registers of every kernel for every compute capability."""
    if missing := missing_tools():
        print(f"error: {', '.join(missing)} not found; install CUDA's compiler (nvcc 13.0)", file=sys.stderr)
        return 1
    table: dict[str, dict[int, Resources]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for capability in CAPABILITIES:
            for name, taken in assemble(compile_ptx(capability, Path(folder) / "kernels.ptx"), capability).items():
                table.setdefault(name, {})[capability] = taken
    print("| kernel |", " | ".join(f"sm_{capability}" for capability in CAPABILITIES), "|")
    print("|---|" + "---|" * len(CAPABILITIES))
    for name, row in sorted(table.items()):
        print(f"| `{name}` |", " | ".join(str(row[capability].registers) for capability in CAPABILITIES), "|")
    spilled = sum(taken.spilled for row in table.values() for taken in row.values())
    shared = max(taken.shared for row in table.values() for taken in row.values())
    print(f"\nRegisters a thread; {spilled} bytes spilled, {shared} bytes of shared memory.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
