"""A damaged engine fails `speceyes-compile check`, which names the part; integrity alone does not see it."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from speceyes.compile.accuracy.check import check_bundle
from speceyes.compile.cli import run
from speceyes.engines.bundle import Bundle
from speceyes.runtime.cache import Cache

from . import bundles
from .damage import change_graph, change_weight, shift_cache_write

Change = Callable[[onnx.ModelProto], None]


def larger(weight: np.ndarray) -> np.ndarray:
    return weight * np.float32(1.01)


def rolled(weight: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.roll(weight, 1, axis=1))


def check(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and parts of the report, after the bundle has passed all that looks at hashes."""
    Bundle.open(folder, verify=True)
    code = run(["check", str(folder), "--threads", "1", "--json"])
    return code, json.loads(capsys.readouterr().out)["parts"]


DAMAGE: dict[str, tuple[str, Change, set[str]]] = {
    "a weight of the decoder": ("decoder", partial(change_weight, change=larger), {"decoder", "session"}),
    "the cache write": ("decoder", shift_cache_write, {"decoder", "session"}),
    "a weight of the vision part": ("vision", partial(change_weight, change=larger), {"vision"}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_to_fp32_engines(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    part, change, failing = DAMAGE[name]
    copy = Path(shutil.copytree(bundle, tmp_path / "model.speceyes"))
    change_graph(copy, part, lambda model: None)
    assert check(copy, capsys)[0] == 0
    change_graph(copy, part, change)
    code, parts = check(copy, capsys)
    assert code == 1
    assert {name for name, found in parts.items() if not found["passed"]} == failing


INT8: dict[str, tuple[str, Change, str]] = {
    "a weight of the decoder": ("decoder", partial(change_weight, change=rolled), "decoder"),
    "the cache write": ("decoder", shift_cache_write, "decoder"),
    "a weight of the vision part": ("vision", partial(change_weight, change=rolled), "vision"),
}


@pytest.mark.parametrize("name", INT8)
def test_damage_to_int8_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    part, change, failing = INT8[name]
    copy = Path(shutil.copytree(bundles.bundle("idefics3", "int8"), tmp_path / "model.speceyes"))
    change_graph(copy, part, change)
    code, parts = check(copy, capsys)
    assert code == 1
    assert not parts[failing]["passed"]
    assert parts["vision"]["passed"] == (failing != "vision")


def test_people_are_told_which_part_failed(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "model.speceyes"))
    change_graph(copy, "vision", partial(change_weight, change=larger))
    assert run(["check", str(copy), "--threads", "1"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "model.speceyes, onnxruntime-cpu: FAILED"
    assert [line.split()[0] for line in shown[2:5] if line.endswith("FAILED")] == ["vision"]


def test_an_engine_that_cannot_be_loaded_is_a_part_that_failed(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "model.speceyes"))

    def unknown(model: onnx.ModelProto) -> None:
        model.graph.node[0].op_type = "NoSuchOperator"

    change_graph(copy, "vision", unknown)
    report = check_bundle(Bundle.open(copy), threads=1)
    assert "ONNX Runtime" in str(report.parts["vision"].fault)
    assert (report.passed, report.parts["vision"].passed, report.parts["decoder"].passed) == (False, False, True)


def test_a_round_that_does_not_roll_back_fails_the_session(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "rewind", lambda cache, row, length: None)
    report = check_bundle(Bundle.open(bundle), threads=1)
    assert not report.parts["session"].passed
    assert report.parts["session"].replay_error is not None and report.parts["session"].replay_error > 0.1
    assert report.parts["decoder"].passed
