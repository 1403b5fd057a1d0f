"""Checkpoint folders without weights: configuration, tokenizer and image processor of each family, and test images."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    CLIPImageProcessorPil,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    LlavaConfig,
    LlavaImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
    SmolVLMConfig,
    SmolVLMImageProcessorPil,
)

from .checkpoints import CORPUS, IDEFICS3_TEMPLATE, session_folder, tokenizer

LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{# Render all images first #}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{# Render all text next #}{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
QWEN_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' -%}\n    {{ raise_exception('no system role') }}\n{%- endif -%}\n"
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def llama_tokenizer(special: list[str], *, strip: bool = True) -> PreTrainedTokenizerFast:
    """BPE over ▁ with byte fallback: as Llama 2 has it, or, without `strip`, as Gemma does."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary = dict(model["vocab"])
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strip else replace
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if strip else stages)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ["<s>", "</s>", *special]])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def unigram_tokenizer() -> PreTrainedTokenizerFast:
    """Unigram with the Metaspace decoder, which drops the first token's mark."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", pad_token="</s>")


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's special tokens and no bos."""
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    return tokenizer(special, bos=None, eos="<|im_end|>", pad="<|endoftext|>")


def smolvlm_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with SmolVLM's tokens for tiles."""
    special = ["<|im_start|>", "<end_of_utterance>", "<|endoftext|>", "<fake_token_around_image>", "<image>"]
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    return tokenizer(
        [*special, "<global-img>", *rows], bos="<|im_start|>", eos="<end_of_utterance>", pad="<|endoftext|>"
    )


def _save(
    folder: Path,
    config: Any,
    text: PreTrainedTokenizerFast,
    image: Any = None,
    template: str | None = None,
    options: dict[str, Any] | None = None,
) -> Path:
    config.save_pretrained(folder)
    text.save_pretrained(folder)
    if image is not None:
        image.save_pretrained(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if options is not None:
        (folder / "processor_config.json").write_text(json.dumps(options))
    return folder


def idefics3(folder: Path, *, split: bool = True, kind: type = Idefics3Config) -> Path:
    """64-pixel tiles of 16 / 2 = 8 → 4 x 4 patches merged by 2: 4 features a tile."""
    text = smolvlm_tokenizer()
    config = kind(
        image_token_id=text.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        vision_config={"image_size": 64, "patch_size": 16, **SMALL},
        text_config={"model_type": "llama", "vocab_size": len(text), **SMALL},
    )
    image_kind = SmolVLMImageProcessorPil if kind is SmolVLMConfig else Idefics3ImageProcessorPil
    image = image_kind(size={"longest_edge": 256}, max_image_size={"longest_edge": 64}, do_image_splitting=split)
    options = {"processor_class": kind.__name__.replace("Config", "Processor"), "image_seq_len": 4}
    return _save(folder, config, text, image, IDEFICS3_TEMPLATE, options)


def llava(folder: Path, image: Any, *, vision: str, strategy: str, additional: int) -> Path:
    """LLaVA over a 56-pixel tower of 14-pixel patches, with a Llama tokenizer that adds bos."""
    text = llama_tokenizer(["<image>"])
    config = LlavaConfig(
        image_token_index=text.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy=strategy,
        vision_config={"model_type": vision, "image_size": 56, "patch_size": 14, **SMALL},
        text_config={"model_type": "llama", "vocab_size": len(text), **SMALL},
    )
    options = {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": additional,
    }
    return _save(folder, config, text, image, LLAVA_TEMPLATE, options)


def llava_clip(folder: Path) -> Path:
    image = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return llava(folder, image, vision="clip_vision_model", strategy="default", additional=1)


def llava_clip_full(folder: Path) -> Path:
    """Crop larger than the resized image, so its border is black; the class token is kept."""
    image = CLIPImageProcessorPil(size={"shortest_edge": 41}, crop_size={"height": 56, "width": 56})
    return llava(folder, image, vision="clip_vision_model", strategy="full", additional=1)


def llava_siglip(folder: Path) -> Path:
    image = SiglipImageProcessorPil(size={"height": 56, "width": 56})
    return llava(folder, image, vision="siglip_vision_model", strategy="full", additional=0)


def llava_padded(folder: Path) -> Path:
    size = {"height": 56, "width": 56}
    image = LlavaImageProcessorPil(do_pad=True, size={"shortest_edge": 56}, crop_size=size)
    return llava(folder, image, vision="clip_vision_model", strategy="default", additional=1)


def qwen(folder: Path, *, version: str = "2") -> Path:
    text = qwen_tokenizer()
    kinds = {"2": Qwen2VLConfig, "2.5": Qwen2_5_VLConfig}
    vision = {"depth": 1, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision |= {"hidden_size": 16, "embed_dim": 16} if version == "2" else {"hidden_size": 16, "window_size": 112}
    config = kinds[version](
        vision_config=vision,
        text_config={
            **SMALL,
            "vocab_size": len(text),
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        image_token_id=text.convert_tokens_to_ids("<|image_pad|>"),
    )
    image = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 100})
    name = "Qwen2VLProcessor" if version == "2" else "Qwen2_5_VLProcessor"
    return _save(folder, config, text, image, QWEN_TEMPLATE, {"processor_class": name})


def text_only(folder: Path, text: PreTrainedTokenizerFast, template: str | None = TEXT_TEMPLATE) -> Path:
    from transformers import LlamaConfig

    return _save(folder, LlamaConfig(vocab_size=len(text), **SMALL), text, template=template)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "idefics3": idefics3,
    "idefics3_whole": lambda folder: idefics3(folder, split=False),
    "smolvlm": lambda folder: idefics3(folder, kind=SmolVLMConfig),
    "llava_clip": llava_clip,
    "llava_clip_full": llava_clip_full,
    "llava_siglip": llava_siglip,
    "llava_padded": llava_padded,
    "qwen2_vl": qwen,
    "qwen2_5_vl": lambda folder: qwen(folder, version="2.5"),
    "llama": lambda folder: text_only(folder, llama_tokenizer([])),
    "gpt2": lambda folder: text_only(folder, tokenizer(["<eos>"], bos="<eos>", eos="<eos>", pad="<eos>"), None),
}
VISION = tuple(name for name in MAKERS if name not in ("llama", "gpt2"))


@cache
def folder(name: str) -> Path:
    """The checkpoint folder of that name, made once per process; treat it as read-only."""
    return MAKERS[name](session_folder() / f"processing-{name}")


@cache
def bundle(name: str) -> Path:
    """A bundle's root with what `write_processing` gives for that checkpoint; treat it as read-only."""
    from speceyes.compile.processing import write_processing

    out = session_folder() / f"bundle-{name}"
    write_processing(folder(name), out)
    return out


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A seeded RGB image with soft shapes and noise."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = np.stack([np.sin(x / 9 + seed), np.cos(y / 7), np.sin((x + y) / 13)], axis=-1)
    noise = generator.integers(-40, 40, (height, width, 1))
    return Image.fromarray(np.clip(127 + 90 * waves + noise, 0, 255).astype(np.uint8))


def pictures() -> dict[str, Image.Image]:
    """Images of every kind that a request may hold."""
    rgba = picture(90, 70, 3).convert("RGBA")
    rgba.putalpha(Image.linear_gradient("L").resize((90, 70)))
    deep = (np.arange(60 * 80, dtype=np.uint32).reshape(60, 80) * 13 % 65536).astype(np.uint16)
    palette = picture(75, 55, 4).quantize(16)
    transparent = picture(66, 44, 5).quantize(8)
    transparent.info["transparency"] = 2
    return {
        "portrait": picture(90, 160, 1),
        "landscape": picture(200, 81, 2),
        "tiny": picture(8, 8),
        "grey": picture(70, 100).convert("L"),
        "grey_alpha": picture(70, 50).convert("LA"),
        "rgba": rgba,
        "palette": palette,
        "transparent_palette": transparent,
        "sixteen_bit": Image.fromarray(deep),
        "bilevel": picture(64, 64, 6).convert("1"),
        "cmyk": picture(64, 48, 7).convert("CMYK"),
        "wide": picture(300, 4),
        "odd": picture(101, 203),
    }
