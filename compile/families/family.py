"""What a family of checkpoints has to say for itself; everything else of an export is common to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from ...engines.errors import CheckpointError

Rope = Literal["default", "mrope", "learned"]
Layout = Literal["text", "idefics3", "llava", "qwen2_vl"]


_LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True)
class VisionPart:
    """The vision tower as one traceable call.

    `inputs` are example tensors in the graph's order, `dynamic` names the symbolic dimensions of each
    ({axis: symbol}). Where `group` patches become one feature, "groups" is the number of patches divided by it.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    dynamic: dict[str, dict[int, str]]
    group: int = 1


@dataclass(frozen=True)
class Family:
    """A text decoder in the Llama manner; families with their own ways override the methods.

    `model_types` are the values of `model_type` in config.json; `layout` names how prompts and images are processed.
    """

    name: str
    model_types: tuple[str, ...]
    rope: Rope = "default"
    layout: Layout = "text"

    @property
    def has_vision(self) -> bool:
        return self.layout != "text"

    def check(self, config: Any) -> None:
        """Raise CheckpointError for a configuration of this family that the canonical graphs cannot express."""
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
        for kind in kinds:
            if kind.get("rope_type") in _LENGTH_DEPENDENT:
                raise CheckpointError(
                    f"config.json: rope_type {kind['rope_type']!r} changes with the text's length, which a cache of"
                    " rotated keys cannot follow; allowed: default, linear, llama3, yarn"
                )

    def text_model(self, model: Any) -> nn.Module:
        """The module that runs the decoder's layers from embeddings."""
        module: nn.Module = model.get_decoder()
        return module

    def vision_part(self, model: Any) -> VisionPart | None:
        """The tower with its projector, or None."""
        return None

    def image_token_id(self, config: Any) -> int | None:
        return getattr(config, "image_token_id", None)
