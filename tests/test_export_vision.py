"""Vision-language families: both canonical graphs against transformers' eager fp32 model, on real pixel tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from .checkpoints import checkpoint, exported
from .stepper import Row, Stepper, open_graph, walk

FAMILIES = ["idefics3", "llava", "llava_siglip", "qwen2_vl", "qwen2_5_vl"]
SIZES = ((90, 60), (150, 210))


@dataclass(frozen=True)
class Encoded:
    """One image: the graph's calls, the eager tower's features, and what the eager model wants beside ids."""

    calls: list[dict[str, np.ndarray]]
    expected: np.ndarray
    model_inputs: dict[str, torch.Tensor]


def picture(width: int, height: int) -> Image.Image:
    """Smooth gradients with noise, as pixels of a photo are: neighbours are alike, corners differ."""
    rng = np.random.default_rng(width * height)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    pixels = 200 * np.stack([x, y, x * y], axis=-1) + rng.integers(0, 55, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def processed(family: str, size: tuple[int, int]) -> Any:
    processor = AutoImageProcessor.from_pretrained(checkpoint(family))
    return processor(picture(*size), return_tensors="pt")


def encode_idefics3(family: str, size: tuple[int, int]) -> Encoded:
    model, inputs = exported(family).checkpoint.model, processed(family, size)
    features = model.get_image_features(inputs.pixel_values, inputs.pixel_attention_mask).pooler_output
    calls = [{"pixel_values": tile[None].numpy()} for tile in inputs.pixel_values[0]]
    wanted = {key: inputs[key] for key in ("pixel_values", "pixel_attention_mask")}
    return Encoded(calls, torch.cat(features).detach().numpy(), wanted)


def encode_llava(family: str, size: tuple[int, int]) -> Encoded:
    model, inputs = exported(family).checkpoint.model, processed(family, size)
    features = model.get_image_features(inputs.pixel_values).pooler_output
    calls = [{"pixel_values": inputs.pixel_values.numpy()}]
    return Encoded(calls, torch.cat(features).detach().numpy(), {"pixel_values": inputs.pixel_values})


def encode_qwen2_vl(family: str, size: tuple[int, int]) -> Encoded:
    model, inputs = exported(family).checkpoint.model, processed(family, size)
    grid, tower = inputs.image_grid_thw, model.model.visual
    features = model.get_image_features(inputs.pixel_values, grid).pooler_output
    positions = get_vision_position_ids(grid, tower.spatial_merge_size)
    call = {"pixel_values": inputs.pixel_values.numpy(), "rotary_positions": positions.numpy()}
    if family == "qwen2_5_vl":
        index, ends = get_vision_window_index(grid, tower.spatial_merge_size, tower.window_size, tower.patch_size)
        call["window_index"] = index.numpy()
        call["window_id"] = np.repeat(np.arange(len(ends) - 1), np.diff(ends.numpy()))
    wanted = {"pixel_values": inputs.pixel_values, "image_grid_thw": grid}
    return Encoded([call], torch.cat(features).detach().numpy(), wanted)


ENCODERS: dict[str, Callable[[str, tuple[int, int]], Encoded]] = {
    "idefics3": encode_idefics3,
    "llava": encode_llava,
    "llava_siglip": encode_llava,
    "qwen2_vl": encode_qwen2_vl,
    "qwen2_5_vl": encode_qwen2_vl,
}


@cache
def encoded(family: str, size: tuple[int, int]) -> Encoded:
    with torch.no_grad():
        return ENCODERS[family](family, size)


def run_vision(family: str, calls: list[dict[str, np.ndarray]]) -> np.ndarray:
    session: Any = open_graph(exported(family).paths["vision"])
    return np.concatenate([session.run(None, call)[0] for call in calls])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_image_features(family: str, size: tuple[int, int]) -> None:
    image = encoded(family, size)
    actual = run_vision(family, image.calls)
    np.testing.assert_allclose(actual, image.expected, rtol=0, atol=1e-4 * float(np.abs(image.expected).max()))


def test_idefics3_splits_an_image_into_tiles_which_can_share_a_call() -> None:
    calls = encoded("idefics3", SIZES[0]).calls
    assert len(calls) == 7
    together = {"pixel_values": np.concatenate([call["pixel_values"] for call in calls])}
    np.testing.assert_allclose(run_vision("idefics3", [together]), run_vision("idefics3", calls), rtol=0, atol=1e-5)


def test_qwen2_5_vl_features_depend_on_the_windows() -> None:
    call = dict(encoded("qwen2_5_vl", SIZES[1]).calls[0])
    assert len(set(call["window_id"].tolist())) > 4
    windowed = run_vision("qwen2_5_vl", [call])
    call["window_id"] = np.zeros_like(call["window_id"])
    assert np.abs(run_vision("qwen2_5_vl", [call]) - windowed).max() > 0.01


def prompt(family: str, size: tuple[int, int] | None, first_feature: int) -> tuple[Row, np.ndarray]:
    """A text with an image in it (or none) and the eager model's logits; its features start at `first_feature`."""
    model = exported(family).checkpoint.model
    image_token = model.config.image_token_id
    rng = np.random.default_rng(first_feature)
    before, after = rng.integers(0, 200, 5).tolist(), rng.integers(0, 200, 7).tolist()
    features = 0 if size is None else len(encoded(family, size).expected)
    ids = np.array([*before, *[image_token] * features, *after])
    is_image = ids == image_token
    feature_index = np.where(is_image, first_feature + np.cumsum(is_image) - 1, -1)
    extra = {} if size is None else dict(encoded(family, size).model_inputs)
    positions = np.arange(len(ids))
    if family.startswith("qwen"):
        kinds = torch.tensor(is_image[None].astype(np.int32))
        grid = extra.get("image_grid_thw")
        positions, _ = model.model.get_rope_index(torch.tensor(ids[None]), kinds, grid)
        positions = positions[:, 0].numpy()
        extra["mm_token_type_ids"] = kinds
    with torch.no_grad():
        model.model.rope_deltas = None
        logits = model(input_ids=torch.tensor(ids[None]), **extra).logits[0].numpy()
    return Row(ids, positions, feature_index), logits


@pytest.mark.parametrize("family", FAMILIES)
def test_images_and_text_in_ragged_steps(family: str) -> None:
    images = [encoded(family, size) for size in SIZES]
    features = [run_vision(family, image.calls) for image in images]
    prompts = [
        prompt(family, SIZES[0], 0),
        prompt(family, None, 0),
        prompt(family, SIZES[1], len(features[0])),
    ]
    rows = [row for row, _ in prompts]
    session: Any = open_graph(exported(family).paths["decoder"])
    capacity = max(len(row.ids) for row in rows) + 8
    stepper = Stepper(session, rows, capacity, np.concatenate(features))
    for actual, (_, expected) in zip(walk(stepper, widths=[8, 2, 4, 1]), prompts, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
        np.testing.assert_array_equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone_takes_a_dummy_feature_row(family: str) -> None:
    row, expected = prompt(family, None, 3)
    session: Any = open_graph(exported(family).paths["decoder"])
    hidden = exported(family).checkpoint.hidden
    stepper = Stepper(session, [row], len(row.ids), np.zeros((1, hidden), np.float32))
    logits, _ = stepper.step([len(row.ids)], len(row.ids), np.array([len(row.ids) - 1]))
    np.testing.assert_allclose(logits[0], expected[-1], rtol=0, atol=1e-4 * float(np.abs(expected).max()))
