"""The kernels as plugins of TensorRT: in its real registry, and as nodes of an ONNX function."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import inliner
from speceyes.plugins.int8_attention import operator, tensorrt_plugin

CASES = Path(__file__).with_name("int8_plugin_cases.py")
REGISTRY = "libnvinfer_lean.so.11"

# What 11.4's bindings load: the registry is the one of its lean runtime, everything else exists and does nothing.
LIBRARIES = {
    "libnvinfer.so.11": (
        *("createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL"),
        *("getBuilderPluginRegistry", "initLibNvInferPlugins"),
    ),
    "libnvinfer_plugin.so.11": (),
    "libnvonnxparser.so.11": (
        *("createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getNvOnnxParserVersion"),
    ),
}


def lean_folder() -> Path | None:
    """The folder of TensorRT's lean runtime; it is found, not imported."""
    found = importlib.util.find_spec("tensorrt_lean_libs")
    folder = Path(found.origin).parent if found and found.origin else None
    return folder if folder and (folder / REGISTRY).is_file() else None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc: the libraries that the bindings load cannot be made")
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_bindings") is None, reason="tensorrt-cu13-bindings is not installed"
)
@pytest.mark.skipif(
    lean_folder() is None,
    reason="tensorrt-lean-cu13 is not installed, whose registry is the real one; `pip install tensorrt-lean-cu13`",
)
def test_the_plugins_in_tensorrts_registry(tmp_path: Path) -> None:
    lean = lean_folder()
    assert lean is not None
    for library, functions in LIBRARIES.items():
        source = tmp_path / "stub.c"
        source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in functions))
        real = ["-Wl,--no-as-needed", lean / REGISTRY] if library == "libnvinfer.so.11" else []
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", source, *real, "-o", tmp_path / library]
        subprocess.run(command, check=True)
    command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider", CASES]
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{tmp_path}:{lean}"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    print(found.stdout.splitlines()[-1])


def test_the_function_of_three_plugins_takes_the_operators_place() -> None:
    """A model of one node, whose function is inlined as TensorRT's parser does."""
    domain, version, opset = operator.DOMAIN, operator.VERSION, operator.OPSET
    attributes = {"scale": 0.25, "q_num_heads": 4, "kv_num_heads": 2, "groups": 1}
    node = onnx.helper.make_node(operator.NAME, operator.INPUTS, operator.OUTPUTS, domain=domain, **attributes)
    infos = [[onnx.ValueInfoProto(name=name) for name in names] for names in (operator.INPUTS, operator.OUTPUTS)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "one", *infos),
        functions=[tensorrt_plugin.function_proto()],
        opset_imports=[onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid(domain, version)],
    )
    write, attend, join = inliner.inline_local_functions(model).graph.node
    assert [one.op_type for one in (write, attend, join)] == ["Int8KVWrite", "Int8KVAttend", "Int8KVJoin"]
    assert list(attend.input) == ["query", *write.output, "mask"] and list(write.output) == list(operator.OUTPUTS[1:])
    assert list(join.input) == ["query", *attend.output] and list(join.output) == ["attended"]
    values = [{one.name: onnx.helper.get_attribute_value(one) for one in each.attribute} for each in (write, attend)]
    assert values == [{"plugin_namespace": b"speceyes"}, {"plugin_namespace": b"speceyes", "scale": 0.25}]


def test_no_plugin_is_registered_beside_tensorrt_for_rtx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", sys)
    with pytest.raises(RuntimeError, match="tensorrt_rtx is loaded, which has no plugins"):
        tensorrt_plugin.register()
