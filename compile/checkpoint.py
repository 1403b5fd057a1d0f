"""Open a checkpoint in the Hugging Face format: refuse what cannot be compiled before any long work, then load it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from ..engines.errors import CheckpointError
from .families import BY_MODEL_TYPE, Family

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_BYTES_PER_WEIGHT = 4


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that passed the checks; `model` loads it when first read.

    `folder` is local (a hub id has been downloaded), `config` the transformers configuration, `family` its family.
    """

    source: str
    folder: Path
    config: PreTrainedConfig
    family: Family

    @cached_property
    def model(self) -> Any:
        """The transformers model in fp32, in evaluation mode. Raises CheckpointError when weights and model differ."""
        return _load(self.folder, self.config, self.family)

    @property
    def text_config(self) -> Any:
        return self.config.get_text_config()

    @property
    def hidden(self) -> int:
        return int(self.text_config.hidden_size)

    @property
    def layers(self) -> int:
        return int(self.text_config.num_hidden_layers)

    @property
    def heads(self) -> int:
        return int(self.text_config.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        return int(getattr(self.text_config, "num_key_value_heads", None) or self.heads)

    @property
    def head_dim(self) -> int:
        return int(getattr(self.text_config, "head_dim", None) or self.hidden // self.heads)

    def describe(self) -> dict[str, Any]:
        """The manifest's `model` section."""
        return {
            "family": self.family.name,
            "hidden": self.hidden,
            "vocabulary": int(self.text_config.vocab_size),
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "context_length": int(self.text_config.max_position_embeddings),
            "rope": self.family.rope,
            "image_token_id": self.family.image_token_id(self.config) if self.family.has_vision else None,
            "eos_token_ids": self.eos_token_ids,
            "bos_token_id": self._token_id("bos_token_id"),
            "pad_token_id": self._token_id("pad_token_id"),
        }

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end an answer, from generation_config.json, else from config.json."""
        ids = self._token_id("eos_token_id")
        if ids is None:
            return []
        return [int(id) for id in ids] if isinstance(ids, list) else [int(ids)]

    def _token_id(self, name: str) -> Any:
        generation = _read_json(self.folder / "generation_config.json", missing={})
        if generation.get(name) is not None:
            return generation[name]
        in_text = getattr(self.text_config, name, None)
        return in_text if in_text is not None else getattr(self.config, name, None)


def open_checkpoint(source: Path | str) -> Checkpoint:
    """Check a local folder or a hub id and return it, not yet loaded.

    Raises CheckpointError, in one line, for: no such folder, hub out of reach, config.json missing or broken, unknown
    family, quantised weights, no safetensors, a missing or broken shard, more weights than memory.
    """
    folder = _locate(str(source))
    raw = _read_json(folder / "config.json")
    family = _family(folder, raw)
    if "quantization_config" in raw:
        quantisation = raw["quantization_config"]
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else quantisation
        raise CheckpointError(
            f"{folder}: the weights are quantised ({method}); use the original checkpoint, the recipe chooses precision"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise CheckpointError(f"{folder}/config.json: {_one_line(error)}") from error
    family.check(config)
    _check_memory(folder, _shards(folder))
    return Checkpoint(str(source), folder, config, family)


def _locate(source: str) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(source):
        raise CheckpointError(f"{source}: no such folder; give a checkpoint's folder or a hub id like owner/name")
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        _family(Path(source), _read_json(Path(hf_hub_download(source, "config.json"))))
        return Path(snapshot_download(source, allow_patterns=list(_HUB_FILES)))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{source}: no such folder, and the hub gave no such checkpoint ({_one_line(error)})"
        ) from error


def _read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    if not path.is_file():
        if missing is not None:
            return missing
        raise CheckpointError(f"{path}: not found; a checkpoint's folder holds config.json, weights and a tokenizer")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({_one_line(error)})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds {type(content).__name__}, expected an object")
    return content


def _family(folder: Path, raw: dict[str, Any]) -> Family:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in BY_MODEL_TYPE:
        known = ", ".join(sorted(BY_MODEL_TYPE))
        raise CheckpointError(f"{folder}/config.json: model_type {model_type!r} is not a known family; known: {known}")
    return BY_MODEL_TYPE[model_type]


def _shards(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        listed = sorted(set(_read_json(folder / _INDEX).get("weight_map", {}).values()))
        for name in listed:
            if Path(name).name != name:
                raise CheckpointError(f"{folder}/{_INDEX}: shard {name!r} is not a plain file name")
        missing = [name for name in listed if not (folder / name).is_file()]
        if missing or not listed:
            raise CheckpointError(
                f"{folder}/{_INDEX}: {len(missing)} of {len(listed)} shards are missing"
                f" ({', '.join(missing[:3]) or 'none is listed'}); download the checkpoint again"
            )
        return [folder / name for name in listed]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt")):
        raise CheckpointError(
            f"{folder}: weights are pickled (.bin); convert them once: from_pretrained(folder).save_pretrained(folder)"
            " in transformers writes model.safetensors"
        )
    raise CheckpointError(f"{folder}: no {_SINGLE} and no {_INDEX}; a checkpoint needs its weights as safetensors")


def _check_memory(folder: Path, shards: list[Path]) -> None:
    weights = 0
    for shard in shards:
        try:
            with safe_open(shard, "pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - not a dict
                    weights += _product(tensors.get_slice(key).get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{shard}: broken ({_one_line(error)}); download the checkpoint again") from error
    need, have = weights * _BYTES_PER_WEIGHT, psutil.virtual_memory().available
    if need > have:
        raise CheckpointError(
            f"{folder}: {weights:,} weights need {need / 2**30:.1f} GiB in fp32, {have / 2**30:.1f} GiB are available;"
            " compile on a machine with more memory"
        )


def _product(shape: list[int]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


def _load(folder: Path, config: PreTrainedConfig, family: Family) -> Any:
    auto = transformers.AutoModelForImageTextToText if family.has_vision else transformers.AutoModelForCausalLM
    try:
        model, info = auto.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
        )
    except Exception as error:
        raise CheckpointError(f"{folder}: the weights could not be loaded ({_one_line(error)})") from error
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(key if isinstance(key, str) else key[0] for key in info[fault])
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise CheckpointError(f"{folder}: {fault.replace('_', ' ')} in the weights: {', '.join(names[:5])}{more}")
    return model.eval()


def _one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
