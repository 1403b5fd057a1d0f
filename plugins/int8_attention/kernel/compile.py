"""Compile the kernels, without a GPU: `python -m speceyes.plugins.int8_attention.kernel.compile --table`."""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .ptx import BASELINE, SHIPPED, compiler

CAPABILITIES = (80, 86, 89, 90, 100, 120)
SOURCE = Path(__file__).with_name("kernels.cu")
OPTIONS = ("-std=c++17", "-fmad=false")
"""Without contraction: the source says where a product and a sum are rounded once."""


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor: registers a thread, bytes of shared memory a block, bytes spilled."""

    registers: int
    shared: int
    spilled: int


def missing_tools() -> list[str]:
    """Of nvcc and ptxas those that are not on the path."""
    return [name for name in ("nvcc", "ptxas") if shutil.which(name) is None]


def compile_ptx(capability: int = BASELINE) -> str:
    """PTX of all kernels for a compute capability (86 for 8.6). Raises CalledProcessError, nvcc's words in `stderr`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.ptx"
        _run("nvcc", *OPTIONS, f"-arch=compute_{capability}", "-ptx", str(SOURCE), "-o", str(out))
        return out.read_text()


def assemble(ptx: str, capability: int) -> tuple[bytes, dict[str, Resources]]:
    """The cubin that ptxas makes for a compute capability, and what each kernel takes. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "kernels.ptx", Path(folder) / "kernels.cubin"
        source.write_text(ptx)
        told = _run("ptxas", f"-arch=sm_{capability}", "-v", str(source), "-o", str(out))
        cubin = out.read_bytes()
    found = {}
    for part in told.split("Compiling entry function '")[1:]:
        registers, shared, *spilled = (
            sum(map(int, re.findall(pattern, part)))
            for pattern in (r"Used (\d+) registers", r"(\d+) bytes smem", r"(\d+) bytes spill")
        )
        found[part.split("'")[0]] = Resources(registers, shared, sum(spilled))
    return cubin, found


def write_shipped() -> Path:
    """Compile the PTX that the package brings, for compute capability BASELINE and everything above."""
    written = SHIPPED.with_suffix(".partial")
    written.write_bytes(gzip.compress(compile_ptx().encode(), mtime=0))
    os.replace(written, SHIPPED)
    return SHIPPED


def table() -> str:
    """Registers of every kernel on every compute capability as Markdown, from the PTX as it is shipped."""
    taken = {capability: assemble(compile_ptx(), capability)[1] for capability in CAPABILITIES}
    lines = ["| kernel | shared memory | " + " | ".join(f"sm_{capability}" for capability in CAPABILITIES) + " |"]
    lines.append("|---" * (2 + len(CAPABILITIES)) + "|")
    for name in sorted(taken[BASELINE], key=lambda name: [int(p) if p.isdigit() else p for p in name.split("_")]):
        row = [taken[capability][name] for capability in CAPABILITIES]
        lines.append(f"| `{name}` | {row[0].shared} | " + " | ".join(str(one.registers) for one in row) + " |")
    spilled = sum(one.spilled for row in taken.values() for one in row.values())
    return "\n".join([*lines, "", f"Registers a thread; {spilled} bytes spilled. {compiler(compile_ptx())}."])


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def main() -> int:
    """The command line: exit status 0, or 1 with one line on the error stream."""
    parser = argparse.ArgumentParser(
        prog="python -m speceyes.plugins.int8_attention.kernel.compile",
        description="Compile the kernels with nvcc; no GPU is needed.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--table", action="store_true", help="print what each kernel takes on each compute capability")
    what.add_argument("--write", action="store_true", help=f"compile {SHIPPED.name}, which the package brings")
    chosen = parser.parse_args()
    if missing := missing_tools():
        print(f"error: {' and '.join(missing)} not found; install the compiler of CUDA 13.0", file=sys.stderr)
        return 1
    try:
        print(table() if chosen.table else write_shipped())
    except subprocess.CalledProcessError as fault:
        print(f"error: {fault.cmd[0]}: {fault.stderr.strip()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
