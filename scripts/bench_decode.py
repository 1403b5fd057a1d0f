"""Measure ours against transformers' `generate` on one checkpoint, interleaved in one run; JSON out.

    python scripts/seeded_checkpoint.py build/smolvlm-256m
    python scripts/bench_decode.py build/smolvlm-256m --json build/bench_decode.json

Each system lives in a process of its own, so that memory and load time are its own, and idles while another one runs.
The order of the systems is drawn anew in every round. Ratios are taken round by round; the table shows their medians.
Ours decodes plainly, without drafts. Host time is the processor time between two steps, outside ONNX Runtime. A second
table tells what a step costs by its width in tokens, the widths taking turns (`--widths 0` leaves it out). Systems use
every core they may run on: `taskset -c 0` before the command measures on one.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from speceyes.scripts.bench_systems import REFERENCE, Worker

OURS = ("fp32", "int8", "int4")
WIDEST = 16
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
PACKAGES = ("torch", "transformers", "onnxruntime", "speceyes")


def build_bundles(checkpoint: Path, systems: list[str]) -> dict[str, Path]:
    """Compile what is missing, each in a process of its own. Seeded weights keep no bound of accuracy: unchecked."""
    paths = {REFERENCE: checkpoint}
    for precision in systems:
        if precision == REFERENCE:
            continue
        paths[precision] = checkpoint.with_name(f"{checkpoint.name}-{precision}.speceyes")
        if not paths[precision].exists():
            parts = precision if precision != "int4" else "decoder=int4,vision=int8"
            command = ["speceyes-compile", "build", str(checkpoint), "-o", str(paths[precision])]
            command += ["--precision", parts, "--no-check"]
            subprocess.run([Path(sys.executable).with_name(command[0]), *command[1:]], check=True)
    return paths


def measure(
    workers: dict[str, Worker], batches: list[int], rounds: int, tokens: int, seed: int
) -> list[dict[str, Any]]:
    """All rounds of all systems; the first of each batch size warms up and is dropped."""
    order, runs = random.Random(seed), []
    for batch in batches:
        for turn in range(rounds + 1):
            for system in order.sample(sorted(workers), len(workers)):
                run = workers[system].run(batch, tokens)
                print(f"batch {batch} round {turn} {system}: {run['tokens_per_second']:.1f} tokens/s", file=sys.stderr)
                if turn:
                    runs.append({"system": system, "batch": batch, "round": turn, **run})
    return runs


def summarise(runs: list[dict[str, Any]], workers: dict[str, Worker]) -> list[dict[str, Any]]:
    """Medians per system and batch size, ratios to transformers taken within each round."""
    rows = []
    for batch in sorted({run["batch"] for run in runs}):
        chosen = [run for run in runs if run["batch"] == batch]
        reference = {run["round"]: run for run in chosen if run["system"] == REFERENCE}
        for system in workers:
            mine = [run for run in chosen if run["system"] == system]
            row: dict[str, Any] = {"system": system, "batch": batch}
            for key in ("vision", "first_token", "tokens_per_second"):
                row[key] = statistics.median(run[key] for run in mine)
                row[f"{key}_ratio"] = statistics.median(run[key] / reference[run["round"]][key] for run in mine)
            if system != REFERENCE:
                row["host_ms_per_step"] = statistics.median(run["host_ms_per_step"] for run in mine)
            row["peak_bytes"] = max(run["peak_bytes"] for run in mine)
            row["cache_bytes"] = mine[0].get("cache_bytes")
            row["same_tokens"] = mine[0]["tokens"] == reference[mine[0]["round"]]["tokens"]
            rows.append({**row, **workers[system].facts})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| system | batch | vision s | first token s | tokens/s | host ms a step | load s | weights MB | peak MB "
        "| same tokens |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["system"], str(row["batch"])]
        for key, digits in (("vision", 2), ("first_token", 2), ("tokens_per_second", 1)):
            cells.append(f"{row[key]:.{digits}f} ({row[f'{key}_ratio']:.2f})")
        cells.append(f"{row['host_ms_per_step']:.2f}" if "host_ms_per_step" in row else "")
        cells.append(f"{row['load_seconds']:.2f}")
        cells += [f"{row[key] / 1e6:.0f}" for key in ("weight_bytes", "peak_bytes")]
        lines.append(f"| {' | '.join([*cells, 'yes' if row['same_tokens'] else 'no'])} |")
    return "\n".join(lines)


def widths_table(widths: dict[str, dict[str, float]]) -> str:
    """Milliseconds of a step by width, in brackets the ratio to the step of two tokens."""
    numbers = list(next(iter(widths.values())))
    lines = [f"| tokens a step | {' | '.join(numbers)} |", "|---" * (1 + len(numbers)) + "|"]
    for system, costs in widths.items():
        cells = [f"{costs[number]:.1f} ({costs[number] / costs['2']:.2f})" for number in numbers]
        lines.append(f"| {system} | {' | '.join(cells)} |")
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    flags = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", flags)
    return {
        "cpu": name.group(1) if name else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "features": [feature for feature in FEATURES if f" {feature}" in flags],
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in PACKAGES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--systems", nargs="+", default=[REFERENCE, *OURS], choices=[REFERENCE, *OURS])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--widths", type=int, default=WIDEST, help="the widest step measured; 0 measures none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all runs, the summary and the environment to this file")
    arguments = parser.parse_args()
    if REFERENCE not in arguments.systems:
        parser.error(f"--systems: {REFERENCE} is needed, ratios are taken to it")
    if arguments.widths == 1 or arguments.widths < 0:
        parser.error(f"--widths: found {arguments.widths}; 0 or at least 2 is needed, ratios are taken to width 2")
    paths = build_bundles(arguments.checkpoint, arguments.systems)
    workers = {system: Worker(system, path) for system, path in paths.items()}
    try:
        runs = measure(workers, arguments.batches, arguments.rounds, arguments.tokens, arguments.seed)
        ours = {system: worker for system, worker in workers.items() if system != REFERENCE and arguments.widths}
        widths = {system: worker.widths(arguments.widths) for system, worker in ours.items()}
    finally:
        for worker in workers.values():
            worker.close()
    rows = summarise(runs, workers)
    print(table(rows))
    if widths:
        print(f"\n{widths_table(widths)}")
    if arguments.json:
        report = {"environment": environment(), "command": sys.argv, "summary": rows, "widths": widths, "runs": runs}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
