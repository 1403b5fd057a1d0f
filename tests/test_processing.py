"""Ids, pixels and positions beside the transformers processors of each family."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from speceyes.compile.processing import Source, load_source
from speceyes.runtime.processing import Processor, Prompt
from speceyes.runtime.processing.pixels import count_steps

from .processors import VISION, bundle, folder, picture, pictures

QUESTION = {"type": "text", "text": "What is written in the picture?"}
STEP = 1e-3  # of 1/255: room for nothing but float32 rounding


@pytest.fixture(scope="module", params=VISION)
def pair(request: pytest.FixtureRequest) -> tuple[Processor, Source]:
    return Processor.load(bundle(request.param)), load_source(folder(request.param))


def expected(source: Source, messages: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    output = source.processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="np"
    )
    return {name: np.asarray(value) for name, value in output.items()}


def assert_equal(ours: Processor, prompt: Prompt, reference: dict[str, np.ndarray]) -> None:
    assert prompt.token_ids.dtype == np.int64
    assert prompt.token_ids.tolist() == reference["input_ids"][0].tolist()
    rows = prompt.token_ids == ours.image_token_id
    assert rows.sum() == sum(tile.features for tile in prompt.tiles)
    assert prompt.feature_index[rows].tolist() == list(range(rows.sum()))
    assert (prompt.feature_index[~rows] == -1).all()
    if prompt.tiles:
        pixels = np.concatenate([tile.inputs["pixel_values"] for tile in prompt.tiles])
        wanted = reference["pixel_values"]
        wanted = wanted[0] if wanted.ndim == 5 else wanted
        assert pixels.dtype == np.float32 and pixels.shape == wanted.shape
        assert count_steps(pixels, wanted, ours.config.image.pixels) <= STEP


@pytest.mark.parametrize("kind", pictures())
def test_image_of_every_kind(pair: tuple[Processor, Source], kind: str) -> None:
    ours, source = pair
    messages = [{"role": "user", "content": [{"type": "image", "image": pictures()[kind]}, QUESTION]}]
    assert_equal(ours, ours.prepare(messages), expected(source, messages))


@pytest.mark.parametrize("name", ["idefics3", "llava_clip", "qwen2_5_vl"])
def test_large_image(name: str) -> None:
    ours, source = Processor.load(bundle(name)), load_source(folder(name))
    image = picture(400, 300).resize((4000, 3000), Image.Resampling.NEAREST)
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, QUESTION]}]
    assert_equal(ours, ours.prepare(messages), expected(source, messages))


def test_several_images_and_turns(pair: tuple[Processor, Source]) -> None:
    ours, source = pair
    first, second, third = picture(60, 90, 1), picture(120, 40, 2), picture(64, 64, 3)
    messages = [
        {"role": "user", "content": [{"type": "image", "image": first}, {"type": "image", "image": second}, QUESTION]},
        {"role": "assistant", "content": [{"type": "text", "text": "a red square,\n\na blue circle"}]},
        {"role": "user", "content": [{"type": "text", "text": "and here? "}, {"type": "image", "image": third}]},
    ]
    prompt = ours.prepare(messages)
    assert prompt.images == 3
    assert_equal(ours, prompt, expected(source, messages))
    without = [
        {**m, "content": [p if p["type"] == "text" else {"type": "image"} for p in m["content"]]} for m in messages
    ]
    same = ours.prepare(without, images=[first, second, third])
    assert same.token_ids.tolist() == prompt.token_ids.tolist()


def test_text_alone(pair: tuple[Processor, Source]) -> None:
    ours, source = pair
    messages = [{"role": "user", "content": [QUESTION]}]
    prompt = ours.prepare(messages)
    assert (prompt.images, prompt.tiles) == (0, ())
    assert_equal(ours, prompt, expected(source, messages))


def test_prompt_is_taken_verbatim(pair: tuple[Processor, Source]) -> None:
    ours, source = pair
    token, image = ours.layout.token, picture(50, 70)
    text = f"the receipt: {token}\nand {token}total"
    prompt = ours.prepare(prompt=text, images=[image, image])
    output = source.processor(text=[text], images=[[image, image]], return_tensors="np")
    assert_equal(ours, prompt, {name: np.asarray(value) for name, value in output.items()})


def test_string_is_one_user_turn_with_images_first(pair: tuple[Processor, Source]) -> None:
    ours, source = pair
    image = picture(50, 70)
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, QUESTION]}]
    prompt = ours.prepare(QUESTION["text"], images=[image])
    assert_equal(ours, prompt, expected(source, messages))


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_files_are_opened_as_load_image_does(pair: tuple[Processor, Source], orientation: int, tmp_path: Any) -> None:
    ours, source = pair
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "photo.jpg"
    picture(100, 60).save(path, exif=exif, quality=90)
    messages = [{"role": "user", "content": [{"type": "image", "image": str(path)}, QUESTION]}]
    reference = expected(source, messages)
    assert_equal(ours, ours.prepare(messages), reference)
    assert_equal(ours, ours.prepare(QUESTION["text"], images=[path]), reference)
    assert_equal(ours, ours.prepare(QUESTION["text"], images=[path.read_bytes()]), reference)


@pytest.mark.parametrize("kind", ["rgba", "palette", "transparent_palette", "sixteen_bit", "grey_alpha"])
def test_png_files_of_every_mode(pair: tuple[Processor, Source], kind: str, tmp_path: Any) -> None:
    ours, source = pair
    path = tmp_path / "image.png"
    pictures()[kind].save(path)
    messages = [{"role": "user", "content": [{"type": "image", "image": str(path)}, QUESTION]}]
    assert_equal(ours, ours.prepare(messages), expected(source, messages))


@pytest.mark.parametrize("channels", [3, 4])
def test_arrays(pair: tuple[Processor, Source], channels: int) -> None:
    ours, source = pair
    array = np.random.default_rng(0).integers(0, 256, (47, 83, channels), dtype=np.uint8)
    messages = [{"role": "user", "content": [{"type": "image", "image": array}, QUESTION]}]
    assert_equal(ours, ours.prepare(messages), expected(source, messages))


def test_grey_array_equals_grey_image() -> None:
    ours = Processor.load(bundle("llava_clip"))
    grey = picture(60, 40).convert("L")
    array = ours.prepare("what?", images=[np.asarray(grey)]).tiles[0].inputs["pixel_values"]
    image = ours.prepare("what?", images=[grey]).tiles[0].inputs["pixel_values"]
    assert (array == image).all()


def test_preparing_leaves_the_given_image_alone() -> None:
    ours = Processor.load(bundle("idefics3"))
    image = picture(64, 64)
    before = image.tobytes()
    first = ours.prepare("what?", images=[image]).tiles[0].inputs["pixel_values"]
    first[...] = 0
    again = ours.prepare("what?", images=[image]).tiles[0].inputs["pixel_values"]
    assert image.tobytes() == before and again.any()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_mrope_positions(name: str) -> None:
    from transformers import Qwen2_5_VLModel, Qwen2VLModel

    ours, source = Processor.load(bundle(name)), load_source(folder(name))
    kind = Qwen2VLModel if name == "qwen2_vl" else Qwen2_5_VLModel
    with torch.device("meta"):
        model = kind(source.config)
    images = [picture(60, 90, 1), picture(150, 40, 2), picture(64, 64, 3)]
    contents = [
        [{"type": "image", "image": images[0]}, QUESTION, {"type": "image", "image": images[1]}],
        [QUESTION, {"type": "image", "image": images[2]}, QUESTION],
        [QUESTION],
    ]
    for count in range(1, len(contents) + 1):
        messages = [{"role": "user", "content": content} for content in contents[:count]]
        prompt, reference = ours.prepare(messages), expected(source, messages)
        positions, delta = model.get_rope_index(
            torch.from_numpy(reference["input_ids"]),
            torch.from_numpy(reference["mm_token_type_ids"]),
            image_grid_thw=torch.from_numpy(reference["image_grid_thw"]),
        )
        assert prompt.position_ids.tolist() == positions[:, 0].tolist()
        assert prompt.next_position == len(prompt.token_ids) + int(delta)


def test_mrope_positions_without_images() -> None:
    prompt = Processor.load(bundle("qwen2_vl")).prepare("what is it?")
    assert prompt.position_ids.tolist() == [list(range(len(prompt.token_ids)))] * 3
    assert prompt.next_position == len(prompt.token_ids)


def test_positions_count_tokens_elsewhere() -> None:
    prompt = Processor.load(bundle("idefics3")).prepare("what is it?", images=[picture(80, 50)])
    assert prompt.position_ids.tolist() == list(range(len(prompt.token_ids)))
    assert prompt.next_position == len(prompt.token_ids)


@pytest.mark.parametrize("size", [(56, 56), (150, 90), (280, 112), (113, 300)])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_vision_positions_and_windows(name: str, size: tuple[int, int]) -> None:
    from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

    ours, source = Processor.load(bundle(name)), load_source(folder(name))
    image = picture(*size)
    inputs = ours.prepare("what?", images=[image]).tiles[0].inputs
    grid = torch.from_numpy(np.asarray(source.processor.image_processor(image, return_tensors="np")["image_grid_thw"]))
    assert inputs["rotary_positions"].tolist() == get_vision_position_ids(grid, 2).tolist()
    if name == "qwen2_vl":
        assert set(inputs) == {"pixel_values", "rotary_positions"}
        return
    index, bounds = get_vision_window_index(grid, spatial_merge_size=2, window_size=112, patch_size=14)
    assert inputs["window_index"].tolist() == index.tolist()
    lengths = np.diff(bounds.numpy())
    assert inputs["window_id"].tolist() == np.repeat(np.arange(len(lengths)), lengths).tolist()
    assert {name: array.dtype for name, array in inputs.items()} == {
        "pixel_values": np.float32,
        "rotary_positions": np.int64,
        "window_index": np.int64,
        "window_id": np.int64,
    }


def test_tiles_follow_the_image_size() -> None:
    ours = Processor.load(bundle("idefics3"))
    prompt = ours.prepare("what?", images=[picture(200, 100)])
    assert [tile.features for tile in prompt.tiles] == [4] * 9
    assert {tile.inputs["pixel_values"].shape for tile in prompt.tiles} == {(1, 3, 64, 64)}
    whole = Processor.load(bundle("idefics3_whole")).prepare("what?", images=[picture(200, 100)])
    assert len(whole.tiles) == 1


@pytest.mark.parametrize(("size", "grid"), [((64, 64), (4, 4)), ((250, 60), (1, 4)), ((60, 130), (4, 2))])
def test_tile_tokens_as_smolvlm_writes_them(size: tuple[int, int], grid: tuple[int, int]) -> None:
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    ours = Processor.load(bundle("smolvlm"))
    text = ours.layout.prepare(picture(*size), "image").text
    wanted = get_image_prompt_string(*grid, 1, "<fake_token_around_image>", "<image>", "<global-img>")
    assert text == wanted


def test_feature_count_follows_the_strategy() -> None:
    counts = {
        name: Processor.load(bundle(name)).prepare("what?", images=[picture(80, 50)]).tiles[0].features
        for name in ("llava_clip", "llava_clip_full", "llava_siglip")
    }
    assert counts == {"llava_clip": 16, "llava_clip_full": 17, "llava_siglip": 16}


def test_gif_takes_its_first_frame() -> None:
    ours = Processor.load(bundle("llava_siglip"))
    frames = [picture(40, 40, seed).quantize(64) for seed in (1, 2)]
    stream = io.BytesIO()
    frames[0].save(stream, format="GIF", save_all=True, append_images=frames[1:])
    first = Image.open(io.BytesIO(stream.getvalue())).convert("RGB")
    pixels = ours.prepare("what?", images=[stream.getvalue()]).tiles[0].inputs["pixel_values"]
    wanted = ours.prepare("what?", images=[first]).tiles[0].inputs["pixel_values"]
    assert (pixels == wanted).all()
