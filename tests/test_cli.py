"""The command line from the outside: exit codes, what is on stdout and stderr, one line per error, no traceback."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import speceyes
import speceyes.compile.build as pipeline
from PIL import Image
from speceyes.compile.cli import run
from speceyes.compile.cli.guard import guard
from speceyes.compile.recipe import make_recipe
from speceyes.engines.bundle import Bundle
from speceyes.engines.schema import encode
from speceyes.runtime.options import Options

from .checkpoints import checkpoint, exported

Capture = pytest.CaptureFixture[str]
FAST = ("--set", "measure.repeats=1", "--set", "measure.past=8", "--set", "check.steps=4")


def fails(capture: Capture, *arguments: object) -> str:
    """Run a command that fails with exit code 1 and one line on stderr; give the line."""
    capture.readouterr()
    assert run([str(argument) for argument in arguments]) == 1
    out, error = capture.readouterr()
    assert out == ""
    assert error.startswith("error: ") and error.count("\n") == 1 and "Traceback" not in error
    return error


def hidden_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A copy of a checkpoint that a test may break."""
    return Path(shutil.copytree(checkpoint("idefics3"), tmp_path / "checkpoint"))


def test_help_and_version(capsys: Capture) -> None:
    for arguments in (["--help"], ["-h"], ["build", "--help"], ["inspect", "--help"], ["ask", "--help"], ["--version"]):
        assert run(arguments) == 0
        assert capsys.readouterr().err == ""


def test_no_command_shows_the_commands(capsys: Capture) -> None:
    assert run([]) == 2
    shown = "".join(capsys.readouterr())
    assert all(name in shown for name in ("build", "inspect", "ask"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["bild"],
        ["build"],
        ["build", "x"],
        ["build", "x", "-o"],
        ["ask", "x", "q", "--top-k", "many"],
        ["inspect", "--deep", "x"],
        ["ask", "x", "q", "--raw", "--system", "s"],
    ],
    ids=" ".join,
)
def test_wrong_usage(capsys: Capture, arguments: list[str]) -> None:
    assert run(arguments) == 2
    out, error = capsys.readouterr()
    assert out == "" and "Error: " in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "precison.decoder=int8"], "recipe.precison: unknown key; did you mean 'precision'?"),
        (["--set", "check.stepz=3"], "recipe.check.stepz: unknown key; did you mean 'steps'?"),
        (["--precision", "int2"], "recipe.precision.decoder: found 'int2'; allowed: fp32, int8, int4"),
        (["--precision", "decoder=int8,visoin=fp32"], "recipe.precision.visoin: unknown key; did you mean 'vision'?"),
        (["--target", "onnx"], "target 'onnx': unknown"),
        (["--recipe", "none.yaml"], "recipe 'none.yaml': it cannot be read"),
    ],
)
def test_options_are_read_before_any_work(capsys: Capture, tmp_path: Path, arguments: list[str], message: str) -> None:
    out = tmp_path / "x.speceyes"
    assert message in fails(capsys, "build", tmp_path / "none", "-o", out, *arguments)
    assert not out.exists()


def rewrite_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda f: shutil.rmtree(f), "no such folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: not found"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json: not valid JSON"),
    "unknown family": (lambda f: rewrite_config(f, model_type="mamba9"), "model_type 'mamba9' is not a known family"),
    "quantised": (lambda f: rewrite_config(f, quantization_config={"quant_method": "awq"}), "quantised (awq)"),
    "only .bin": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "weights are pickled (.bin)"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
    "cut weights": (lambda f: os.truncate(f / "model.safetensors", 1000), "model.safetensors: broken"),
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "build"])
def test_a_checkpoint_that_cannot_be_compiled(capsys: Capture, damaged: Path, fault: str, dry: bool) -> None:
    damage, message = BROKEN[fault]
    damage(damaged)
    out = damaged.parent / "x.speceyes"
    assert message in fails(capsys, "build", damaged, "-o", out, *(["--dry-run"] if dry else []))
    assert not out.exists() and hidden_files(out.parent) == []


def test_what_stands_at_the_output_is_not_replaced(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    message = fails(capsys, "build", checkpoint("idefics3"), "-o", tmp_path / "notes", "--dry-run")
    assert "it exists and is not a bundle" in message
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("command", [["inspect"], ["ask", "q"]], ids=["inspect", "ask"])
def test_not_a_bundle(capsys: Capture, tmp_path: Path, command: list[str]) -> None:
    name, *rest = command
    assert "there is no such folder" in fails(capsys, name, tmp_path / "none.speceyes", *rest)
    assert "holds no manifest.json" in fails(capsys, name, tmp_path, *rest)


def test_dry_run_builds_nothing(capsys: Capture, tmp_path: Path) -> None:
    out = tmp_path / "x.speceyes"
    assert run(["build", str(checkpoint("idefics3")), "-o", str(out), "--dry-run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["plan"]["parts"]) == ["decoder", "vision"]
    assert {name: part["precision"] for name, part in report["plan"]["parts"].items()} == {
        "decoder": "int8",
        "vision": "fp32",
    }
    assert report["recipe"]["target"] == "onnxruntime-cpu"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def quick_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the graphs that were exported once instead of tracing the model again."""
    graphs = exported("idefics3").parts
    monkeypatch.setattr(pipeline, "EXPORTERS", {part: partial(_copy, graph) for part, graph in graphs.items()})


def _copy(graph: ir.Model, checkpoint: object) -> ir.Model:
    return graph.clone()


def build(out: Path, *options: str) -> list[str]:
    return ["build", str(checkpoint("idefics3")), "-o", str(out), "--precision", "fp32", *FAST, *options]


def test_build_writes_a_bundle_that_says_what_it_is(capsys: Capture, tmp_path: Path, quick_export: None) -> None:
    out = tmp_path / "x.speceyes"
    assert run(build(out, "--json", "--set", "keep_graphs=true")) == 0
    report = json.loads(capsys.readouterr().out)
    opened = Bundle.open(out)
    manifest = opened.manifest
    assert report["bundle"] == str(out) and report["bytes"] == opened.size
    assert report["model"] == encode(manifest.model) and report["targets"] == encode(manifest.targets)
    assert [*report["seconds"]][:: len(report["seconds"]) - 1] == ["load", "seal"]
    assert hidden_files(tmp_path) == []

    engines = manifest.targets["onnxruntime-cpu"].engines
    assert set(engines) == {"decoder", "vision"}
    assert list(engines["decoder"].cost_ms) == ["1", "16", "2", "3", "4", "5", "6", "7", "8"]
    assert list(engines["vision"].cost_ms) == ["1"]
    assert engines["decoder"].accuracy["cosine"] > engines["decoder"].accuracy["cosine_bound"] == 0.9999
    assert engines["decoder"].accuracy["agreement"] == 1.0
    assert engines["vision"].accuracy["cosine"] > 0.99999
    assert {tensor.name for tensor in engines["decoder"].inputs} >= {"input_ids", "image_features", "cache_k.0"}

    recipe = make_recipe(out / "recipe.yaml")
    assert recipe.keep_graphs and recipe.check.steps == 4 and recipe.precision.decoder == "fp32"
    names = {entry.path for entry in manifest.files}
    assert names >= {"graphs/decoder.onnx", "graphs/vision.onnx", "processing.json", "tokenizer/tokenizer.json"}
    assert names >= {f"accuracy/{part}/{name}.json" for part in engines for name in ("inputs", "outputs")}
    assert set(manifest.targets["onnxruntime-cpu"].packs) == {"decoder", "session", "vision"}


def test_two_builds_give_the_same_files(tmp_path: Path, quick_export: None) -> None:
    recipe = make_recipe(assignments=FAST[1::2])
    first, second = (
        speceyes.compile(
            checkpoint("idefics3"), tmp_path / name, recipe=recipe, check={"enabled": False}
        ).bundle.manifest
        for name in ("a.speceyes", "b.speceyes")
    )
    assert len(first.files) == len(second.files) > 8
    assert first.files == second.files
    assert first.model == second.model and first.provenance == second.provenance


def test_a_figure_out_of_bounds_is_an_error(capsys: Capture, tmp_path: Path, quick_export: None) -> None:
    out = tmp_path / "x.speceyes"
    options = ["--precision", "decoder=int8,vision=fp32", "--set", "check.decoder.int8.divergence=0"]
    options += ["--set", "check.decoder.int8.cosine=0", "--set", "check.decoder.int8.agreement=0"]
    assert run(build(out, *options)) == 1
    out_text, error = capsys.readouterr()
    assert out_text == ""
    assert re.search(
        r"error: decoder: cosine .*, divergence \d\.\d+ \(at most 0\) beside the fp32 model; choose", error
    )
    assert list(tmp_path.iterdir()) == []


def test_no_check_leaves_the_figures_out(capsys: Capture, tmp_path: Path, quick_export: None) -> None:
    out = tmp_path / "x.speceyes"
    assert run(build(out, "--no-check", "--set", "measure.enabled=false")) == 0
    text = capsys.readouterr().out
    assert "decoder  fp32" in text and "100%" in text
    engines = Bundle.open(out).manifest.targets["onnxruntime-cpu"].engines
    assert engines["decoder"].accuracy == engines["decoder"].cost_ms == {}


def test_a_failed_build_keeps_the_old_bundle(capsys: Capture, bundle: Path, tmp_path: Path, quick_export: None) -> None:
    out = Path(shutil.copytree(bundle, tmp_path / "x.speceyes"))
    before = (out / "manifest.json").read_bytes()
    assert run(build(out, "--set", "check.vision.fp32.cosine=1")) == 1
    assert "vision: cosine" in capsys.readouterr().err
    assert (out / "manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.speceyes"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    # A test run in the background ignores SIGINT, and so would what it starts.
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from speceyes.compile.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, *build(tmp_path / "x.speceyes")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        first = process.stderr.readline()
        assert "load" in first
        assert len(hidden_files(tmp_path)) == 1
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.stdout.read() == ""
    assert process.returncode == 130
    assert [line for line in rest.splitlines() if line and " of " not in line] == ["interrupted"]
    assert list(tmp_path.iterdir()) == []


def test_inspect(capsys: Capture, bundle: Path) -> None:
    assert run(["inspect", str(bundle)]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    for text in ("Idefics3ForConditionalGeneration", "onnxruntime-cpu", "cache_k.0 … 1", "image_features", "agreement"):
        assert text in out
    assert run(["inspect", str(bundle), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    opened = Bundle.open(bundle)
    assert report["manifest"] == encode(opened.manifest)
    assert report["bytes"] == opened.size and report["files_verified"] == len(opened.manifest.files)


@pytest.mark.parametrize("command", [["inspect"], ["ask", "q"]], ids=["inspect", "ask"])
def test_a_corrupt_bundle(capsys: Capture, bundle: Path, tmp_path: Path, command: list[str]) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "x.speceyes"))
    weights = copy / "engines" / "onnxruntime-cpu" / "decoder.onnx.data"
    data = bytearray(weights.read_bytes())
    data[100] ^= 1
    weights.write_bytes(data)
    name, *rest = command
    assert "decoder.onnx.data: SHA-256" in fails(capsys, name, copy, *rest)
    (copy / "manifest.json").write_text("{")
    assert "manifest.json: not valid JSON" in fails(capsys, name, copy, *rest)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 60, 3), np.uint8)).save(path)
    return path


def test_ask_streams_what_the_model_generates(capsys: Capture, bundle: Path, picture: Path) -> None:
    with speceyes.load(bundle) as model:
        wanted = model.generate("what is it?", images=[picture], max_new_tokens=6)
    ask = ["ask", str(bundle), "what is it?", "--image", str(picture), "--max-new-tokens", "6"]
    assert run([*ask, "--stats"]) == 0
    out, error = capsys.readouterr()
    assert out == wanted.text + "\n"
    assert f"{wanted.stats.prompt_tokens} prompt tokens" in error and "tokens/s" in error
    assert run([*ask, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"] == wanted.text and report["token_ids"] == list(wanted.token_ids)
    assert report["finish_reason"] == wanted.finish_reason
    assert report["stats"]["image_tokens"] == wanted.stats.image_tokens > 0


def test_ask_with_a_system_message_raw_and_sampled(capsys: Capture, bundle: Path) -> None:
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}]
    sampled: dict[str, Any] = {"temperature": 0.9, "top_k": 5, "seed": 3, "max_new_tokens": 5}
    with speceyes.load(bundle) as model:
        chat = model.generate(messages, **sampled)
        raw = model.generate(prompt="the quick", max_new_tokens=5)
    flags = ["--temperature", "0.9", "--top-k", "5", "--seed", "3", "--max-new-tokens", "5"]
    assert run(["ask", str(bundle), "hello", "--system", "be short", *flags]) == 0
    assert capsys.readouterr().out == chat.text + "\n"
    assert run(["ask", str(bundle), "the quick", "--raw", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out == raw.text + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image", "none.png"], "image 'none.png': there is no such file"),
        (["--temperature", "-1"], "temperature: found -1.0; allowed: 0 or more"),
        (["--top-p", "0"], "top_p: found 0.0"),
        (["--max-new-tokens", "0"], "max_new_tokens: found 0; allowed: 1 or more"),
        (["--max-new-tokens", "100000"], "exceed the context length of 512"),
        (["--target", "tensorrt"], "target 'tensorrt': the bundle holds onnxruntime-cpu"),
        (["--image", __file__], "image"),
    ],
)
def test_a_question_that_cannot_be_asked(capsys: Capture, bundle: Path, options: list[str], message: str) -> None:
    assert message in fails(capsys, "ask", bundle, "what?", *options)


def test_defaults_of_ask_are_the_runtimes() -> None:
    from speceyes.compile.cli.ask import command

    defaults = {parameter.name: parameter.default for parameter in command.params}
    for field in dataclasses.fields(Options):
        assert defaults[field.name] == field.default


def test_the_guard_hides_tracebacks_until_asked(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault() -> None:
        raise ZeroDivisionError("by\nzero")

    assert guard(fault) == 1
    line = "error: unexpected ZeroDivisionError: by zero (set SPECEYES_TRACEBACK=1 to see the traceback)\n"
    assert capsys.readouterr().err == line
    monkeypatch.setenv("SPECEYES_TRACEBACK", "1")
    assert guard(fault) == 1
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error and error.endswith(line)


def test_a_closed_pipe_is_quiet(bundle: Path) -> None:
    script = "import sys; from speceyes.compile.cli import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "inspect", str(bundle), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_a_runtime_without_the_compiler_says_what_to_install(capsys: Capture) -> None:
    def fault() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    assert guard(fault) == 1
    assert "pip install 'PATH[compile]'" in capsys.readouterr().err


def test_a_bundle_is_loaded_with_the_settings_it_was_built_with(capsys: Capture, tmp_path: Path) -> None:
    own = tmp_path / "settings.yaml"
    own.write_text("speculation: {window_size: 3, warmup_steps: 8}\nmemory: {cache_size: 64MB}\n")
    out = tmp_path / "own.speceyes"
    arguments = ["build", str(checkpoint("llama")), "-o", str(out), "--no-check", "--set", "measure.enabled=false"]
    assert run([*arguments, "--precision", "fp32", "--settings", str(own)]) == 0
    with speceyes.load(out, threads=1) as model:
        assert (model.speculator.settings.window_size, model.speculator.settings.warmup_steps) == (3, 8)
    with speceyes.load(out, threads=1, settings={"speculation": {"window_size": 1}}) as model:
        assert (model.speculator.settings.window_size, model.speculator.settings.warmup_steps) == (1, 8)
    own.write_text("speculation: {window_sise: 3}")
    assert run([*arguments, "--settings", str(own)]) == 1
    assert "did you mean 'window_size'" in capsys.readouterr().err


def test_ask_says_what_speculation_did(capsys: Capture, bundle: Path) -> None:
    question = ["ask", str(bundle), "one two one two one two", "--max-new-tokens", "12", "--threads", "1", "--stats"]
    assert run(question) == 0
    speculative = capsys.readouterr()
    assert run([*question, "--no-speculate"]) == 0
    plain = capsys.readouterr()
    assert speculative.out == plain.out
    assert "rounds, " in speculative.err
    assert "rounds, " not in plain.err
