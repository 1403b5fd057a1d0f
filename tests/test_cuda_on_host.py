"""The device's side of the runtime on a driver that lives on the host: see tests/cuda_on_host/driver.c."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "cuda_on_host"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc: the host's CUDA driver cannot be compiled")
def test_buffers_graphs_and_the_decode_loop_on_the_hosts_driver(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed; `pip install cuda-bindings`")
    library = tmp_path / "libcuda.so.1"
    compiler = ["gcc", "-O1", "-Wall", "-Werror", "-Wno-unused-parameter", "-shared", "-fPIC"]
    subprocess.run([*compiler, HERE / "driver.c", "-o", library], check=True)
    command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider", HERE / "cases.py"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-6000:]
    print(found.stdout.splitlines()[-1])
