"""The `polygraphy run` commands of a bundle pass as they are pasted into a shell, and fail a damaged engine."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from speceyes.compile.cli import run

from . import bundles
from .damage import change_graph, change_weight

PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def paste(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one line in a shell, in `folder`."""
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": PATH}, capture_output=True, text=True
    )


def commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert run(["check", str(folder), "--commands"]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_what_check_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str) -> None:
    copy = Path(shutil.copytree(bundles.bundle("idefics3", precision), tmp_path / "my model.speceyes"))
    lines = commands(copy, capsys)
    assert [Path(shlex.split(line)[2]).name for line in lines] == ["decoder.onnx", "vision.onnx"]
    for line, runs in zip(lines, (2, 1), strict=True):
        done = paste(line, Path("/"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"Passed: {runs}/{runs} iterations" in done.stdout


def test_what_stands_in_the_bundle(bundle: Path) -> None:
    text = (bundle / "accuracy" / "README.md").read_text()
    lines = re.findall(r"^polygraphy .*$", text, re.MULTILINE)
    assert len(lines) == 2
    vision = next(line for line in lines if "vision.onnx" in line)
    assert "Passed: 1/1 iterations" in paste(vision, bundle).stdout


def test_the_inputs_may_come_from_the_script(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = commands(bundle, capsys)[0]
    words = shlex.split(line)
    place = words.index("--load-inputs")
    words[place : place + 2] = ["--data-loader-script", str(bundle / "accuracy/decoder/data_loader.py")]
    assert "Passed: 2/2 iterations" in paste(shlex.join(words), bundle.parent).stdout


def test_a_damaged_engine_fails(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "model.speceyes"))
    change_graph(copy, "decoder", partial(change_weight, change=lambda weight: weight * weight.dtype.type(1.01)))
    done = paste(commands(copy, capsys)[0], tmp_path)
    assert done.returncode != 0
    assert "FAILED" in done.stdout
