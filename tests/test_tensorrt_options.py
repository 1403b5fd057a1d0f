"""Shapes in trtexec's spelling, preflight rules, and whether a machine fits an engine; nothing is built."""

from __future__ import annotations

import sys
from dataclasses import replace

import onnx_ir as ir
import pytest
from speceyes.compile.recipe import Recipe, make_recipe, precision_changes
from speceyes.compile.tensorrt.options import BuilderOptions
from speceyes.compile.tensorrt.preflight import check_graph, check_head_dim, check_machine, estimate
from speceyes.compile.tensorrt.shapes import make_profile, parse_shapes
from speceyes.engines.engine import TensorSpec
from speceyes.engines.errors import ConfigError, EngineError, LoweringError
from speceyes.engines.manifest import TargetEntry, TensorRtEntry
from speceyes.engines.tensorrt_library import FLAVOURS, import_library, mismatch

HASH = "0123456789abcdef" * 4
INPUTS = (
    TensorSpec("ids", "int64", ("batch", "width")),
    TensorSpec("cache", "float16", ("batch", 2, 128, 16)),
    TensorSpec("index", "int64", ("patches/4",)),
    TensorSpec("step", "int64", (1,)),
)
RANGES = {"batch": (1, 1, 4), "width": (1, 4, 128), "patches": (16, 64, 256)}


def test_shapes_are_read_as_trtexec_reads_them() -> None:
    assert parse_shapes(["ids:1x4,cache:1x2x128x16", "index:8"]) == {
        "ids": "1x4",
        "cache": "1x2x128x16",
        "index": "8",
    }


@pytest.mark.parametrize("text", ["ids", "1x4", "ids:", "ids:0x4", "ids:-1x4", "ids:1×4", "ids:1x4,"])
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"shapes.*expected"):
        parse_shapes([text])


def test_a_dimension_given_for_one_input_holds_for_all() -> None:
    profile = make_profile(INPUTS, RANGES, ({}, {"ids": "2x8"}, {"ids": "3x64", "index": "16"}))
    assert profile == {
        "ids": ((1, 1), (2, 8), (3, 64)),
        "cache": ((1, 2, 128, 16), (2, 2, 128, 16), (3, 2, 128, 16)),
        "index": ((4,), (16,), (16,)),
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (({}, {}, {"ids": "1x2x3"}), "the input is batchxwidth"),
        (({}, {}, {"cache": "1x3x128x16"}), "2 is 2"),
        (({}, {}, {"ids": "2x9", "cache": "3x2x128x16"}), "batch is 2"),
        (({"ids": "8x1"}, {}, {}), "have to ascend"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(given: tuple[dict[str, str], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_profile(INPUTS, RANGES, given)


def test_a_dimension_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="shapes of x: 'length' is unknown"):
        make_profile([TensorSpec("x", "float32", ("length",))], RANGES, ({}, {}, {}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("tensorrt-rtx", "1.6.0", (89,), ("fp16",)),
            "rule version: found TensorRT 1.6.0; tensorrt-rtx is built with 1.7",
        ),
        (("tensorrt", "10.9.0", (89,), ("fp16",)), "rule version: found TensorRT 10.9.0"),
        (("tensorrt-rtx", "1.7.1", (80, 90), ("fp16",)), "rule capability: found compute capability 90"),
        (
            ("tensorrt-rtx", "1.7.1", (75,), ("fp16", "bf16-w8a8")),
            "rule precision: found bf16 for compute capability 75",
        ),
    ],
)
def test_machines_that_cannot_are_refused_by_rule(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        check_machine(*arguments)  # type: ignore[arg-type]


def test_machines_that_can_pass() -> None:
    check_machine("tensorrt-rtx", "1.7.1.116", (80, 86, 89, 120), ("bf16", "fp16-w8a8"))
    check_machine("tensorrt", "11.4.0.106", (90,), ("bf16",))


@pytest.mark.parametrize(
    ("head_dim", "passes"), [(16, 1), (24, 1), (72, 1), (256, 1), (8, 0), (20, 0), (264, 0), (320, 0)]
)
def test_head_dim(head_dim: int, passes: int) -> None:
    """What TensorRT for RTX 1.7.1 builds and refuses, tried for each of its compute capabilities."""
    if passes:
        check_head_dim("decoder", head_dim)
    else:
        with pytest.raises(LoweringError, match=f"rule head_dim: found heads of {head_dim} channels"):
            check_head_dim("decoder", head_dim)


def graph(
    operator: str, dtype: ir.DataType, shape: list[object], attributes: dict[str, object], domain: str = ""
) -> ir.Graph:
    value = ir.val("x", dtype, shape)
    converted = ir.convenience.convert_attributes(attributes)
    inputs = [value, value, value] if operator == "Attention" else [value]
    node = ir.Node(domain, operator, inputs, converted, name="node")
    return ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 24})


HALF = ir.DataType.FLOAT16
HEADS = ["batch", 4, "width", 64]


@pytest.mark.parametrize(
    ("operator", "dtype", "shape", "attributes", "domain", "message"),
    [
        ("DynamicQuantizeLinear", HALF, HEADS, {}, "", "rule operator: TensorRT has no such operator"),
        ("Loop", HALF, HEADS, {}, "", "rule operator: an engine with a loop cannot be captured"),
        ("MatMulNBits", HALF, HEADS, {}, "com.microsoft", "rule operator: it is of the domain com.microsoft"),
        ("Attention", ir.DataType.FLOAT, HEADS, {}, "", "rule attention: TensorRT has it in fp16 and bf16 alone"),
        ("Attention", HALF, HEADS, {"is_causal": 1}, "", "rule attention: TensorRT's causal mask begins"),
        ("Attention", HALF, HEADS, {"softcap": 30.0}, "", "rule attention: TensorRT has no softcap"),
        ("Attention", HALF, ["batch", 4, "width", 20], {}, "", "rule head_dim: found heads of 20"),
        ("Attention", HALF, ["batch", "width", 80], {"q_num_heads": 4}, "", "rule head_dim: found heads of 20"),
        ("TensorScatter", ir.DataType.INT8, ["batch", 4, 8, 64], {}, "", "rule cache: .*int8 was found"),
        ("TensorScatter", HALF, ["batch", 4, 8, 64], {"mode": "circular"}, "", "rule cache: .*linear mode alone"),
        ("TensorScatter", HALF, ["batch", 4, "capacity", 64], {}, "", "rule cache: .*capacity of a cache fixed"),
    ],
)
def test_operators_are_refused_by_rule(
    operator: str, dtype: ir.DataType, shape: list[object], attributes: dict[str, object], domain: str, message: str
) -> None:
    with pytest.raises(LoweringError, match=message):
        check_graph("decoder", graph(operator, dtype, shape, attributes, domain))


def test_an_estimate_grows_with_the_weights() -> None:
    once, twice = estimate(10**9, build_twice=False), estimate(10**9, build_twice=True)
    assert once.seconds < twice.seconds < 2 * once.seconds and twice.memory == once.memory
    assert once.disk > 10**9 and once.memory > 3 * once.disk


BUILT = TensorRtEntry("tensorrt-rtx", "1.7.1.116", (86, 89), {"decoder": HASH})
BUILD = TargetEntry({}, {}, tensorrt=BUILT)


def test_an_engine_runs_with_its_own_version_and_gpu_alone() -> None:
    assert mismatch("tensorrt-rtx", BUILD, "1.7.1.116", 89) is None
    again = "build it again with `speceyes-compile build CHECKPOINT -o BUNDLE --target tensorrt-rtx"
    version = mismatch("tensorrt-rtx", BUILD, "1.8.0.1", 89)
    assert version == f"built by TensorRT 1.7.1.116, this is 1.8.0.1; install that version or {again}`"
    device = mismatch("tensorrt-rtx", BUILD, "1.7.1.116", 120)
    expected = f"built for compute capability 86, 89, this GPU has 120; {again} --compute-capability 120`"
    assert device == expected
    full = TargetEntry(
        {}, {}, tensorrt=replace(BUILT, flavour="tensorrt", version="11.4.0", compute_capabilities=(90,))
    )
    found = mismatch("tensorrt", full, "11.4.0", 89)
    assert found is not None and found.endswith("--target tensorrt` on this GPU")
    assert "built by tensorrt, the target is tensorrt-rtx" in str(mismatch("tensorrt-rtx", full, "11.4.0", 90))
    assert "does not say which TensorRT" in str(mismatch("tensorrt", TargetEntry({}, {}), "11.4.0", 90))


def test_a_missing_package_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for target, flavour in FLAVOURS.items():
        with pytest.raises(EngineError) as fault:
            import_library(target)
        assert str(fault.value) == (
            f"target {target}: the package {flavour.package} is missing; `pip install 'speceyes[{target}]'`"
        )


def test_a_package_without_its_libraries_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path)
    (tmp_path / "tensorrt.py").write_text("import ctypes\nctypes.CDLL('libnvinfer.so.11')\n")  # type: ignore[operator]
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with pytest.raises(
        EngineError, match=r"target tensorrt: the package tensorrt cannot be imported \(OSError: libnvinfer"
    ):
        import_library("tensorrt")


def test_precision_goes_to_the_section_that_knows_it() -> None:
    assert precision_changes("int8") == {"precision": dict.fromkeys(("decoder", "vision", "predictor"), "int8")}
    assert precision_changes("bf16-w8a8") == {
        "tensorrt": {"precision": {"decoder": "bf16-w8a8", "vision": "bf16-w8a8", "predictor": "bf16"}}
    }
    assert precision_changes("decoder=fp16,vision=int8") == {
        "tensorrt": {"precision": {"decoder": "fp16"}},
        "precision": {"vision": "int8"},
    }


def test_one_target_or_several() -> None:
    assert Recipe().targets == ("onnxruntime-cpu",)
    recipe = make_recipe(None, {"target": ["tensorrt-rtx", "onnxruntime-cpu"]})
    assert recipe.targets == ("tensorrt-rtx", "onnxruntime-cpu")
    assert make_recipe(recipe) == recipe
    for wrong in ([], ["tensorrt-rtx", "tensorrt-rtx"]):
        with pytest.raises(ConfigError, match="one or more different ones are expected"):
            make_recipe(None, {"target": wrong})


@pytest.mark.parametrize(
    ("name", "value"),
    [("capacity", 8), ("width", 0), ("builder_optimization_level", 6), ("workspace", 0), ("compute_capability", ())],
)
def test_options_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: found "):
        BuilderOptions(**{name: value})  # type: ignore[arg-type]
