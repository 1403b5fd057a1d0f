"""The kernels' launcher and the script for a GPU, on a driver that lives on the host and runs the kernels' source."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from speceyes.plugins.int8_attention.kernel import launches
from speceyes.plugins.int8_attention.kernel.compile import SOURCE

from .test_int8_attention_kernel import SPOILED, cuda_headers

HERE = Path(__file__).parent
SPEED = """
import json
from speceyes.engines.cuda import open_device
from speceyes.plugins.int8_attention.kernel.launch import Kernels
from speceyes.plugins.int8_attention.kernel.launches import Shape
from speceyes.scripts import gpu_kernels
gpu_kernels.OVERFLOW = 100_000
device = open_device()
found = gpu_kernels.speed(device, Kernels(), "float", Shape(1, 2, 2, 1, 256, 64), 2)
print(json.dumps([found, gpu_kernels.copy_speed(device, 2)]))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of libcuda.so.1."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed; `pip install cuda-bindings`")
    if shutil.which("g++") is None or shutil.which("gcc") is None:
        pytest.skip("no gcc and g++: the host's CUDA driver cannot be compiled")
    folder = tmp_path_factory.mktemp("driver")
    memory = ["gcc", "-O1", "-c", "-fPIC", "-DcuGetProcAddress_v2=driver_address", HERE / "cuda_on_host" / "driver.c"]
    subprocess.run([*memory, "-o", folder / "driver.o"], check=True)
    options = ["-O2", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", SPOILED, f"-I{SOURCE.parent}"]
    options += ["-isystem", str(cuda_headers())] if cuda_headers() else []
    sources = [HERE / "int8_kernels_driver.cpp", folder / "driver.o"]
    subprocess.run(["g++", *options, "-shared", "-fPIC", *sources, "-o", folder / "libcuda.so.1"], check=True)
    return folder


def run(driver: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_the_script_for_a_gpu_finds_the_numerics_right(driver: Path, tmp_path: Path) -> None:
    kinds = ["float", "half", "bfloat16"] if cuda_headers() else ["float"]
    chosen = [word for kind in kinds for word in ("--kind", kind)]
    script = str(HERE.parent / "scripts" / "gpu_kernels.py")
    found = run(driver, script, "--repeats", "0", "--json", str(tmp_path / "figures.json"), *chosen)
    assert (found.returncode, found.stderr) == (0, "numerics hold\n"), found.stderr[-3000:]
    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert figures["device"].startswith("host, ")
    assert [(one["kind"], one["head_dim"]) for one in figures["numerics"]] == [
        (kind, head_dim) for kind in kinds for head_dim in (64, 80, 96, 128, 256)
    ]
    assert all(one["codes_equal"] and one["bits_of_every_width_equal"] for one in figures["numerics"])
    assert all(0 < one["of_the_bound"] <= 1 for one in figures["numerics"])


def test_graphs_of_calls_are_captured_and_counted_in_bytes(driver: Path) -> None:
    """That the time is taken; what it is says nothing here."""
    found = run(driver, "-c", SPEED)
    assert found.returncode == 0, found.stderr[-3000:]
    speed, copy = json.loads(found.stdout)
    nbytes = 2 * 256 * (64 + 4)
    assert speed["gigabytes_per_second"] * speed["microseconds"] == pytest.approx(nbytes / 1e3)
    assert copy > 0


def test_what_the_driver_refuses_is_named(driver: Path) -> None:
    script = """
from speceyes.engines.cuda import open_device
from speceyes.plugins.int8_attention.kernel import launch
from speceyes.plugins.int8_attention.kernel.launches import Shape, steps
device, launch.THREADS = open_device(), 64
step = steps('float', Shape(1, 1, 1, 1, 1, 64), 1.0)[0]
with device.lock:
    launch.Kernels().issue(step, dict.fromkeys((*step.inputs, *step.outputs), 0), device.stream)
"""
    assert "RuntimeError: cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" in run(driver, "-c", script).stderr


def test_a_call_is_three_launches_over_its_shape() -> None:
    write, attend, join = launches.steps("half", launches.Shape(3, 5, 6, 2, 300, 64), 0.125)
    assert write.launch == ("write_half", (10, 2, 3), (5, 2, 300, 64))
    assert attend.launch == ("attend_half_64", (3, 2 * 2, 3), (0x3E000000, 5, 6, 2, 300))
    assert join.launch == ("join_half", (90, 1, 1), (3, 64))
    assert set(write.outputs) < set(attend.inputs) and set(attend.outputs) < set(join.inputs)
