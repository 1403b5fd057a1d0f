"""The CachedAttention operator: its ONNX body in ONNX Runtime against the numpy reference, and their promises."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speceyes.plugins import cached_attention as operator

HEAD_DIM = 8


@cache
def session(q_num_heads: int, kv_num_heads: int, window: int) -> Any:
    """A model of one node with its function, every dimension dynamic."""
    helper, kinds = onnx.helper, onnx.TensorProto
    rows, keys = ["batch", "width", q_num_heads * HEAD_DIM], ["batch", "width", kv_num_heads * HEAD_DIM]
    cache_shape = ["batch", kv_num_heads, "capacity", HEAD_DIM]
    shapes = [rows, keys, keys, cache_shape, cache_shape, ["batch"], ["batch"], ["batch", 1, "width", "capacity"]]
    types = [kinds.FLOAT] * 5 + [kinds.INT64, kinds.INT64, kinds.BOOL]
    infos = [helper.make_tensor_value_info(*info) for info in zip(operator.INPUTS, types, shapes, strict=True)]
    outputs = [
        helper.make_tensor_value_info(name, kinds.FLOAT, shape)
        for name, shape in zip(operator.OUTPUTS, [rows, cache_shape, cache_shape], strict=True)
    ]
    node = helper.make_node(
        operator.NAME,
        operator.INPUTS,
        operator.OUTPUTS,
        domain=operator.DOMAIN,
        scale=0.3,
        q_num_heads=q_num_heads,
        kv_num_heads=kv_num_heads,
        window=window,
    )
    model = helper.make_model(
        helper.make_graph([node], "one", infos, outputs),
        functions=[operator.function_proto()],
        opset_imports=[
            helper.make_opsetid("", operator.OPSET),
            helper.make_opsetid(operator.DOMAIN, operator.VERSION),
        ],
        ir_version=11,
    )
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds(batch: int, width: int, capacity: int, heads: int, kv_heads: int, seed: int) -> dict[str, np.ndarray]:
    """Random states, ragged starts and lengths, a causal mask with random holes."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    write_index = rng.integers(0, capacity - width + 1, batch)
    slots = write_index[:, None] + np.arange(width)
    causal = np.arange(capacity) <= slots[:, :, None]
    return {
        "query": normal(batch, width, heads * HEAD_DIM),
        "key": normal(batch, width, kv_heads * HEAD_DIM),
        "value": normal(batch, width, kv_heads * HEAD_DIM),
        "cache_k": normal(batch, kv_heads, capacity, HEAD_DIM),
        "cache_v": normal(batch, kv_heads, capacity, HEAD_DIM),
        "write_index": write_index,
        "kv_length": write_index + rng.integers(0, width + 1, batch),
        "mask": (causal & (rng.random(causal.shape) < 0.9))[:, None],
    }


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    width=st.integers(1, 6),
    spare=st.integers(0, 12),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2)]),
    window=st.sampled_from([0, 1, 3, 8]),
    seed=st.integers(0, 2**16),
)
def test_body_equals_reference(
    batch: int, width: int, spare: int, heads: tuple[int, int], window: int, seed: int
) -> None:
    inputs: dict[str, Any] = feeds(batch, width, width + spare, *heads, seed)
    expected = operator.cached_attention(
        **inputs, scale=0.3, q_num_heads=heads[0], kv_num_heads=heads[1], window=window
    )
    attended, present_k, present_v = session(*heads, window).run(None, inputs)
    np.testing.assert_allclose(attended, expected[0], rtol=0, atol=2e-6)
    np.testing.assert_array_equal(present_k, expected[1])
    np.testing.assert_array_equal(present_v, expected[2])


def reference(inputs: dict[str, Any], window: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return operator.cached_attention(**inputs, scale=0.3, q_num_heads=4, kv_num_heads=2, window=window)


def test_reference_against_the_definition() -> None:
    """One token that sees slots 1..3 through a window of three: softmax by hand, head 3 reads the second key head."""
    inputs: dict[str, Any] = feeds(1, 1, 6, 4, 2, seed=5)
    inputs |= {"write_index": np.array([3]), "kv_length": np.array([4]), "mask": np.ones((1, 1, 1, 6), bool)}
    attended, present_k, present_v = reference(inputs, window=3)
    np.testing.assert_array_equal(present_k[0, 1, 3], inputs["key"][0, 0, HEAD_DIM:])
    query = inputs["query"][0, 0, 3 * HEAD_DIM :].astype(np.float64)
    weights = np.exp(0.3 * present_k[0, 1, 1:4].astype(np.float64) @ query)
    expected = weights / weights.sum() @ present_v[0, 1, 1:4]
    np.testing.assert_allclose(attended[0, 0, 3 * HEAD_DIM :], expected, atol=1e-6)


def test_slots_beyond_the_length_are_never_read() -> None:
    inputs: dict[str, Any] = feeds(2, 3, 9, 4, 2, seed=1)
    inputs |= {"write_index": np.array([2, 0]), "kv_length": np.array([4, 3]), "mask": np.ones((2, 1, 3, 9), bool)}
    before = session(4, 2, 0).run(None, inputs)[0]
    for name in ("cache_k", "cache_v"):
        inputs[name] = inputs[name].copy()
        inputs[name][0, :, 5:] = 1e6
        inputs[name][1, :, 3:] = -1e6
    after = session(4, 2, 0).run(None, inputs)[0]
    np.testing.assert_array_equal(after, before)


def test_a_token_that_sees_nothing_yields_zeros() -> None:
    inputs: dict[str, Any] = feeds(1, 2, 5, 4, 2, seed=2)
    inputs["mask"] = np.zeros_like(inputs["mask"])
    assert not session(4, 2, 0).run(None, inputs)[0].any()
    assert not reference(inputs)[0].any()


def test_reference_leaves_its_inputs_alone() -> None:
    inputs: dict[str, Any] = feeds(2, 2, 6, 4, 2, seed=3)
    copies = {name: value.copy() for name, value in inputs.items()}
    reference(inputs)
    for name, value in inputs.items():
        np.testing.assert_array_equal(value, copies[name])


def test_a_row_must_fit_into_the_cache() -> None:
    inputs: dict[str, Any] = feeds(1, 3, 5, 4, 2, seed=4)
    inputs["write_index"] = np.array([3])
    with pytest.raises(ValueError, match=r"write_index \[3\] \+ width 3 exceeds the capacity 5"):
        reference(inputs)
