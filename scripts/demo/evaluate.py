"""Scores on held-out seeds: fields (F1), questions and clip summaries (exact match), and the same on blank pictures.

`python -m scripts.demo.evaluate --count 250` scores the checkpoint in transformers, with `--bundle build/demo.speceyes`
a bundle. Anything that maps pictures and a question to a text can be scored with `score`.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import speceyes
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from . import tasks
from .canvas import SIZE
from .sample import Sample

Answer = Callable[[list[Image.Image], str], str]

SUITES = {"fields": ("document",), "questions": ("document", "chart", "scene"), "clips": ("clip",), "lines": ("lines",)}
BARS = {"fields": 0.90, "questions": 0.90, "clips": 0.85}


@dataclass(frozen=True)
class Item:
    """A question about pictures, with the answer expected."""

    images: list[Image.Image]
    question: str
    answer: str
    kind: str


def items(suite: str, count: int, split: str = "test") -> list[Item]:
    """`count` items of one of `SUITES`, each about pictures of its own."""
    sources = SUITES[suite]
    return [_item(suite, tasks.sample(sources[i % len(sources)], split, i), i) for i in range(count)]


def _item(suite: str, sample: Sample, index: int) -> Item:
    if suite == "fields":
        turn = sample.turns[0]
    elif suite == "clips":
        turn = next(turn for turn in sample.turns if turn.kind == "clip")
    else:
        turn = Random(index).choice([turn for turn in sample.turns if not turn.kind.startswith("fields")])
    return Item([canvas.image for canvas in sample.canvases], turn.question, turn.answer, turn.kind)


def leaves(reading: str) -> set[tuple[str, ...]]:
    """Paths of keys with their value out of a JSON object; none when it cannot be parsed."""
    try:
        tree = json.loads(reading)
    except json.JSONDecodeError:
        return set()
    return _leaves(tree, ())


def _leaves(tree: object, path: tuple[str, ...]) -> set[tuple[str, ...]]:
    if not isinstance(tree, dict):
        return {(*path, str(tree))}
    return {leaf for key, value in tree.items() for leaf in _leaves(value, (*path, key))}


def fields_f1(pairs: list[tuple[str, str]]) -> float:
    """Micro-averaged F1 of the leaves, over pairs of (expected, answered) JSON texts."""
    shared = total = 0
    for expected, answered in pairs:
        wanted, found = leaves(expected), leaves(answered)
        shared += len(wanted & found)
        total += len(wanted) + len(found)
    return 2 * shared / total if total else 0.0


def exact_match(pairs: list[tuple[str, str]]) -> float:
    """Share of pairs (expected, answered) that are equal but for outer white space."""
    return sum(expected.strip() == answered.strip() for expected, answered in pairs) / len(pairs)


def score(answer: Answer, count: int = 250, suites: tuple[str, ...] = tuple(SUITES)) -> dict[str, Any]:
    """Scores of `answer` by suite and kind, on test pictures and on blank ones."""
    report: dict[str, Any] = {}
    for suite in suites:
        measure = fields_f1 if suite == "fields" else exact_match
        asked = items(suite, count)
        pairs = [(item.answer, answer(item.images, item.question)) for item in asked]
        blank = Image.new("RGB", (SIZE, SIZE), (250, 250, 250))
        unseen = [(item.answer, answer([blank] * len(item.images), item.question)) for item in asked]
        kinds: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for item, pair in zip(asked, pairs, strict=True):
            kinds[item.kind].append(pair)
        report[suite] = {
            "measure": "F1" if suite == "fields" else "exact match",
            "items": count,
            "score": round(measure(pairs), 4),
            "blank": round(measure(unseen), 4),
            "kinds": {kind: round(measure(found), 4) for kind, found in sorted(kinds.items())},
        }
        if suite in BARS:
            report[suite]["bar"] = BARS[suite]
        if suite != "fields":
            report[suite]["commonest"] = round(_commonest(suite, asked), 4)
        else:
            report[suite]["exact"] = round(exact_match(pairs), 4)
    return report


def _commonest(suite: str, asked: list[Item]) -> float:
    """Exact match of always giving the commonest training answer to a question: what chance reaches."""
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for item in items(suite, 1000, "training"):
        seen[item.question][item.answer] += 1
    guesses = [(item.answer, seen[item.question].most_common(1)[0][0] if seen[item.question] else "") for item in asked]
    return exact_match(guesses)


def from_checkpoint(folder: Path) -> Answer:
    """Greedy answers of transformers' own model and processor, in single precision."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def answer(images: list[Image.Image], question: str) -> str:
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=prompt, images=images, add_special_tokens=False, return_tensors="pt")
        output = model.generate(**inputs, do_sample=False)
        return str(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    return answer


def from_bundle(folder: Path) -> Answer:
    """Greedy answers of a compiled bundle."""
    model = speceyes.load(folder)
    return lambda images, question: model.generate(question, images=images).text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("scripts/demo/checkpoint"), help="checkpoint folder")
    parser.add_argument("--bundle", type=Path, help="score this bundle instead of the checkpoint")
    parser.add_argument("--count", type=int, default=250, help="items a suite")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    answer = from_bundle(options.bundle) if options.bundle else from_checkpoint(options.model)
    print(json.dumps(score(answer, options.count), indent=2))


if __name__ == "__main__":
    main()
