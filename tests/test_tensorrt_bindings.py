"""Every attribute of TensorRT's Python interface that our modules use exists in the real bindings of both flavours."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import speceyes
from speceyes.compile.tensorrt.options import BuilderOptions

ROOT = Path(speceyes.__file__).parent
MODULES = ("engines/tensorrt.py", "engines/tensorrt_library.py", "compile/tensorrt/builder.py")

# What a name stands for in these modules: the class of TensorRT, or the module itself.
ROLES = {
    "library": "",
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "config": "IBuilderConfig",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "_engine": "ICudaEngine",
    "context": "IExecutionContext",
    "_context": "IExecutionContext",
    "cache": "ITimingCache",
    "tensor": "ITensor",
    "bounds": "IOptimizationProfile",
    "fault": "ParserError",
}
RTX_ONLY = {
    "ComputeCapability",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "Runtime.get_engine_validity",
    "EngineValidity.INVALID",
    "EngineInvalidityDiagnostics",
    "CudaGraphStrategy.DISABLED",
    "DynamicShapesKernelSpecializationStrategy",
    "IRuntimeConfig.cuda_graph_strategy",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
}

# What loads 11.4's bindings: libraries with the functions that they link to, none of which does anything.
FUNCTIONS = (
    *("createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL"),
    *("createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry"),
    *("getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins", "getInferLibVersion"),
)
LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")

SCRIPT = """
import functools, importlib, json, sys
module = importlib.import_module(sys.argv[1])
found = {}
for name in json.loads(sys.argv[2]):
    try:
        functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        found[name] = False
    else:
        found[name] = True
print(json.dumps({"version": module.__version__, "found": found}))
"""


def used() -> set[str]:
    """Dotted names below the module, `IBuilderConfig.set_flag`, in the order of no matter what."""
    names = set()
    for module in MODULES:
        tree = ast.parse((ROOT / module).read_text())
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            runtime = "create_runtime_config" in ast.unparse(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and id(node) not in inner and (name := dotted(node, runtime)):
                    names.add(name)
    return names


def dotted(node: ast.expr, runtime: bool) -> str | None:
    chain: list[str] = []
    while isinstance(node, ast.Attribute):
        chain.insert(0, node.attr)
        node = node.value
    root = node.id if isinstance(node, ast.Name) else ""
    if root == "self" and len(chain) > 1:
        root = chain.pop(0).removeprefix("_")
    if root not in ROLES or chain[0] == "__version__" or (root == "fault" and chain[0] not in ("desc", "node_name")):
        return None
    chain = chain[: next((i for i, name in enumerate(chain) if name.startswith("__")), len(chain))]
    role = "IRuntimeConfig" if root == "config" and runtime else ROLES[root]
    return ".".join([*filter(None, [role]), *chain])


def look_up(module: str, names: set[str], environment: dict[str, str]) -> dict[str, object]:
    command = [sys.executable, "-c", SCRIPT, module, json.dumps(sorted(names))]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def missing(found: dict[str, object]) -> set[str]:
    held = found["found"]
    assert isinstance(held, dict)
    return {name for name, exists in held.items() if not exists}


def test_the_reader_finds_what_is_used() -> None:
    names = used()
    assert names >= {
        "Builder.build_serialized_network",
        "OnnxParser.parse_from_file",
        "IBuilderConfig.set_memory_pool_limit",
        "MemoryPoolType.WORKSPACE",
        "IOptimizationProfile.set_shape",
        "Runtime.deserialize_cuda_engine",
        "IExecutionContext.execute_async_v3",
        "ParserError.desc",
    }


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx-cu13 is not installed")
def test_all_of_it_exists_in_tensorrt_rtx() -> None:
    names = used() | {f"ComputeCapability.SM{capability}" for capability in BuilderOptions().compute_capability}
    found = look_up("tensorrt_rtx", names, {})
    assert missing(found) == set()
    assert str(found["version"]).startswith("1.7.")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc: the libraries that the bindings load cannot be made")
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_bindings") is None, reason="tensorrt-cu13-bindings is not installed"
)
def test_all_of_it_exists_in_tensorrt_11(tmp_path: Path) -> None:
    source = tmp_path / "stub.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in FUNCTIONS))
    for library in LIBRARIES:
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", source, "-o", tmp_path / library]
        subprocess.run(command, check=True)
    verbosities = {f"ProfilingVerbosity.{name}" for name in ("LAYER_NAMES_ONLY", "DETAILED", "NONE")}
    found = look_up("tensorrt_bindings", used() | verbosities, {"LD_LIBRARY_PATH": str(tmp_path)})
    assert str(found["version"]).startswith("11.4.")
    assert missing(found) - RTX_ONLY == set()
