"""Int8KVAttention: the reference beside exact attention, its promises, and the ONNX body beside the reference."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speceyes.plugins import cached_attention as exact
from speceyes.plugins.int8_attention import operator
from speceyes.plugins.int8_attention.function import function_proto
from speceyes.plugins.int8_attention.operator import CHUNK, error_bound, int8_kv_attention

HEAD_DIM = 16
SCALE = 0.25


def feeds(seed: int, batch: int, width: int, capacity: int, heads: int, kv_heads: int, groups: int) -> dict[str, Any]:
    """Rounded states in a ragged cache, a causal mask with random holes."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    start = rng.integers(0, capacity - width + 1, batch)
    slots, places = np.arange(capacity), start[:, None] + np.arange(width)
    mask = (slots <= places[..., None]) & ((rng.random((batch, width, capacity)) < 0.8) | (slots == places[..., None]))
    return {
        "query": draw(batch, width, heads * HEAD_DIM),
        "key": draw(batch, width, kv_heads * HEAD_DIM),
        "value": draw(batch, width, kv_heads * HEAD_DIM),
        "cache_k": rng.integers(-127, 128, (batch, kv_heads, capacity, HEAD_DIM)).astype(np.int8),
        "cache_v": rng.integers(-127, 128, (batch, kv_heads, capacity, HEAD_DIM)).astype(np.int8),
        "scale_k": rng.uniform(0.005, 0.02, (batch, kv_heads, capacity, groups)).astype(np.float32),
        "scale_v": rng.uniform(0.005, 0.02, (batch, kv_heads, capacity, groups)).astype(np.float32),
        "write_index": start,
        "mask": mask[:, None],
        "center": draw(kv_heads, HEAD_DIM),
    }


def reference(feed: dict[str, Any], heads: int, kv_heads: int, groups: int) -> tuple[np.ndarray, ...]:
    return int8_kv_attention(**feed, scale=SCALE, q_num_heads=heads, kv_num_heads=kv_heads, groups=groups)


SHAPES = st.tuples(st.integers(0, 99), st.integers(1, 3), st.integers(1, 5), st.sampled_from([6, 40, 130, 300]))
HEADS = st.sampled_from([(1, 1), (4, 2), (6, 2), (4, 1)])


@given(SHAPES, HEADS, st.sampled_from([1, 2, 8]))
@settings(max_examples=40, deadline=None)
def test_the_error_beside_exact_attention_keeps_the_derived_bound(shape, heads, groups):
    """A prefill of an empty cache, so that the exact keys and values are known."""
    seed, batch, width, capacity = shape
    feed = feeds(seed, batch, width, capacity, *heads, groups)
    feed |= {"write_index": np.zeros(batch, np.int64), "mask": np.tril(np.ones((width, capacity), bool))[None, None]}
    feed["mask"] = np.broadcast_to(feed["mask"], (batch, 1, width, capacity))
    found = reference(feed, *heads, groups)[0].reshape(batch, width, heads[0], HEAD_DIM)
    empty = np.zeros((batch, heads[1], capacity, HEAD_DIM), np.float32)
    wanted = exact.cached_attention(
        *(feed[name] for name in ("query", "key", "value")),
        empty,
        empty,
        feed["write_index"],
        np.full(batch, width),
        feed["mask"],
        scale=SCALE,
        q_num_heads=heads[0],
        kv_num_heads=heads[1],
    )[0].reshape(found.shape)
    split = {name: feed[name].reshape(batch, width, heads[1], HEAD_DIM) for name in ("key", "value")}
    for row, token, head in np.ndindex(batch, width, heads[0]):
        held = head // (heads[0] // heads[1])
        query = feed["query"][row, token].reshape(heads[0], HEAD_DIM)[head]
        keys = split["key"][row, : token + 1, held] - feed["center"][held]
        bound = error_bound(query, keys, split["value"][row, : token + 1, held], SCALE, groups)
        assert np.abs(found[row, token, head] - wanted[row, token, head]).max() <= bound + 1e-5


@given(SHAPES, HEADS)
@settings(max_examples=25, deadline=None)
def test_a_token_has_the_same_bits_at_every_width_batch_and_capacity(shape, heads):
    seed, batch, width, capacity = shape
    feed = feeds(seed, batch, width, capacity, *heads, 1)
    whole = reference(feed, *heads, 1)
    row = batch - 1
    alone = {name: array[row : row + 1] for name, array in feed.items() if name != "center"} | {
        "center": feed["center"]
    }
    more = CHUNK + 7
    for name in ("cache_k", "cache_v", "scale_k", "scale_v"):
        alone[name] = np.pad(alone[name], ((0, 0), (0, 0), (0, more), (0, 0)))
    alone["mask"] = np.pad(alone["mask"], ((0, 0), (0, 0), (0, 0), (0, more)))
    for token in range(width):
        one = {**alone, "write_index": alone["write_index"] + token, "mask": alone["mask"][:, :, token : token + 1]}
        one |= {name: alone[name][:, token : token + 1] for name in ("query", "key", "value")}
        made = reference(one, *heads, 1)
        np.testing.assert_array_equal(made[0][0, 0], whole[0][row, token])
        alone |= dict(zip(("cache_k", "cache_v", "scale_k", "scale_v"), made[1:], strict=True))
    for found, kept in zip(made[1:], whole[1:], strict=True):
        np.testing.assert_array_equal(found[0, :, :capacity], kept[row])


def test_the_center_of_keys_changes_nothing_but_rounding():
    feed = feeds(3, 1, 4, 20, 2, 1, 1)
    feed |= {"write_index": np.zeros(1, np.int64), "mask": np.tril(np.ones((4, 20), bool))[None, None]}
    feed["key"] = feed["key"] + 5
    plain = reference({**feed, "center": np.zeros((1, HEAD_DIM), np.float32)}, 2, 1, 1)
    centered = reference({**feed, "center": np.full((1, HEAD_DIM), 5, np.float32)}, 2, 1, 1)
    np.testing.assert_allclose(plain[0], centered[0], atol=0.1)
    assert centered[3].max() < 0.6 * plain[3].max()


def test_what_sees_nothing_is_zero_and_what_does_not_fit_is_refused():
    feed = feeds(1, 2, 3, 10, 2, 2, 1)
    feed["mask"] = np.zeros_like(feed["mask"])
    assert not reference(feed, 2, 2, 1)[0].any()
    with pytest.raises(ValueError, match="exceeds the capacity 10"):
        reference({**feed, "write_index": np.array([8, 0])}, 2, 2, 1)


def model_of_one(heads: int, kv_heads: int, groups: int, head_dim: int, batch: int | str, capacity: int | str) -> Any:
    """A model of one node with its function."""
    helper, kinds = onnx.helper, onnx.TensorProto
    rows, keys = [batch, "width", heads * head_dim], [batch, "width", kv_heads * head_dim]
    held, scales = ([batch, kv_heads, capacity, channels] for channels in (head_dim, groups))
    shapes = [rows, keys, keys, held, held, scales, scales, [batch], [batch, 1, "width", capacity]]
    types = [kinds.FLOAT] * 3 + [kinds.INT8] * 2 + [kinds.FLOAT] * 2 + [kinds.INT64, kinds.BOOL, kinds.FLOAT]
    infos = zip(operator.INPUTS, types, [*shapes, [kv_heads, head_dim]], strict=True)
    made = zip(operator.OUTPUTS, [types[0], *types[3:7]], [rows, held, held, scales, scales], strict=True)
    attributes = {"scale": SCALE, "q_num_heads": heads, "kv_num_heads": kv_heads, "groups": groups}
    node = helper.make_node(operator.NAME, operator.INPUTS, operator.OUTPUTS, domain=operator.DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(*info) for info in infos],
        [helper.make_tensor_value_info(*info) for info in made],
    )
    opsets = [helper.make_opsetid("", operator.OPSET), helper.make_opsetid(operator.DOMAIN, operator.VERSION)]
    model = helper.make_model(graph, functions=[function_proto()], opset_imports=opsets, ir_version=11)
    onnx.checker.check_model(model, full_check=True)
    return model


@cache
def session(heads: int, kv_heads: int, groups: int) -> Any:
    model = model_of_one(heads, kv_heads, groups, HEAD_DIM, "batch", "capacity")
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@given(SHAPES, HEADS, st.sampled_from([1, 2, 8]))
@settings(max_examples=40, deadline=None)
def test_the_onnx_body_gives_the_reference(shape, heads, groups):
    """Codes and scales to the bit; sums differ in their order alone: at most `terms` roundings of fp32 each."""
    seed, batch, width, capacity = shape
    feed = feeds(seed, batch, width, capacity, *heads, groups)
    found = session(*heads, groups).run(None, feed)
    wanted = reference(feed, *heads, groups)
    for made, expected in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(made, expected)
    score = float(np.abs(feed["query"]).max() * 127 * 0.05 * HEAD_DIM * SCALE)
    tolerance = float(np.finfo(np.float32).eps) * (capacity + HEAD_DIM * score) * 127 * 0.05
    np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=tolerance)


def test_tensorrt_for_rtx_builds_the_body():
    """Really parsed and built, for widths of 1 to 16; no engine is run."""
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is missing; `pip install tensorrt-rtx-cu13`")
    model = model_of_one(4, 2, 1, 64, 1, 256)
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model.SerializeToString()), [str(parser.get_error(i)) for i in range(parser.num_errors)]
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for value in model.graph.input:
        dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if "width" in dims:
            profile.set_shape(value.name, *([width if dim == "width" else dim for dim in dims] for width in (1, 4, 16)))
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None and engine.nbytes > 100_000
