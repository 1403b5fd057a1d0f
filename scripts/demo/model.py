"""The architecture: an Idefics3 of about six million parameters, and its processor."""

from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

from .canvas import PATCH, SIZE
from .tokenizer import BEGIN, END, IMAGE, PAD

SCALE = 2
IMAGE_TOKENS = (SIZE // PATCH // SCALE) ** 2


def config(tokenizer: PreTrainedTokenizerFast) -> Idefics3Config:
    """The shapes of the demonstration model."""
    begin, end, pad, image = tokenizer.convert_tokens_to_ids([BEGIN, END, PAD, IMAGE])
    vision = {
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": SIZE,
        "patch_size": PATCH,
    }
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": begin,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    return Idefics3Config(
        vision_config=vision,
        text_config=text,
        scale_factor=SCALE,
        image_token_id=image,
        tie_word_embeddings=True,
        pad_token_id=pad,
    )


def create(tokenizer: PreTrainedTokenizerFast) -> Idefics3ForConditionalGeneration:
    """The model with fresh weights (seed them with `torch.manual_seed`)."""
    model = Idefics3ForConditionalGeneration(config(tokenizer))
    begin, end, pad = tokenizer.convert_tokens_to_ids([BEGIN, END, PAD])
    model.generation_config.bos_token_id = begin
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = pad
    model.generation_config.max_new_tokens = 192
    return model


def processor(tokenizer: PreTrainedTokenizerFast) -> Idefics3Processor:
    """The processor: one tile an image; with `do_image_splitting` and a larger `size`, several."""
    edge = {"longest_edge": SIZE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    return Idefics3Processor(images, tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=tokenizer.chat_template)
