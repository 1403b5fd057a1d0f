"""The families of checkpoints that can be compiled, by the `model_type` of their config.json."""

from __future__ import annotations

from .family import Family, VisionPart
from .gemma3 import Gemma3
from .gpt2 import GPT2
from .idefics3 import Idefics3
from .llava import Llava
from .qwen2_vl import Qwen2VL, Qwen25VL

FAMILIES: tuple[Family, ...] = (
    Idefics3(),
    Llava(),
    Qwen2VL(),
    Qwen25VL(),
    Family("llama", ("llama",)),
    Family("mistral", ("mistral",)),
    Family("qwen2", ("qwen2",)),
    Family("qwen3", ("qwen3",)),
    Gemma3(),
    GPT2(),
)

BY_MODEL_TYPE: dict[str, Family] = {model_type: family for family in FAMILIES for model_type in family.model_types}

__all__ = ["BY_MODEL_TYPE", "FAMILIES", "Family", "VisionPart"]
