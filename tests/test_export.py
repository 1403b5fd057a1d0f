"""The form of the canonical graphs: names, dimensions, operators, weights, bytes; and what exporting leaves alone."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from speceyes.compile.checkpoint import open_checkpoint
from speceyes.compile.export import export_parts, save_graph
from speceyes.engines.errors import CheckpointError, ExportError
from speceyes.plugins import cached_attention as operator
from transformers.modeling_utils import AttentionInterface

from .checkpoints import MAKERS, checkpoint, exported

PARTS = [(family, part) for family in MAKERS for part in ("decoder", "vision")]
WITH_VISION = ("idefics3", "llava", "llava_siglip", "qwen2_vl", "qwen2_5_vl")
PARTS = [(family, part) for family, part in PARTS if part == "decoder" or family in WITH_VISION]

STANDARD = {
    *("Add", "Attention", "Cast", "Clip", "Concat", "Conv", "Cos", "Equal", "Gather", "Gelu", "Gemm", "GreaterOrEqual"),
    *("LayerNormalization", "MatMul", "Mul", "Pad", "RMSNormalization", "Reshape", "RotaryEmbedding", "ScatterND"),
    *("Sigmoid", "Sin", "Slice", "Split", "Squeeze", "Tanh", "Transpose", "Unsqueeze", "Where"),
}


def signature(values: Any) -> dict[str, tuple[str, list[int | str]]]:
    return {
        value.name: (value.dtype.name, [dim if isinstance(dim, int) else str(dim) for dim in value.shape])
        for value in values
    }


@pytest.mark.parametrize("family", ["llama", "idefics3", "qwen2_vl", "gpt2"])
def test_decoder_signature(family: str) -> None:
    graph = exported(family).parts["decoder"].graph
    tokens = ["batch", "width"]
    kv_heads = 4 if family == "gpt2" else 2
    cache = ("FLOAT", ["batch", kv_heads, "capacity", 16])
    pairs = {f"{kind}.{layer}": cache for kind in "kv" for layer in range(2)}
    vocabulary = exported(family).checkpoint.describe()["vocabulary"]
    vision = {"image_features": ("FLOAT", ["features", 64]), "feature_index": ("INT64", tokens)}
    assert signature(graph.inputs) == {
        "input_ids": ("INT64", tokens),
        **(vision if family in WITH_VISION else {}),
        "position_ids": ("INT64", [3, *tokens] if family == "qwen2_vl" else tokens),
        "write_index": ("INT64", ["batch"]),
        "kv_length": ("INT64", ["batch"]),
        "mask": ("BOOL", ["batch", 1, "width", "capacity"]),
        "logit_index": ("INT64", ["rows"]),
        **{f"cache_{name}": value for name, value in pairs.items()},
    }
    assert signature(graph.outputs) == {
        "logits": ("FLOAT", ["rows", vocabulary]),
        "hidden": ("FLOAT", ["rows", 64]),
        **{f"present_{name}": value for name, value in pairs.items()},
    }


def test_vision_signatures() -> None:
    def of(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
        graph = exported(family).parts["vision"].graph
        return signature(graph.inputs), signature(graph.outputs)

    tiles = {"pixel_values": ("FLOAT", ["tiles", 3, 32, 32])}
    assert of("idefics3") == (tiles, {"image_features": ("FLOAT", ["4*tiles", 64])})
    assert of("llava") == (tiles, {"image_features": ("FLOAT", ["16*tiles", 64])})
    patches = {"pixel_values": ("FLOAT", ["patches", 1176]), "rotary_positions": ("INT64", ["patches", 2])}
    windows = {"window_index": ("INT64", ["patches/4"]), "window_id": ("INT64", ["patches"])}
    features = {"image_features": ("FLOAT", ["patches/4", 64])}
    assert of("qwen2_vl") == (patches, features)
    assert of("qwen2_5_vl") == (patches | windows, features)


@pytest.mark.parametrize(("family", "part"), PARTS)
def test_graph_is_valid_and_plain(family: str, part: str) -> None:
    """Valid ONNX; known operators alone, no shape arithmetic, fp32 throughout, no trace of the machine it came from."""
    path = exported(family).paths[part]
    onnx.checker.check_model(path, full_check=True)
    proto = onnx.load(path, load_external_data=False)
    custom = {node.op_type for node in proto.graph.node if node.domain}
    assert custom == ({operator.NAME} if part == "decoder" else set())
    assert {node.op_type for node in proto.graph.node} - custom <= STANDARD
    allowed = {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}
    assert {tensor.data_type for tensor in proto.graph.initializer} <= allowed
    assert not any(node.metadata_props or node.doc_string for node in proto.graph.node)
    assert str(Path(__file__).parent.parent).encode() not in path.read_bytes()
    assert b"site-packages" not in path.read_bytes()


@pytest.mark.parametrize("family", list(MAKERS))
def test_attention_nodes(family: str) -> None:
    """One node per layer with its own window; one function, whose body has opset 24 and the reference's names."""
    found = exported(family)
    nodes = [node for node in found.parts["decoder"].graph if node.op_type == operator.NAME]
    windows = [node.attributes["window"].as_int() for node in nodes]
    expected = {"gemma3_text": [6, 0, 6], "mistral": [5, 5], "qwen2_sliding": [0, 5]}
    assert windows == expected.get(family, [0, 0])
    kv_heads = found.checkpoint.kv_heads
    assert {node.attributes["q_num_heads"].as_int() for node in nodes} == {4}
    assert {node.attributes["kv_num_heads"].as_int() for node in nodes} == {kv_heads}
    scale = {"gemma3_text": 24**-0.5, "llama_broad": 320**-0.5}.get(family, 0.25)
    assert {round(node.attributes["scale"].as_float(), 6) for node in nodes} == {round(scale, 6)}
    (function,) = found.parts["decoder"].functions.values()
    assert (function.domain, function.name, function.opset_imports[""]) == ("speceyes", "CachedAttention", 24)
    assert tuple(value.name for value in function.inputs) == operator.INPUTS
    assert tuple(value.name for value in function.outputs) == operator.OUTPUTS


def test_projections_reach_attention_without_detours() -> None:
    """MatMul, RotaryEmbedding, CachedAttention, MatMul: nothing moves heads about in between."""
    for node in exported("llama").parts["decoder"].graph:
        if node.op_type == operator.NAME:
            query, key, value = (node.inputs[index].producer() for index in range(3))
            assert (query.op_type, key.op_type, value.op_type) == ("RotaryEmbedding", "RotaryEmbedding", "MatMul")
            assert query.inputs[0].producer().op_type == key.inputs[0].producer().op_type == "MatMul"
            assert [user.op_type for user in node.outputs[0].consumers()] == ["MatMul"]


def test_weights_are_named_after_parameters_and_stored_for_matmul() -> None:
    found = exported("idefics3")
    weights = found.parts["decoder"].graph.initializers
    parameters = dict(found.checkpoint.model.named_parameters())
    name = "text_model.layers.1.mlp.down_proj.weight"
    expected = parameters[f"model.{name}"].detach().numpy()
    np.testing.assert_array_equal(weights[name].const_value.numpy(), expected.T)
    np.testing.assert_array_equal(weights["head.weight"].const_value.numpy(), parameters["lm_head.weight"].detach())


def test_tied_head_reads_the_embedding_table() -> None:
    graph = exported("llama").parts["decoder"].graph
    (head,) = [node for node in graph if node.op_type == "Gemm"]
    (lookup,) = [node for node in graph if node.op_type == "Gather" and node.inputs[0].is_initializer()]
    assert head.inputs[1] is lookup.inputs[0]
    assert head.attributes["transB"].as_int() == 1


def test_gemma_norms_carry_their_offset() -> None:
    found = exported("gemma3_text")
    weight = found.checkpoint.model.model.layers[0].self_attn.q_norm.weight.detach().numpy()
    stored = found.parts["decoder"].graph.initializers["text_model.layers.0.self_attn.q_norm.weight"]
    np.testing.assert_array_equal(stored.const_value.numpy(), 1 + weight)


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_same_checkpoint_same_bytes(tmp_path: Path) -> None:
    """In another process too, where sets of strings iterate in another order."""
    call = f"export_parts({str(checkpoint('gemma3_text'))!r}, {str(tmp_path)!r})"
    code = f"from speceyes.compile.export import export_parts; {call}"
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONHASHSEED": hash_seed})
    assert digest(tmp_path) == digest(exported("gemma3_text").paths["decoder"].parent)


def test_export_leaves_transformers_and_the_model_alone() -> None:
    names = set(AttentionInterface._global_mapping)
    modeling = sys.modules["transformers.models.llama.modeling_llama"]
    rotate = modeling.apply_rotary_pos_emb
    fresh = open_checkpoint(checkpoint("llama"))
    ids = torch.arange(9)[None]
    with torch.no_grad():
        before = fresh.model(ids).logits
        reports: list[tuple[str, float]] = []
        parts = export_parts(fresh, progress=lambda part, seconds: reports.append((part, seconds))).parts
        after = fresh.model(ids).logits
    assert set(AttentionInterface._global_mapping) == names
    assert modeling.apply_rotary_pos_emb is rotate
    assert not any("forward" in vars(module) for module in fresh.model.modules())
    assert fresh.model.config._attn_implementation == "eager"
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert [part for part, _ in reports] == ["decoder"] == list(parts)
    assert reports[0][1] > 0


def test_failed_trace_is_one_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = open_checkpoint(checkpoint("gpt2"))
    names = set(AttentionInterface._global_mapping)
    monkeypatch.setattr(
        fresh.model.transformer.h[1].mlp, "forward", lambda states: states if states.sum() > 0 else -states
    )
    with pytest.raises(ExportError, match=r"^decoder: the model could not be traced \(") as caught:
        export_parts(fresh)
    assert "\n" not in str(caught.value)
    assert set(AttentionInterface._global_mapping) == names


def test_refusal_comes_before_loading(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        export_parts(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_left_of_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exported("llama").parts["decoder"]
    target = tmp_path / "decoder.onnx"

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_graph(model, target)
    assert list(tmp_path.iterdir()) == []


def test_saved_graph_reads_back_with_its_weights() -> None:
    found = exported("qwen2")
    again = ir.load(found.paths["decoder"])
    for name, value in found.parts["decoder"].graph.initializers.items():
        stored = again.graph.initializers[name].const_value
        assert stored is not None
        assert value.const_value is not None
        np.testing.assert_array_equal(stored.numpy(), value.const_value.numpy())
