"""Int8KVAttention's ONNX function: ONNX Runtime beside the reference, and what TensorRT for RTX really builds of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from speceyes.compile.tensorrt.builder import build_engine
from speceyes.compile.tensorrt.options import BuilderOptions
from speceyes.engines.errors import EngineError
from speceyes.engines.tensorrt_library import import_library
from speceyes.plugins.int8_attention import operator
from speceyes.plugins.int8_attention.function import function_proto

from .int8_feeds import GROUPS, HEAD_DIM, HEADS, SCALE, SHAPES, assert_within_rounding, feeds, reference

KINDS = onnx.TensorProto
Size = int | str


def model_of_one(
    sizes: tuple[int, int, int], states: int = KINDS.FLOAT, *, head_dim: int, batch: Size, capacity: Size
) -> onnx.ModelProto:
    """A model of one node with its function; `sizes`: heads, kv_heads, groups; `states`: type of query, key, value."""
    helper, (heads, kv_heads, groups) = onnx.helper, sizes
    rows, keys = [batch, "width", heads * head_dim], [batch, "width", kv_heads * head_dim]
    held, scales = ([batch, kv_heads, capacity, channels] for channels in (head_dim, groups))
    caches, wide = [KINDS.INT8, KINDS.INT8, KINDS.FLOAT, KINDS.FLOAT], [held, held, scales, scales]
    types = [states, states, states, *caches, KINDS.INT64, KINDS.BOOL, KINDS.FLOAT]
    shapes = [rows, keys, keys, *wide, [batch], [batch, 1, "width", capacity], [kv_heads, head_dim]]
    attributes = {"scale": SCALE, "q_num_heads": heads, "kv_num_heads": kv_heads, "groups": groups}
    node = helper.make_node(operator.NAME, operator.INPUTS, operator.OUTPUTS, domain=operator.DOMAIN, **attributes)
    infos, made = (
        [helper.make_tensor_value_info(*info) for info in zip(names, kinds, dims, strict=True)]
        for names, kinds, dims in (
            (operator.INPUTS, types, shapes),
            (operator.OUTPUTS, [states, *caches], [rows, *wide]),
        )
    )
    model = helper.make_model(
        helper.make_graph([node], "one", infos, made),
        functions=[function_proto(half=states != KINDS.FLOAT)],
        opset_imports=[
            helper.make_opsetid("", operator.OPSET),
            helper.make_opsetid(operator.DOMAIN, operator.VERSION),
        ],
        ir_version=11,
    )
    onnx.checker.check_model(model, full_check=True)
    return model


@cache
def session(sizes: tuple[int, int, int], states: int = KINDS.FLOAT) -> Any:
    model = model_of_one(sizes, states, head_dim=HEAD_DIM, batch="batch", capacity="capacity")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@given(SHAPES, HEADS, GROUPS)
@settings(max_examples=60, deadline=None)
def test_the_body_gives_the_reference(shape, heads, groups):
    """Codes and scales to the bit, sums within the roundings of both."""
    feed = feeds(*shape, *heads, groups)
    found, wanted = session((*heads, groups)).run(None, feed), reference(feed, *heads, groups)
    for made, expected in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(made, expected)
    assert_within_rounding(found[0], feed, wanted)


@given(SHAPES, HEADS, GROUPS)
@settings(max_examples=60, deadline=None)
def test_the_body_in_fp16_gives_the_reference(shape, heads, groups):
    feed = feeds(*shape, *heads, groups)
    halves = {name: feed[name].astype(np.float16) for name in ("query", "key", "value")}
    found = session((*heads, groups), KINDS.FLOAT16).run(None, feed | halves)
    feed |= {name: array.astype(np.float32) for name, array in halves.items()}
    wanted = reference(feed, *heads, groups)
    for made, expected in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(made, expected)
    assert_within_rounding(found[0], feed, wanted, "fp16")


@pytest.mark.parametrize("states", [KINDS.FLOAT, KINDS.FLOAT16])
def test_a_token_that_sees_nothing_is_zero(states):
    feed = feeds(1, 2, 3, 10, 2, 2, 1)
    feed["mask"][1, 0, 2] = False
    dtype = onnx.helper.tensor_dtype_to_np_dtype(states)
    feed |= {name: feed[name].astype(dtype) for name in ("query", "key", "value")}
    found = session((2, 2, 1), states).run(None, feed)[0]
    assert not found[1, 2].any() and np.abs(found[0]).min(-1).all()


@pytest.mark.parametrize("states", [KINDS.FLOAT, KINDS.FLOAT16])
def test_tokens_one_by_one_leave_the_same_cache(states):
    """What a rollback counts on: a slot holds what its own token wrote, whatever came with it."""
    feed = feeds(7, 1, 4, 20, 4, 2, 1)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(states)
    feed |= {name: feed[name].astype(dtype) for name in ("query", "key", "value")}
    whole, alone = session((4, 2, 1), states).run(None, feed), dict(feed)
    for token in range(4):
        one = alone | {"write_index": feed["write_index"] + token, "mask": feed["mask"][:, :, token : token + 1]}
        one |= {name: feed[name][:, token : token + 1] for name in ("query", "key", "value")}
        made = session((4, 2, 1), states).run(None, one)
        alone |= dict(zip(("cache_k", "cache_v", "scale_k", "scale_v"), made[1:], strict=True))
    for found, expected in zip(made[1:], whole[1:], strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.fixture
def build(tmp_path: Path) -> Any:
    """Parses and builds for real, for compute capability 8.9 and widths of 1 to 16. No engine is run."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is missing; pip install 'speceyes[tensorrt-rtx]'")

    def to_engine(model: onnx.ModelProto) -> bytes:
        onnx.save(model, tmp_path / "one.onnx")
        free = {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in model.graph.input
        }
        profile = {
            name: tuple(tuple(width if isinstance(dim, str) else dim for dim in dims) for width in (1, 4, 16))
            for name, dims in free.items()
        }
        out = tmp_path / "one.engine"
        build_engine(tmp_path / "one.onnx", out, import_library("tensorrt-rtx"), BuilderOptions(), profile, (89,))
        return out.read_bytes()

    return to_engine


@pytest.mark.parametrize("states", [KINDS.FLOAT, KINDS.FLOAT16, KINDS.BFLOAT16])
@pytest.mark.parametrize(("heads", "kv_heads", "groups", "head_dim"), [(4, 2, 1, 64), (4, 4, 8, 80), (4, 1, 2, 128)])
def test_tensorrt_for_rtx_builds_the_body(build, states, heads, kv_heads, groups, head_dim):
    """In half precision with a fused attention kernel, whose name is in the engine; there is none for fp32."""
    engine = build(model_of_one((heads, kv_heads, groups), states, head_dim=head_dim, batch=2, capacity=256))
    assert (b"fused_multihead" in engine) == (states != KINDS.FLOAT)


REFUSED = {
    "TensorScatter over int8": (
        "(int8[1, 2, 256, 64] cache, int8[1, 2, 4, 64] new, int64[1] start) => (int8[1, 2, 256, 64] made)",
        "made = TensorScatter <axis = 2> (cache, new, start)",
        "cache has type Int8 but must have type Float, Half, or BFloat16",
    ),
    "Attention in fp32": (
        "(float[1, 4, W, 64] q, float[1, 2, 256, 64] k, float[1, 2, 256, 64] v, bool[1, 1, W, 256] mask)"
        " => (float[1, 4, W, 64] made)",
        "made = Attention <scale = 0.125> (q, k, v, mask)",
        "Attention operation was not supported by a dedicated kernel",
    ),
    "Attention with softmax_precision": (
        "(float16[1, 4, W, 64] q, float16[1, 2, 256, 64] k, float16[1, 2, 256, 64] v, bool[1, 1, W, 256] mask)"
        " => (float16[1, 4, W, 64] made)",
        "made = Attention <scale = 0.125, softmax_precision = 1> (q, k, v, mask)",
        "Setting softmax precision is not supported in TensorRT Attention",
    ),
    "DynamicQuantizeLinear": (
        "(float[W, 64] x) => (uint8[W, 64] made, float scale, uint8 zero)",
        "made, scale, zero = DynamicQuantizeLinear (x)",
        "cannot read it",
    ),
}


TAKEN = {
    "ScatterND": ("int64[1, 2, W, 3] slots", "ScatterND (cache, slots, new)"),
    "Where": ("bool[1, 1, W, 1] slots", "Where (slots, new, cache)"),
}


@pytest.mark.parametrize("case", TAKEN)
def test_other_ways_to_write_int8_are_taken(build, case):
    slots, expression = TAKEN[case]
    rows = "W" if case == "Where" else "256"
    signature = f"(int8[1, 2, {rows}, 64] cache, int8[1, 2, W, 64] new, {slots}) => (int8[1, 2, {rows}, 64] made)"
    assert build(_parse(signature, f"made = {expression}")).startswith(b"vtrt")


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_body_avoids_is_refused(build, case):
    """When a release takes one of these, the body may become shorter, and docs/int8-attention.md has to say so."""
    signature, statement, reason = REFUSED[case]
    with pytest.raises(EngineError, match=reason):
        build(_parse(signature, statement))


def _parse(signature: str, statement: str) -> onnx.ModelProto:
    head = f'<ir_version: 11, opset_import: ["" : {operator.OPSET}]>'
    return onnx.parser.parse_model(f"{head} one {signature} {{ {statement} }}")
