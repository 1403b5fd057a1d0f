"""The examples of README.md and docs/ run as they are printed, on the tiny checkpoint."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import speceyes
import speceyes.compile.build as pipeline
import yaml
from PIL import Image
from speceyes.compile.cli import run
from speceyes.compile.recipe import Recipe, make_recipe
from speceyes.engines.bundle import Bundle
from speceyes.runtime.speculation.settings import Memory, Settings, Speculation, read_settings

from .checkpoints import checkpoint, exported

ROOT = Path(speceyes.__file__).parent
PAGES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "recipe",
            "bundle",
            "cli",
            "lowering",
            "speculation",
            "predictor",
            "accuracy",
            "tensorrt",
            "perception",
            "int8-attention",
            "gpu",
        )
    ),
)
RUNTIME_PAGE = "docs/runtime.md"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def examples(language: str) -> list[Any]:
    return [pytest.param(text, id=f"{page}-{n}") for page in PAGES for n, text in enumerate(blocks(page, language))]


def _copy(graph: ir.Model, checkpoint: object) -> ir.Model:
    return graph.clone()


@pytest.fixture
def desk(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the examples name, as the current one; graphs come from the shared export."""
    pixels = np.random.default_rng(2).integers(0, 256, (50, 70, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "sign.png")
    shutil.copytree(bundle, tmp_path / "model.speceyes")
    for name in ("checkpoint", "CHECKPOINT"):
        (tmp_path / name).symlink_to(checkpoint("idefics3"))
    graphs = exported("idefics3").parts
    monkeypatch.setattr(pipeline, "EXPORTERS", {part: partial(_copy, graph) for part, graph in graphs.items()})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("code", examples("python"))
def test_python_examples(desk: Path, capsys: pytest.CaptureFixture[str], code: str) -> None:
    exec(compile(code, "example", "exec"), {})
    assert Bundle.open(desk / "model.speceyes").manifest.model.family == "idefics3"
    assert ("print" in code) == bool(capsys.readouterr().out)


def test_runtime_examples_in_order(desk: Path) -> None:
    shared: dict[str, Any] = {}
    for code in blocks(RUNTIME_PAGE, "python"):
        exec(compile(code, RUNTIME_PAGE, "exec"), shared)
    assert shared["stream"].result.stats.new_tokens > 0
    assert len(shared["results"]) == 2


def _run_compiler(desk: Path, words: list[str]) -> None:
    there = {"build/demo.speceyes": "model.speceyes", "scripts/demo/samples/receipt-1.png": "sign.png"}
    arguments = [there.get(word, word) for word in words[1:]]
    assert run([*arguments, *(["--no-check"] if arguments[0] == "build" else [])]) == 0


def _check_script(desk: Path, words: list[str]) -> None:
    assert os.access(ROOT / words[1], os.X_OK)
    subprocess.run(["bash", "-n", ROOT / words[1]], check=True)


def _run_polygraphy(desk: Path, words: list[str]) -> None:
    subprocess.run([Path(sys.executable).with_name("polygraphy"), *words[1:]], check=True, cwd=desk)


RULES: dict[str, Callable[[Path, list[str]], None]] = {
    r"(\.venv/bin/)?speceyes-compile": _run_compiler,
    r"bash": _check_script,
    r"polygraphy": _run_polygraphy,
}


@pytest.mark.parametrize("code", examples("bash"))
def test_bash_examples(desk: Path, capsys: pytest.CaptureFixture[str], code: str) -> None:
    for line in code.splitlines():
        words = shlex.split(line)
        (rule,) = (rule for pattern, rule in RULES.items() if re.fullmatch(pattern, words[0]))
        rule(desk, words)


def test_the_recipe_in_the_docs_is_the_default(tmp_path: Path) -> None:
    (text,) = blocks("docs/recipe.md", "yaml")
    (tmp_path / "recipe.yaml").write_text(text)
    assert make_recipe(tmp_path / "recipe.yaml") == Recipe()
    assert yaml.safe_load(text).keys() == {field.name for field in fields(Recipe)}


def test_the_settings_in_the_docs_are_the_defaults(tmp_path: Path) -> None:
    (text,) = blocks("docs/speculation.md", "yaml")
    (tmp_path / "settings.yaml").write_text(text)
    assert read_settings(tmp_path / "settings.yaml") == Settings()
    values = yaml.safe_load(text)
    assert values["speculation"].keys() == {field.name for field in fields(Speculation)}
    assert values["memory"].keys() == {field.name for field in fields(Memory)}


@pytest.mark.parametrize("page", [*PAGES, RUNTIME_PAGE])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target
    for name in re.findall(r"`((?:tests|docs|scripts)/[\w./-]+\.\w+)`", text):
        assert (ROOT / name).exists(), name
