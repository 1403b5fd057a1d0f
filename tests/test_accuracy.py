"""Accuracy packs: their arithmetic by hand, their files as Polygraphy sees them, and bundles that pass."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from polygraphy.comparator import RunResults
from polygraphy.json import load_json, save_json
from speceyes.compile.accuracy.bounds import make_entry, round_up, tolerance
from speceyes.compile.accuracy.check import check_bundle
from speceyes.compile.accuracy.figures import compare, lowest_cosine, within
from speceyes.compile.accuracy.pack import SESSION, Pack, pack_path
from speceyes.compile.accuracy.sample import PREFILL, TOKENS, WINDOW, Sample, cut_prompt, step_sample
from speceyes.compile.cli import run
from speceyes.engines.bundle import Bundle
from speceyes.engines.errors import BundleError, EngineError
from speceyes.runtime.processing.prompt import Prompt, Tile

from . import bundles
from .damage import reseal

Capture = pytest.CaptureFixture[str]


def test_figures_by_hand() -> None:
    wanted = np.array([[3, 4], [0, 0], [1, 0]], np.float32)
    found = np.array([[3, 4], [0, 0], [3, 4]], np.float32)
    figures = compare("x", wanted, found)
    assert (figures.max_abs_error, figures.largest, figures.agreed, figures.rows) == (4.0, 4.0, 2, 3)
    assert figures.cosine == pytest.approx(0.6)
    assert lowest_cosine([[1, 0]], [[0, 0]]) == 0
    ids = compare("ids", np.array([5, 6, 7]), np.array([5, 6, 9]))
    assert (ids.max_abs_error, ids.cosine, ids.agreed, ids.rows, ids.discrete) == (2, None, 2, 3, True)


def test_what_cannot_be_compared_is_named() -> None:
    ones = np.ones((2, 2), np.float32)
    with pytest.raises(EngineError, match=r"x: found \[2, 2\]; the reference has \[4, 1\]"):
        compare("x", ones.reshape(4, 1), ones)
    with pytest.raises(EngineError, match=r"x: 1 of 4 values are not finite"):
        compare("x", ones, np.array([[1, np.nan], [1, 1]], np.float32))


def test_an_element_may_be_off_by_both_tolerances_together() -> None:
    wanted = np.array([0.0, 100.0])
    for error, allowed in (((0.5, 1.5), True), ((0.5, 1.51), False), ((0.51, 0.0), False)):
        assert within(wanted, wanted + np.array(error), atol=0.5, rtol=0.01) == allowed


def test_bounds_are_a_margin_around_what_was_measured() -> None:
    wanted = np.array([[10.0, 0.0], [0.0, 10.0]], np.float32)
    found = np.array([[10.0, 0.1], [0.0, 10.0]], np.float32)
    entry = make_entry(
        "accuracy/x", [{"logits": compare("logits", wanted, found), "rest": compare("r", wanted, wanted)}], 2
    )
    assert entry.atol == {"logits": pytest.approx(0.21, abs=0.011), "*": 0.001}
    assert tolerance(entry, "logits") > 0.2 and tolerance(entry, "present_k.7") == 0.001
    assert entry.cosine == pytest.approx(1 - 2 * (1 - 10 / np.hypot(10, 0.1)), abs=2e-6)
    assert entry.agreement == 0.5
    assert (round_up(0.0), round_up(0.1234), round_up(98.7), round_up(1e-9)) == (0.0, 0.13, 99.0, 1e-9)


def prompt(features: list[int], text: int) -> Prompt:
    """Tiles of so many features, then text; token ids count up."""
    count = sum(features)
    length = count + text
    index = np.array([*range(count), *[-1] * text])
    tiles = tuple(Tile({"pixel_values": np.full(1, number)}, size) for number, size in enumerate(features))
    return Prompt(np.arange(length), index, np.arange(length), length, tiles, 1 if tiles else 0)


def test_the_session_takes_the_end_of_the_request() -> None:
    cut = cut_prompt(prompt([100, 20], 10))
    assert cut.token_ids.tolist() == list(range(100, 130)) == cut.position_ids.tolist()
    assert cut.feature_index.tolist() == [*range(20), *[-1] * 10]
    assert [tile.inputs["pixel_values"][0] for tile in cut.tiles] == [1]
    assert cut.next_position == 130
    long = cut_prompt(prompt([100], 10))
    assert len(long.token_ids) == TOKENS and long.feature_index[0] == 110 - TOKENS
    short = cut_prompt(prompt([], 5))
    assert short.token_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert (short.next_position, short.feature_index.max()) == (PREFILL + WINDOW, -1)


def test_the_steps_lie_where_picture_and_text_meet() -> None:
    cut = cut_prompt(prompt([20], 20))
    steps = step_sample(Sample(cut, None, None)).prompt
    assert len(steps.token_ids) == PREFILL + WINDOW
    assert (steps.feature_index[:5] >= 0).all() and (steps.feature_index[5:] < 0).all()


def test_packs_are_what_polygraphy_writes(bundle: Path) -> None:
    for name in ("decoder", "vision", SESSION):
        pack = Pack(bundle, pack_path(name))
        feeds = load_json(str(pack.folder / "inputs.json"))
        results = RunResults.load(str(pack.folder / "outputs.json"))
        assert list(results.keys()) == ["fp32"] and len(results["fp32"]) == len(feeds) == (
            2 if name == "decoder" else 1
        )
        for feed, own in zip(feeds, pack.feeds(), strict=True):
            assert feed.keys() == own.keys()
            assert all((feed[name] == own[name]).all() for name in feed)
        code = f"import runpy; print(len(list(runpy.run_path({str(pack.folder / 'data_loader.py')!r})['load_data']())))"
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert shown == f"{len(feeds)}\n"
    prefill, window = Pack(bundle, "accuracy/decoder").feeds()
    assert (prefill["write_index"][0], window["write_index"][0]) == (0, PREFILL)
    assert window["input_ids"].shape == (1, WINDOW) and np.abs(window["cache_k.1"][:, :, :PREFILL]).min() > 0


def test_the_session_is_the_fp32_graphs_own_answer(bundle: Path) -> None:
    (request,) = Pack(bundle, pack_path(SESSION)).feeds()
    (answer,) = Pack(bundle, pack_path(SESSION)).results()["fp32"]
    assert (answer["logits"].argmax(axis=-1) == request["answer_ids"]).all()
    assert len(set(request["answer_ids"].tolist())) > 2
    assert request["feature_index"].max() == len(request["image_features"]) - 1


@pytest.mark.parametrize(
    ("family", "precision"), [("idefics3", "int8"), ("qwen2_vl", "fp32"), ("gpt2", "int8"), ("gemma3_text", "fp32")]
)
def test_bundles_pass(family: str, precision: str) -> None:
    report = check_bundle(Bundle.open(bundles.bundle(family, precision)), threads=1)
    assert report.passed
    assert set(report.parts) == {"decoder", SESSION} | ({"vision"} if family in bundles.VISION else set())
    for part in report.parts.values():
        assert part.fault is None and part.cosine is not None and part.cosine_bound is not None
        assert part.cosine >= part.cosine_bound > 0.9
    assert report.parts[SESSION].replay_error == 0.0
    if precision == "fp32":
        assert report.parts["decoder"].agreement == report.parts[SESSION].agreement == 1.0


def test_the_report_for_people_and_as_json(bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(["check", str(bundle), "--threads", "1", "--report", str(tmp_path / "report.json")]) == 0
    shown = capsys.readouterr().out
    assert "bundle" not in shown and "passed" in shown.splitlines()[0]
    assert [line.split()[0] for line in shown.splitlines()[2:5]] == ["decoder", "session", "vision"]
    assert run(["check", str(bundle), "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    decoder = report["parts"]["decoder"]
    assert decoder["outputs"][decoder["worst_output"]]["max_abs_error"] == decoder["max_abs_error"] < 1e-4
    assert {"present_k.0", "present_v.1", "logits", "hidden"} <= decoder["outputs"].keys()
    assert report["environment"]["onnxruntime"]


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "model.speceyes"))


def test_a_bundle_without_packs_says_how_to_get_them(copy: Path, capsys: Capture) -> None:
    for name in ("decoder", "vision", SESSION):
        shutil.rmtree(copy / "accuracy" / name)
    document = json.loads((copy / "manifest.json").read_text())
    document["targets"]["onnxruntime-cpu"]["packs"] = {}
    document["files"] = [entry for entry in document["files"] if (copy / entry["path"]).exists()]
    (copy / "manifest.json").write_text(json.dumps(document))
    assert run(["check", str(copy)]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    assert "there is no accuracy pack for decoder, vision, session" in error and "accuracy.enabled=true" in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "accuracy/vision/inputs.json: it cannot be read"),
        ("[]", "accuracy/vision/inputs.json: a list of named arrays is expected"),
        ('[{"x": {"polygraphy_class": "Tensor", "tensor": ""}}]', "found 'Tensor'; allowed: ndarray"),
        ('[{"x": {"__polygraphy_encoded_Tensor": "polygraphy_serialized_json_type"}}]', "allowed: ndarray"),
        ('[{"x": {"polygraphy_class": "ndarray", "array": "AAAA"}}]', "it cannot be read"),
    ],
)
def test_a_pack_is_read_with_distrust(copy: Path, text: str, message: str) -> None:
    (copy / "accuracy/vision/inputs.json").write_text(text)
    reseal(copy)
    with pytest.raises(BundleError) as caught:
        check_bundle(Bundle.open(copy), threads=1)
    assert message in str(caught.value) and "build the bundle again" in str(caught.value)


def test_a_pack_for_other_inputs_is_a_fault_of_the_part(copy: Path) -> None:
    path = copy / "accuracy/vision/inputs.json"
    (feed,) = load_json(str(path))
    save_json([{"other": feed["pixel_values"][..., :5]}], str(path))
    reseal(copy)
    report = check_bundle(Bundle.open(copy), threads=1)
    assert not report.passed and "Polygraphy could not run it" in str(report.parts["vision"].fault)
    assert report.parts["decoder"].passed


def test_thresholds_are_the_manifests(copy: Path) -> None:
    opened = Bundle.open(copy)
    build = opened.manifest.targets["onnxruntime-cpu"]
    packs = {**build.packs, "decoder": replace(build.packs["decoder"], cosine=1.1)}
    manifest = replace(opened.manifest, targets={"onnxruntime-cpu": replace(build, packs=packs)})
    report = check_bundle(replace(opened, manifest=manifest), threads=1)
    assert [name for name, part in report.parts.items() if not part.passed] == ["decoder"]
