"""The demonstration model, compiled: it answers held-out questions, and only because it sees the picture."""

import json
from functools import cache
from pathlib import Path

import pytest
import speceyes
from PIL import Image
from speceyes.runtime.session import Model, Request
from speceyes.scripts.demo.evaluate import Answer, score

from .checkpoints import session_folder

ROOT = Path(__file__).parent.parent

CHECKPOINT = ROOT / "scripts" / "demo" / "checkpoint"
SAMPLES = ROOT / "scripts" / "demo" / "samples"


@cache
def demo(decoder: str) -> Model:
    out = session_folder() / f"demo-{decoder}.speceyes"
    speceyes.compile(CHECKPOINT, out, precision={"decoder": decoder}, measure={"enabled": False})
    return speceyes.load(out)


def answers(decoder: str) -> Answer:
    def answer(images: list[Image.Image], question: str) -> str:
        return demo(decoder).generate(question, images=images).text

    return answer


def samples() -> list[tuple[str, list[Image.Image], str]]:
    listed = json.loads((SAMPLES / "samples.json").read_text())
    return [(s["question"], [Image.open(SAMPLES / name) for name in s["images"]], s["answer"]) for s in listed]


@pytest.mark.parametrize(("suite", "least"), [("questions", 0.8), ("clips", 0.8), ("fields", 0.8)])
def test_scores_fall_to_chance_without_the_picture(suite: str, least: float) -> None:
    report = score(answers("int8"), 20, (suite,))[suite]
    chance = report.get("commonest", 0.1)
    assert report["score"] >= least
    assert report["blank"] <= chance + 0.15
    assert report["blank"] < report["score"] / 1.5


def test_int8_answers_as_fp32_does() -> None:
    asked = samples()
    same = sum(answers("int8")(images, question) == answers("fp32")(images, question) for question, images, _ in asked)
    assert same >= 0.8 * len(asked)


def test_a_batch_answers_as_single_requests() -> None:
    chosen = samples()[:4]
    batch = demo("int8").generate_batch([Request(question, images=images) for question, images, _ in chosen])
    assert [result.text for result in batch] == [answers("int8")(images, question) for question, images, _ in chosen]
