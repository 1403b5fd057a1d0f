"""The plugins in TensorRT 11.4's own registry; test_int8_attention_plugin.py runs this where it finds the libraries."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorrt_bindings as trt

sys.modules["tensorrt"] = trt
import tensorrt_bindings.plugin as trtp  # noqa: E402

sys.modules["tensorrt.plugin"] = trtp
from speceyes.plugins.int8_attention import tensorrt_plugin  # noqa: E402
from speceyes.plugins.int8_attention.kernel import launches, ptx  # noqa: E402
from speceyes.plugins.int8_attention.tensorrt_plugin import ATTEND, JOIN, WRITE  # noqa: E402
from tensorrt_bindings.plugin._lib import QDP_REGISTRY  # noqa: E402
from tensorrt_bindings.plugin._tensor import Shape, SymIntExpr  # noqa: E402

F32, F16, BF16, I8, I32, I64, BOOL = (
    getattr(trt, name) for name in ("float32", "float16", "bfloat16", "int8", "int32", "int64", "bool")
)
BATCH, WIDTH, HEADS, KV_HEADS, CAPACITY, SCALE = 3, 5, 6, 2, 300, 0.125
CACHES = [I8, I8, F32, F32]


def inputs(plugin: str, kind: Any, head_dim: int) -> list[tuple[Any, tuple[int, ...]]]:
    """Types and shapes."""
    rows, states = (BATCH, WIDTH, HEADS * head_dim), (BATCH, WIDTH, KV_HEADS * head_dim)
    held = [(BATCH, KV_HEADS, CAPACITY, channels) for channels in (head_dim, head_dim, 1, 1)]
    caches = list(zip(CACHES, held, strict=True))
    partial = (BATCH, WIDTH, HEADS, 3)
    return {
        WRITE: [(kind, states), (kind, states), (F32, (KV_HEADS, head_dim)), (I64, (BATCH,)), *caches],
        ATTEND: [(kind, rows), *caches, (BOOL, (BATCH, 1, WIDTH, CAPACITY))],
        JOIN: [(kind, rows), (F32, partial), (F32, partial), (F32, (*partial, head_dim))],
    }[plugin]


def outputs(plugin: str, kind: Any, head_dim: int) -> list[tuple[Any, tuple[int, ...]]]:
    read = inputs(plugin, kind, head_dim)
    return {WRITE: read[4:], ATTEND: inputs(JOIN, kind, head_dim)[1:], JOIN: read[:1]}[plugin]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    tensorrt_plugin.register()
    tensorrt_plugin.register()


class Number:
    """A dimension that is known."""

    def __init__(self, value: int) -> None:
        self.value = value

    def is_constant(self) -> bool:
        return True

    def get_constant_value(self) -> int:
        return self.value


class Arithmetic:
    """In place of the builder of expressions that TensorRT hands out: computes at once."""

    def constant(self, value: int) -> Number:
        return Number(value)

    def operation(self, kind: Any, one: Number, other: Number) -> int:
        operations = {"SUM": int.__add__, "PROD": int.__mul__, "FLOOR_DIV": int.__floordiv__}
        return operations[kind.name](one.value, other.value)


@pytest.fixture
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(SymIntExpr, "_exprBuilder", Arithmetic())
    yield


def tensors(described: list[tuple[Any, tuple[int, ...]]], shaped: bool = True) -> list[Any]:
    """As TensorRT describes them: where outputs are declared by expressions alone, with numbers where it compiles."""
    made = [trtp.TensorDesc(trtp.ShapeExprs.from_tuple(shape), kind) for kind, shape in described]
    for tensor, (_, shape) in zip(made, described, strict=True):
        tensor.shape = Shape(shape) if shaped else None
    return made


def value(size: Any) -> int:
    return int(size._expr.value)


def creator(plugin: str) -> Any:
    return trt.get_plugin_registry().get_creator(plugin, "1", "speceyes")


def create(plugin: str, request: Any) -> Any:
    fields = [trt.PluginField("scale", np.array([SCALE]), trt.PluginFieldType.FLOAT64)] if plugin == ATTEND else []
    collection = trt.PluginFieldCollection(fields)
    return creator(plugin).create_plugin(plugin, "speceyes", collection, trt.TensorRTPhase.BUILD, request)


def test_the_version() -> None:
    assert trt.__version__.startswith("11.4.")


def test_the_registry_holds_the_three_and_their_attributes() -> None:
    held = {one.name for one in trt.get_plugin_registry().all_creators if one.plugin_namespace == "speceyes"}
    assert held == {WRITE, ATTEND, JOIN}
    assert [[field.name for field in creator(plugin).field_names] for plugin in (WRITE, ATTEND, JOIN)] == [
        [],
        ["scale"],
        [],
    ]


@pytest.mark.parametrize("kind", [F32, F16, BF16])
@pytest.mark.parametrize("plugin", [WRITE, ATTEND, JOIN])
def test_the_registry_creates_plugins_compiled_ahead_of_time(plugin: str, kind: Any) -> None:
    made = create(plugin, trt.QuickPluginCreationRequest.STRICT_AOT)
    assert isinstance(made, trt.IPluginV3QuickAOTBuild) and not isinstance(made, trt.IPluginV3QuickRuntime)
    read = inputs(plugin, kind, 64)
    types = made.get_output_data_types([one for one, _ in read], [len(shape) for _, shape in read])
    assert list(types) == [one for one, _ in outputs(plugin, kind, 64)]
    aliased = [made.get_aliased_input(output) for output in range(made.get_num_outputs())]
    assert aliased == {WRITE: [4, 5, 6, 7], ATTEND: [-1, -1, -1], JOIN: [-1]}[plugin]


def test_no_plugin_would_run_python() -> None:
    with pytest.raises(ValueError, match="JIT implementation requested"):
        create(JOIN, trt.QuickPluginCreationRequest.STRICT_JIT)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("head_dim", ptx.HEAD_DIMS)
@pytest.mark.parametrize("plugin", [WRITE, ATTEND, JOIN])
def test_outputs_have_their_shapes(plugin: str, head_dim: int) -> None:
    attributes = [SCALE] if plugin == ATTEND else []
    read = tensors(inputs(plugin, F16, head_dim), shaped=False)
    made = QDP_REGISTRY[f"speceyes::{plugin}"].register_func(*read, *attributes)
    shapes = [tuple(value(size) for size in one.shape_expr) for one in (made if isinstance(made, tuple) else (made,))]
    assert shapes == [shape for _, shape in outputs(plugin, F16, head_dim)]


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize(("kind", "word"), [(F32, "float"), (F16, "half"), (BF16, "bfloat16")])
@pytest.mark.parametrize("head_dim", ptx.HEAD_DIMS)
@pytest.mark.parametrize("plugin", [WRITE, ATTEND, JOIN])
def test_what_is_embedded_is_the_launch_and_its_kernel(plugin: str, head_dim: int, kind: Any, word: str) -> None:
    """The kernel's parameters are as many addresses and integers as TensorRT passes, in its order."""
    read, written = inputs(plugin, kind, head_dim), outputs(plugin, kind, head_dim)
    attributes = [SCALE] if plugin == ATTEND else []
    implementation = QDP_REGISTRY[f"speceyes::{plugin}"].aot_impl_func
    name, module, grid, sizes = implementation(*tensors(read), *attributes, tensors(written), 0)
    wanted = {
        WRITE: launches.write(word, BATCH, WIDTH, KV_HEADS, CAPACITY, head_dim),
        ATTEND: launches.attend(word, head_dim, SCALE, BATCH, WIDTH, HEADS, KV_HEADS, CAPACITY),
        JOIN: launches.join(word, BATCH, WIDTH, HEADS, 3, head_dim),
    }[plugin]
    assert name == wanted.kernel
    assert tuple(map(value, (grid.grid_x, grid.grid_y, grid.grid_z))) == wanted.grid
    assert tuple(map(value, (grid.block_x, grid.block_y, grid.block_z, grid.shared_mem))) == (ptx.THREADS, 1, 1, 0)
    assert all(isinstance(size, trtp.SymInt32) for size in sizes)
    assert tuple(map(value, sizes)) == wanted.sizes
    assert ptx.names(module) == [name]
    parameters = re.findall(rf"\.param \.(\w+)[^\n]* {name}_param_\d+", module)
    assert parameters == ["u64"] * len(read) + ["u32"] * len(sizes) + ["u64"] * len(written)


@pytest.mark.parametrize("plugin", [WRITE, ATTEND, JOIN])
def test_all_types_and_no_others_are_offered(plugin: str) -> None:
    count = len(inputs(plugin, F16, 64))
    (offered,) = QDP_REGISTRY[f"speceyes::{plugin}"].autotune_func(*[None] * count, None)
    found = [list(one.types) for one in offered._get_combinations()]
    wanted = [[one for one, _ in (*inputs(plugin, kind, 64), *outputs(plugin, kind, 64))] for kind in (F32, F16, BF16)]
    assert found == wanted
    assert all(set(one.layouts) == {trt.TensorFormat.LINEAR} for one in offered._get_combinations())


@pytest.mark.usefixtures("arithmetic")
def test_other_types_and_heads_are_refused() -> None:
    compiled = QDP_REGISTRY[f"speceyes::{ATTEND}"].aot_impl_func
    with pytest.raises(ValueError, match="found queries of type INT32; FLOAT, HALF, BF16 are allowed"):
        compiled(*tensors(inputs(ATTEND, I32, 64)), SCALE, [], 0)
    with pytest.raises(ValueError, match="found 'attend_half_72'"):
        compiled(*tensors(inputs(ATTEND, F16, 72)), SCALE, [], 0)
    grouped = [
        (kind, (*shape[:3], 2) if kind == F32 and len(shape) == 4 else shape) for kind, shape in inputs(WRITE, F16, 64)
    ]
    with pytest.raises(ValueError, match="quant_groups: found 2; the kernels take 1"):
        QDP_REGISTRY[f"speceyes::{WRITE}"].aot_impl_func(*tensors(grouped), [], 0)
