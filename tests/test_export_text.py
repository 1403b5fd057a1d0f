"""Text decoders: the canonical graph against transformers' eager fp32 model."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from .checkpoints import exported
from .stepper import Row, Stepper, open_graph, walk

FAMILIES = ["llama", "mistral", "qwen2", "qwen2_sliding", "qwen3", "gemma3_text", "gpt2"]
LENGTHS = (21, 9, 14)


@cache
def rows_and_reference(family: str) -> tuple[list[list[int]], list[np.ndarray]]:
    """Three random texts and the eager model's logits [length, vocabulary] for each."""
    model = exported(family).checkpoint.model
    rng = np.random.default_rng(7)
    texts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in LENGTHS]
    with torch.no_grad():
        return texts, [model(torch.tensor([text])).logits[0].numpy() for text in texts]


def assert_same_logits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Within 1e-4 of the largest logit, and the same winner in every row."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
    np.testing.assert_array_equal(actual.argmax(-1), expected.argmax(-1))


def open_decoder(family: str, texts: list[list[int]], capacity: int) -> Stepper:
    session: Any = open_graph(exported(family).paths["decoder"])
    return Stepper(session, [Row.of_text(text) for text in texts], capacity)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_prompt(family: str) -> None:
    texts, expected = rows_and_reference(family)
    stepper = open_decoder(family, texts[:1], capacity=LENGTHS[0])
    logits, hidden = stepper.step([LENGTHS[0]], LENGTHS[0], np.arange(LENGTHS[0]))
    assert_same_logits(logits, expected[0])
    head = exported(family).checkpoint.model.get_output_embeddings().weight.detach().numpy()
    np.testing.assert_allclose(hidden @ head.T, logits, atol=1e-4 * float(np.abs(logits).max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_steps(family: str) -> None:
    texts, expected = rows_and_reference(family)
    stepper = open_decoder(family, texts, capacity=max(LENGTHS) + 4)
    for actual, reference in zip(walk(stepper, widths=[4, 1, 2, 4, 2, 1]), expected, strict=True):
        assert_same_logits(actual, reference)
