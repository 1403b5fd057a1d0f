"""Tiny seeded checkpoints, one per family, complete with tokenizer and processor."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from speceyes.compile.export import ExportedModel

CORPUS = [
    "the quick brown fox jumps over the lazy dog and runs away from the receipt",
    "total 12.50 tax 1.25 paid in cash at the corner shop on the second of may",
    "what is written in the picture? a red square, a blue circle, a green line.",
    "User: describe the image. Assistant: it shows a small house by the sea.\n\n",
    "0123456789 items, prices, dates and names; the answer is in the table.\n",
]

IDEFICS3_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@cache
def session_folder() -> Path:
    """A temporary folder of this process, removed when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="speceyes-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def checkpoint(family: str) -> Path:
    """The tiny checkpoint of a family, made once per process; treat the folder as read-only."""
    return MAKERS[family](session_folder() / family)


@cache
def exported(family: str) -> ExportedModel:
    """Its canonical graphs, exported and saved once per process; do not change the models in place, clone them."""
    from speceyes.compile.export import export_parts

    return export_parts(checkpoint(family), session_folder() / f"{family}-graphs")


def tokenizer(
    special: list[str], *, bos: str | None, eos: str, pad: str, vocabulary: int = 400
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a few sentences; `special` tokens come after the learned ones."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=bos, eos_token=eos, pad_token=pad)


def spread(model: Any, seed: int) -> None:
    """Reseed every weight so that layers outweigh the embedding (else text repeats itself) and logits stand apart."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    scale = float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))
    table = (0.3 if tied else 1.0) / scale**0.5
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * noise)
        elif parameter is model.get_input_embeddings().weight:
            parameter.data.copy_(table * noise)
        elif "position_embedding" in name or "wpe" in name:
            parameter.data.copy_(0.3 * noise)
        else:
            gain = 4.0 if "lm_head" in name else 2.0
            parameter.data.copy_(gain * noise * parameter[0].numel() ** -0.5)


def idefics3(folder: Path, *, seed: int = 0) -> Path:
    """SmolVLM in small: 32-pixel tiles of 4 tokens, 2 + 2 layers, hidden 64, 4/2 heads of 16."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessor, Idefics3Processor

    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    special = [
        "<|im_start|>",
        "<end_of_utterance>",
        "<|endoftext|>",
        "<fake_token_around_image>",
        "<image>",
        "<global-img>",
    ]
    text = tokenizer(special + rows, bos="<|im_start|>", eos="<end_of_utterance>", pad="<|endoftext|>")
    ids = {token: text.convert_tokens_to_ids(token) for token in special}
    config = Idefics3Config(
        image_token_id=ids["<image>"],
        scale_factor=2,
        tie_word_embeddings=False,
        vision_config={
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": 32,
            "patch_size": 8,
        },
        text_config=_text_config(text, "llama", ids["<|im_start|>"], ids["<end_of_utterance>"], ids["<|endoftext|>"]),
    )
    model = Idefics3ForConditionalGeneration(config)
    _save(model, folder, seed)
    images = Idefics3ImageProcessor(
        size={"longest_edge": 96}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    Idefics3Processor(images, text, image_seq_len=4, chat_template=IDEFICS3_TEMPLATE).save_pretrained(folder)
    return folder


LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper }}: "
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def llava(folder: Path, *, siglip: bool = False, seed: int = 0) -> Path:
    """LLaVA in small: 32-pixel images of 16 tokens; CLIP and Llama, or SigLIP (two layers) and Qwen2."""
    from transformers import (
        CLIPImageProcessor,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        SiglipImageProcessor,
    )

    special = ["<bos>", "<eos>", "<pad>", "<image>"]
    text = tokenizer(special, bos="<bos>", eos="<eos>", pad="<pad>")
    bos, eos, pad, image = text.convert_tokens_to_ids(special)
    vision = {
        "model_type": "siglip_vision_model" if siglip else "clip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": 32,
        "patch_size": 8,
    }
    strategy = "full" if siglip else "default"
    config = LlavaConfig(
        vision_config=vision,
        text_config=_text_config(text, "qwen2" if siglip else "llama", bos, eos, pad),
        image_token_index=image,
        image_seq_length=16,
        vision_feature_layer=[1, -1] if siglip else -2,
        vision_feature_select_strategy=strategy,
    )
    _save(LlavaForConditionalGeneration(config), folder, seed)
    size = {"height": 32, "width": 32}
    images = (
        SiglipImageProcessor(size=size) if siglip else CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size)
    )
    LlavaProcessor(
        images,
        text,
        patch_size=8,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=0 if siglip else 1,
        chat_template=LLAVA_TEMPLATE,
    ).save_pretrained(folder)
    return folder


QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen2_vl(folder: Path, *, windowed: bool = False, seed: int = 0) -> Path:
    """Qwen2-VL (or 2.5, `windowed`) in small: patches of 14 pixels merged 2 x 2, windows of 2 x 2 merged groups."""
    from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLImageProcessor

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    special += ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    text = tokenizer(special, bos=None, eos="<|im_end|>", pad="<|endoftext|>")
    ids = dict(zip(special, text.convert_tokens_to_ids(special), strict=True))
    vision: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
    if windowed:
        vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 56}
        vision |= {"fullatt_block_indexes": [1]}
    else:
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    family = "qwen2_5_vl" if windowed else "qwen2_vl"
    settings = _text_config(text, f"{family}_text", ids["<|endoftext|>"], ids["<|im_end|>"], ids["<|endoftext|>"])
    rope = {"rope_type": "default", "rope_theta": settings.pop("rope_theta"), "mrope_section": [2, 3, 3]}
    config = AutoConfig.for_model(
        family,
        vision_config=vision,
        text_config=settings | {"rope_parameters": rope},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    _save(AutoModelForImageTextToText.from_config(config), folder, seed)
    pixels = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 64}
    Qwen2VLImageProcessor(patch_size=14, merge_size=2, size=pixels).save_pretrained(folder)
    text.chat_template = QWEN_TEMPLATE
    text.save_pretrained(folder)
    return folder


def text_decoder(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A text-only checkpoint of 2 layers, hidden 64, 4/2 heads of 16; `overrides` go into its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    special = ["<bos>", "<eos>", "<pad>"]
    text = tokenizer(special, bos="<bos>", eos="<eos>", pad="<pad>")
    settings = _text_config(text, family, *text.convert_tokens_to_ids(special)) | overrides
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    _save(AutoModelForCausalLM.from_config(config), folder, seed)
    text.save_pretrained(folder)
    return folder


def _text_config(text: PreTrainedTokenizerFast, model_type: str, bos: int, eos: int, pad: int) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": len(text),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def _gpt2(folder: Path) -> Path:
    return text_decoder("gpt2", folder, num_key_value_heads=4)


def _gemma3(folder: Path) -> Path:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return text_decoder(
        "gemma3_text", folder, num_hidden_layers=3, layer_types=layers, sliding_window=6, query_pre_attn_scalar=24
    )


def _qwen2_sliding(folder: Path) -> Path:
    layers = ["full_attention", "sliding_attention"]
    return text_decoder("qwen2", folder, use_sliding_window=True, sliding_window=5, layer_types=layers)


def _save(model: Any, folder: Path, seed: int) -> None:
    spread(model, seed)
    model.save_pretrained(folder)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "idefics3": idefics3,
    "llava": llava,
    "llava_siglip": partial(llava, siglip=True),
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": partial(qwen2_vl, windowed=True),
    "llama": partial(text_decoder, "llama", tie_word_embeddings=True),
    "llama_broad": partial(text_decoder, "llama", head_dim=320),
    "mistral": partial(text_decoder, "mistral", sliding_window=5),
    "qwen2": partial(text_decoder, "qwen2", tie_word_embeddings=True),
    "qwen2_sliding": _qwen2_sliding,
    "qwen3": partial(text_decoder, "qwen3"),
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
}
