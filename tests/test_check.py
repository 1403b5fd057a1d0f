"""The accuracy check: its figures by hand, and that it refuses an engine that is not the model's."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import speceyes
from speceyes.compile.check import (
    Reference,
    check_decoder,
    check_vision,
    compare_logits,
    golden_prompt,
    lowest_cosine,
    make_reference,
)
from speceyes.compile.checkpoint import open_checkpoint
from speceyes.compile.recipe import DecoderBounds, VisionBounds
from speceyes.engines.bundle import Bundle
from speceyes.engines.engine import Engine
from speceyes.engines.errors import AccuracyError
from speceyes.engines.target import find_target
from speceyes.runtime.processing.processor import Processor

from .bundles import VISION
from .checkpoints import checkpoint

STRICT = DecoderBounds(cosine=0.9999, agreement=1.0, divergence=1e-4)


def test_equal_logits_have_perfect_figures() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32)
    figures = compare_logits(logits, logits)
    assert figures["cosine"] == pytest.approx(1)
    assert (figures["agreement"], figures["divergence"]) == (1.0, 0.0)


def test_figures_by_hand() -> None:
    wanted = np.array([[0, 0, 0, 5], [math.log(3), 0, -100, -100]], np.float32)
    found = np.array([[0, 0, 0, 5], [0, math.log(3), -100, -100]], np.float32)
    figures = compare_logits(wanted, found)
    assert figures["agreement"] == 0.5
    assert figures["divergence"] == pytest.approx(0.75 * math.log(3) - 0.25 * math.log(3), rel=1e-6)
    cosine = 20_000 / (20_000 + math.log(3) ** 2)
    assert figures["cosine"] == pytest.approx(cosine, abs=1e-9)


def test_the_worst_row_counts() -> None:
    wanted = np.eye(100, dtype=np.float32)
    found = wanted.copy()
    found[7] = -wanted[7]
    assert lowest_cosine(wanted, found) == pytest.approx(-1)


@pytest.fixture(scope="module")
def reference(bundle: Path) -> Reference:
    prompt = golden_prompt(Processor.load(bundle), [bundle / "accuracy" / "golden.png"])
    return make_reference(open_checkpoint(checkpoint("idefics3")), prompt, 6)


def engine(bundle: Bundle, part: str) -> Engine:
    entry = bundle.manifest.targets["onnxruntime-cpu"].engines[part]
    return find_target("onnxruntime-cpu").load(bundle.path / entry.path, 1, entry)


def test_the_decoder_passes_and_another_answer_does_not(bundle: Path, reference: Reference) -> None:
    opened = Bundle.open(bundle)
    decoder, model = engine(opened, "decoder"), opened.manifest.model
    figures = check_decoder(decoder, model, 2, reference, STRICT)
    assert figures["agreement"] == figures["agreement_bound"] == 1.0
    assert figures["divergence"] < figures["divergence_bound"] == 1e-4
    assert reference.features is not None
    swapped = replace(reference, features=np.roll(reference.features, 1, axis=0))
    with pytest.raises(AccuracyError, match="decoder: cosine"):
        check_decoder(decoder, model, 2, swapped, STRICT)
    with pytest.raises(AccuracyError, match=r"agreement 0\.\d+ \(at least 1\)"):
        noise = replace(reference, logits=np.roll(reference.logits, 1, axis=0))
        check_decoder(decoder, model, 2, noise, replace(STRICT, cosine=-1))


def test_the_vision_part_passes_and_other_pixels_do_not(bundle: Path, reference: Reference) -> None:
    opened = Bundle.open(bundle)
    vision, model = engine(opened, "vision"), opened.manifest.model
    assert check_vision(vision, model, reference, VisionBounds(0.9999))["cosine"] > 0.9999
    tiles = list(reference.prompt.tiles)
    tiles[0] = replace(tiles[0], inputs={"pixel_values": tiles[0].inputs["pixel_values"][..., ::-1].copy()})
    other = replace(reference, prompt=replace(reference.prompt, tiles=tuple(tiles)))
    with pytest.raises(AccuracyError, match="vision: cosine"):
        check_vision(vision, model, other, VisionBounds(0.9999))


def test_the_reference_is_the_models_own_answer(bundle: Path, reference: Reference) -> None:
    assert (reference.logits.argmax(axis=-1) == reference.tokens).all()
    assert reference.features is not None
    assert len(reference.features) == (reference.prompt.feature_index >= 0).sum()


@pytest.mark.parametrize("family", [*VISION, "gpt2"])
def test_every_family_is_built_with_the_check_on(family: str, tmp_path: Path) -> None:
    """Its reference runs in torch, where symbolic nodes of a canonical graph compute nothing."""
    opened = speceyes.compile(
        checkpoint(family),
        tmp_path / "checked.speceyes",
        precision={"decoder": "fp32"},
        accuracy={"enabled": False},
        measure={"enabled": False},
    )
    engines = opened.bundle.manifest.targets["onnxruntime-cpu"].engines
    assert engines["decoder"].accuracy["cosine"] > 0.9999
    assert family not in VISION or engines["vision"].accuracy["cosine"] > 0.9999
