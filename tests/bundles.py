"""Bundles of the tiny checkpoints, built once per process, and transformers' answers to compare with."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import speceyes
import torch
from PIL import Image
from speceyes.compile.processing import load_source
from speceyes.runtime.session import Model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from .checkpoints import checkpoint, session_folder

VISION = ("idefics3", "llava", "llava_siglip", "qwen2_vl", "qwen2_5_vl")
TEXT = ("llama", "qwen2", "gemma3_text", "gpt2")
SHAPES = {"portrait": (40, 90), "landscape": (120, 50), "square": (64, 64)}


@cache
def bundle(family: str, precision: str = "fp32") -> Path:
    """The bundle of a family's tiny checkpoint, without the accuracy check and the cost measurement."""
    out = session_folder() / f"{family}-{precision}.speceyes"
    parts = {"decoder": precision, "vision": "fp32" if precision == "fp32" else "int8"}
    speceyes.compile(checkpoint(family), out, precision=parts, check={"enabled": False}, measure={"enabled": False})
    return out


@cache
def model(family: str, precision: str = "fp32") -> Model:
    return speceyes.load(bundle(family, precision), threads=1)


def picture(shape: str, seed: int = 0) -> Image.Image:
    """A picture of coarse random blocks, so that every tile differs."""
    width, height = SHAPES[shape]
    coarse = np.random.default_rng([seed, width, height]).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)


def ask(text: str, images: int) -> list[dict[str, Any]]:
    """One user turn with so many images before the text."""
    return [{"role": "user", "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}]}]


@cache
def _reference(family: str) -> tuple[Any, Any]:
    source = load_source(checkpoint(family))
    loader = AutoModelForImageTextToText if family in VISION else AutoModelForCausalLM
    network = loader.from_pretrained(checkpoint(family), dtype=torch.float32).eval()
    return network, source.processor or source.tokenizer


def expected_tokens(
    family: str, text: str, images: list[Image.Image], count: int, messages: list[dict[str, Any]] | None = None
) -> list[int]:
    """transformers' greedy answer in fp32, at most `count` tokens, an end-of-sequence token included.

    Families with vision are asked in one user turn; text-only ones complete the raw text.
    """
    network, processor = _reference(family)
    if family in VISION:
        prompt = processor.apply_chat_template(messages or ask(text, len(images)), add_generation_prompt=True)
        inputs = processor(text=[prompt], images=[images] if images else None, return_tensors="pt")
    else:
        inputs = processor(text, return_tensors="pt")
    with torch.inference_mode():
        out = network.generate(**inputs, max_new_tokens=count, do_sample=False)
    tokens: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens
