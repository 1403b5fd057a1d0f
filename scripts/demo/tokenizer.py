"""A byte-level BPE tokenizer learned from the questions and schemas of the tasks; values are spelled out."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from . import tasks

VOCABULARY = 768
BEGIN, PAD, END = "<|im_start|>", "<pad>", "<end_of_utterance>"
FAKE, IMAGE, GLOBAL = "<fake_token_around_image>", "<image>", "<global-img>"
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

_OPENINGS = ("What is", "Which", "Who is", "How many", "How was", "Read the", "Is there", "Where is", "Summarise")


def _texts() -> Iterator[str]:
    """Questions and lower-case answers, so that no merge spans the capitals and digits of a value."""
    rng = Random(0)
    for index in range(1500):
        for task in tasks.TASKS:
            for turn in tasks.sample(task, "training", rng.randrange(10**6) + index).turns:
                yield "".join(c for c in turn.question if c.islower() or c in " .?,") + "User:\nAssistant:"
                if turn.kind.startswith("fields"):
                    yield _schema(turn.answer)
                elif task != "lines" and (turn.answer.islower() or turn.kind == "clip"):
                    yield "".join(c for c in turn.answer if not c.isdigit())
    for _ in range(2000):
        yield rng.choice(
            ("What is", "Which", "Who is", "How many", "How was", "Read the", "Is there", "Where is", "Summarise")
        )


def _schema(reading: str) -> str:
    """The keys and brackets of a reading without its values."""
    return json.dumps(_blank(json.loads(reading)), separators=(",", ":"))


def _blank(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key if key.islower() else "": _blank(value) if isinstance(value, dict) else value if value.islower() else ""
        for key, value in fields.items()
    }


def train() -> PreTrainedTokenizerFast:
    """Learn the merges (deterministic) and wrap them with the chat template."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model.decoder = decoders.ByteLevel()
    special = [PAD, BEGIN, END, FAKE, IMAGE, GLOBAL, *TILES]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[FAKE, IMAGE, GLOBAL, *TILES],
        chat_template=TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
