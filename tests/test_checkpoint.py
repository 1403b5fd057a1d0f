"""Opening a checkpoint: what is refused, with which words, before any weight is read; what is described."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from speceyes.compile.checkpoint import open_checkpoint
from speceyes.engines.errors import CheckpointError

from .checkpoints import checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny Llama checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def refusal(source: Path | str) -> str:
    """The message of the refusal, which is one line."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_such_folder(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "absent")


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal("nobody/nothing-at-all")
    assert message.startswith("nobody/nothing-at-all: no such folder, and the hub gave no such checkpoint")


def test_config_missing(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "config.json: not found" in refusal(folder)


def test_config_broken(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')
    assert "config.json: not valid JSON" in refusal(folder)


def test_config_not_an_object(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    assert "holds list, expected an object" in refusal(folder)


def test_config_refused_by_transformers(folder: Path) -> None:
    edit_config(folder, hidden_size="wide")
    assert "config.json: " in refusal(folder)


@pytest.mark.parametrize("model_type", ["t5", None, 3, ["llama"]])
def test_unknown_family(folder: Path, model_type: object) -> None:
    edit_config(folder, model_type=model_type)
    message = refusal(folder)
    assert f"model_type {model_type!r} is not a known family" in message
    assert "gemma3_text, gpt2, idefics3, llama, llava" in message


def test_quantised(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "awq"})
    assert "the weights are quantised (awq)" in refusal(folder)


def test_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "pickled (.bin)" in message
    assert "save_pretrained" in message


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors and no model.safetensors.index.json" in refusal(folder)


def test_missing_shard(folder: Path) -> None:
    shards = {"model.norm.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "1 of 2 shards are missing (model-2.safetensors)" in refusal(folder)


def test_shard_outside_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "'../model.safetensors' is not a plain file name" in refusal(folder)


def test_truncated_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "model.safetensors: broken" in refusal(folder)


def test_more_weights_than_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    available = namedtuple("Memory", "available")(200_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    message = refusal(folder)
    weights = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert f"{weights:,} weights need" in message
    assert "0.0 GiB are available" in message


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length(folder: Path, rope_type: str) -> None:
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    if rope_type == "longrope":
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 256}
    edit_config(folder, rope_parameters=parameters)
    assert f"rope_type {rope_type!r} changes with the text's length" in refusal(folder)


def test_tower_that_is_not_known(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llava"), tmp_path / "llava"))
    edit_config(folder, vision_config={"model_type": "pixtral"})
    assert "vision_config.model_type 'pixtral' is not a known tower" in refusal(folder)


def damage(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        _ = open_checkpoint(folder).model
    return str(caught.value)


def test_missing_weight_is_named(folder: Path) -> None:
    damage(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    assert "missing keys in the weights: model.layers.1.mlp.up_proj.weight" in load_refusal(folder)


def test_surplus_weight_is_named(folder: Path) -> None:
    damage(folder, lambda weights: weights.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(128, 64)}))
    assert "unexpected keys in the weights: model.layers.7.mlp.up_proj.weight" in load_refusal(folder)


def test_weight_of_another_shape_is_named(folder: Path) -> None:
    damage(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(32)}))
    assert "mismatched keys in the weights: model.norm.weight" in load_refusal(folder)


def test_loads_in_fp32_with_ties(folder: Path) -> None:
    damage(folder, lambda weights: weights.update({name: tensor.bfloat16() for name, tensor in weights.items()}))
    model = open_checkpoint(folder).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not model.training


def test_describe_text() -> None:
    assert open_checkpoint(checkpoint("llama")).describe() == {
        "family": "llama",
        "hidden": 64,
        "vocabulary": 400,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "context_length": 512,
        "rope": "default",
        "image_token_id": None,
        "eos_token_ids": [398],
        "bos_token_id": 397,
        "pad_token_id": 399,
    }


@pytest.mark.parametrize(
    ("family", "rope", "image_token", "eos"),
    [
        ("idefics3", "default", "<image>", "<end_of_utterance>"),
        ("llava", "default", "<image>", "<eos>"),
        ("qwen2_vl", "mrope", "<|image_pad|>", "<|im_end|>"),
        ("qwen2_5_vl", "mrope", "<|image_pad|>", "<|im_end|>"),
        ("gpt2", "learned", None, "<eos>"),
    ],
)
def test_describe_families(family: str, rope: str, image_token: str | None, eos: str) -> None:
    described = open_checkpoint(checkpoint(family)).describe()
    vocabulary = json.loads((checkpoint(family) / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in vocabulary}
    assert described["family"] == family
    assert described["rope"] == rope
    assert described["image_token_id"] == (ids[image_token] if image_token else None)
    assert described["eos_token_ids"] == [ids[eos]]


def test_generation_config_has_the_last_word_on_eos(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [398, 7]}))
    assert open_checkpoint(folder).eos_token_ids == [398, 7]


def test_folder_may_hold_shards(tmp_path: Path) -> None:
    model = open_checkpoint(checkpoint("llama")).model
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    again = open_checkpoint(tmp_path).model
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
