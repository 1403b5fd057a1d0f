"""Which folder may import which, and what stays unloaded until it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import speceyes

ROOT = Path(speceyes.__file__).parent
HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript")
FORBIDDEN = {
    "engines": ("torch", "transformers", "speceyes.compile", "speceyes.runtime"),
    "plugins": ("torch", "transformers", "speceyes.engines", "speceyes.compile", "speceyes.runtime"),
    "runtime": (*HEAVY, "speceyes.compile"),
}


def imports(path: Path) -> set[str]:
    """Absolute names of everything that a file of the package imports, anywhere in it."""
    package = ("speceyes", *path.relative_to(ROOT).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_stay_inside_the_walls(folder: str) -> None:
    files = sources(folder)
    assert files
    crossings = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in sorted(imports(path))
        for wall in FORBIDDEN[folder]
        if name == wall or name.startswith(f"{wall}.")
    ]
    assert crossings == []


def test_the_reader_of_imports_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    source = tmp_path / "runtime" / "deep" / "module.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "def f():\n    import torch.nn as nn\n    from ...compile import recipe\n    from .. import session\n"
    )
    assert imports(source) >= {"torch.nn", "speceyes.compile.recipe", "speceyes.runtime.session"}


def loaded(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `statement`."""
    script = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded("import speceyes").isdisjoint({*HEAVY, "numpy", "onnxruntime", "tokenizers", "PIL", "click"})


def test_the_runtime_does_not_load_the_compiler() -> None:
    modules = loaded("import speceyes; speceyes.load; assert 'speceyes.compile' not in __import__('sys').modules")
    assert "numpy" in modules
    assert modules.isdisjoint({*HEAVY, "click", "rich"})


@pytest.mark.parametrize("command", ["", "build", "inspect", "check", "ask", "train-predictor"])
def test_help_does_not_load_the_compiler(command: str) -> None:
    arguments = [command, "--help"] if command else ["--help"]
    modules = loaded(f"from speceyes.compile.cli import run; assert run({arguments!r}) == 0")
    assert modules.isdisjoint({*HEAVY, "onnxruntime"})


def test_the_compiler_is_callable_and_still_a_package() -> None:
    statement = "from speceyes import compile; import speceyes.compile.recipe; assert callable(compile)"
    assert loaded(f"{statement}; compile.recipe.Recipe()").isdisjoint(HEAVY)
