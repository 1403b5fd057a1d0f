"""Threads of the engines: one where a step is too short to be shared."""

import dataclasses

import pytest
from speceyes.runtime.threads import SMALL_STEP, choose_threads

from .bundles import model


@pytest.mark.parametrize(
    ("part", "weights", "wanted", "threads"),
    [
        ("decoder", SMALL_STEP - 1, None, 1),
        ("decoder", SMALL_STEP, None, None),
        ("decoder", SMALL_STEP - 1, 2, 2),
        ("vision", 1000, None, None),
        ("vision", 1000, 3, 3),
        ("predictor", 10**9, None, 1),
        ("predictor_image", 10**9, 4, 1),
    ],
)
def test_small_steps_get_one_thread(part, weights, wanted, threads):
    entry = model("llama").manifest.targets["onnxruntime-cpu"].engines["decoder"]
    assert choose_threads(part, dataclasses.replace(entry, weight_bytes=weights), wanted) == threads
