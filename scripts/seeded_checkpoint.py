"""Write a checkpoint of SmolVLM-256M's shape with seeded weights: for measuring speed and memory, not meaning.

    python scripts/seeded_checkpoint.py build/smolvlm-256m

The embedding (shared with the head) is scaled up so that logits are well separated and greedy text does not fall into a
loop at once, which a plain initialisation would do.
"""

import argparse
import pydoc_data.topics
import sysconfig
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

VOCABULARY = 49_280
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<image>", "<end_of_utterance>"]
LAYOUT = ["<global-img>", *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the standard library's own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [*pydoc_data.topics.topics.values(), *(path.read_text(errors="ignore") for path in sources)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in LAYOUT])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<end_of_utterance>", pad_token="<|im_end|>"
    )


def make_config(image_token: int, eos: int) -> Idefics3Config:
    """The published shape: SigLIP base at 512 pixels, 64 features a tile, 30 layers of 576."""
    return Idefics3Config(
        vision_config={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 8192,
            "rope_theta": 100_000.0,
            "tie_word_embeddings": True,
            "eos_token_id": eos,
        },
        scale_factor=4,
        image_token_id=image_token,
        tie_word_embeddings=True,
        pad_token_id=2,
        eos_token_id=eos,
    )


def write_checkpoint(folder: Path, *, seed: int, splitting: bool) -> None:
    tokenizer = make_tokenizer()
    image_processor = Idefics3ImageProcessorPil(
        do_image_splitting=splitting,
        size={"longest_edge": 2048 if splitting else 512},
        max_image_size={"longest_edge": 512},
    )
    processor = Idefics3Processor(image_processor, tokenizer, image_seq_len=64, chat_template=CHAT_TEMPLATE)
    ids = tokenizer.convert_tokens_to_ids
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(make_config(ids("<image>"), ids("<end_of_utterance>")))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10)
        for parameter in model.model.text_model.layers.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    model.generation_config.eos_token_id = ids("<end_of_utterance>")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--splitting", action="store_true", help="cut images into tiles, 17 for a large one")
    arguments = parser.parse_args()
    write_checkpoint(arguments.folder, seed=arguments.seed, splitting=arguments.splitting)
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    main()
