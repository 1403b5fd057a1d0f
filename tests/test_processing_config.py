"""What a bundle's processing holds is read strictly; what is written was compared with transformers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from speceyes.compile import image_layout
from speceyes.compile.processing import write_processing
from speceyes.engines.errors import AccuracyError, BundleError, CheckpointError, IntegrityError, ManifestError
from speceyes.runtime.processing import Processor, verify_golden
from speceyes.runtime.processing.config import parse_config

from .processors import MAKERS, bundle, folder


def read(name: str) -> dict[str, Any]:
    return json.loads((bundle(name) / "processing.json").read_text())


def changed(name: str, path: str, value: Any) -> bytes:
    """processing.json with one value replaced; `...` removes the key."""
    content = read(name)
    *parents, key = path.split(".")
    place = content
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[key]
    else:
        place[key] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize("name", MAKERS)
def test_golden_is_reproduced(name: str) -> None:
    assert verify_golden(bundle(name)) <= 1e-3


@pytest.mark.parametrize("name", MAKERS)
def test_written_file_is_read_back(name: str) -> None:
    config = Processor.load(bundle(name)).config
    assert config == parse_config((bundle(name) / "processing.json").read_bytes())
    assert config.max_image_pixels == 100_000_000
    assert (config.image is None) == (name in ("llama", "gpt2"))
    names = {path.name for path in (bundle(name) / "tokenizer").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert ("chat_template.jinja" in names) == (name != "gpt2")
    assert not [path for path in bundle(name).iterdir() if path.name.startswith(".")]


def test_layouts_as_written() -> None:
    assert read("idefics3")["image"] == {
        "layout": "idefics3",
        "token": "<image>",
        "boundary_token": "<fake_token_around_image>",
        "global_token": "<global-img>",
        "tile_features": 4,
        "longest_edge": 256,
        "tile_edge": 64,
        "split": True,
        "pixels": {"resample": "lanczos", "rescale_factor": 1 / 255, "mean": [0.5] * 3, "std": [0.5] * 3},
    }
    llava = read("llava_clip")["image"]
    assert (llava["shortest_edge"], llava["resize"], llava["crop"]) == (56, None, [56, 56])
    assert (llava["patch_size"], llava["additional_features"], llava["pad_color"]) == (14, 0, None)
    assert read("llava_padded")["image"]["pad_color"] == [122, 116, 104]
    qwen = read("qwen2_5_vl")["image"]
    assert (qwen["min_pixels"], qwen["max_pixels"], qwen["window_size"]) == (3136, 78400, 112)
    assert read("qwen2_vl")["image"]["window_size"] is None


def test_content_kind_is_found_from_the_template() -> None:
    kinds = {name: read(name)["text"]["content"] for name in ("idefics3", "llava_clip", "qwen2_vl", "llama")}
    assert kinds == {"idefics3": "parts", "llava_clip": "parts", "qwen2_vl": "any", "llama": "string"}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("version", 2, r"processing\.json\.version: found 2; allowed: 1"),
        ("hash", ..., r"processing\.json\.hash: the key is missing"),
        ("colour", 1, r"processing\.json\.colour: unknown key"),
        ("max_image_pixels", 0, r"max_image_pixels: found 0; allowed: 1 to"),
        ("max_image_pixels", True, r"max_image_pixels: found True; int is expected"),
        ("text.content", "both", "content: found 'both'; allowed: string, parts, any"),
        ("text.special_tokens.eos", "</s>", r"special_tokens\.eos: unknown key; known: bos_token"),
        ("text.special_tokens.eos_token", 3, r"special_tokens\.eos_token: found 3; str is expected"),
        ("image.layout", "fuyu", r"processing\.json\.image\.layout: found 'fuyu'; allowed: idefics3, llava, qwen2_vl"),
        ("image.layout", ["idefics3"], "layout: found"),
        ("image.tile_edges", 64, r"processing\.json\.image\.tile_edges: unknown key; did you mean 'tile_edge'"),
        ("image.tile_edge", "64", r"image\.tile_edge: found '64'; int is expected"),
        ("image.tile_edge", 10**6, "tile_edge: found 1000000; allowed: 1 to 16384"),
        ("image.token", "", "token: found ''"),
        ("image.pixels.resample", "cubic", "resample: found 'cubic'; allowed: nearest, lanczos"),
        ("image.pixels.mean", [0.5, 0.5], "mean: found 2 values; 3 are expected"),
        ("image.pixels.mean", [0.5, 0.5, float("inf")], "mean: found .*; finite numbers are expected"),
        ("image.pixels.std", [0.5, 0.5, 0], "std: found 0.*; allowed: 1e-9 to 1e9"),
        ("image", 5, r"image: found 5"),
    ],
)
def test_malformed_config(path: str, value: Any, said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        parse_config(changed("idefics3", path, value))


@pytest.mark.parametrize(
    ("name", "path", "value", "said"),
    [
        ("qwen2_5_vl", "image.window_size", 7, "window_size: found 7; at least 28"),
        ("qwen2_5_vl", "image.max_pixels", 100, "max_pixels: found 100; at least 3136"),
        ("llava_clip", "image.crop", [56], "crop: found 1 values; 2 are expected"),
        ("llava_clip", "image.pad_color", [0, 0, 256], r"pad_color: found \(0, 0, 256\); allowed: 0 to 255"),
        ("llava_clip", "image.additional_features", -2, "additional_features: found -2; allowed: -1 to 64"),
    ],
)
def test_malformed_layout(name: str, path: str, value: Any, said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        parse_config(changed(name, path, value))


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"[" * 100_000, b"\xff\xfe"])
def test_config_that_is_no_object(data: bytes) -> None:
    with pytest.raises(ManifestError, match=r"processing\.json"):
        parse_config(data)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return shutil.copytree(bundle("idefics3"), tmp_path / "bundle")


@pytest.mark.parametrize(
    ("path", "value"), [("image.split", False), ("image.pixels.mean", [0.4, 0.5, 0.5]), ("text.content", "any")]
)
def test_hash_covers_what_influences_pixels_or_ids(copied: Path, path: str, value: Any) -> None:
    (copied / "processing.json").write_bytes(changed("idefics3", path, value))
    with pytest.raises(IntegrityError, match=r"processing\.json\.hash: found .* a file was altered"):
        Processor.load(copied)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_hash_covers_the_tokenizer(copied: Path, name: str) -> None:
    path = copied / "tokenizer" / name
    path.write_text(path.read_text() + " ")
    with pytest.raises(IntegrityError, match="a file was altered"):
        Processor.load(copied)


def test_pixel_limit_is_not_part_of_the_hash(copied: Path) -> None:
    (copied / "processing.json").write_bytes(changed("idefics3", "max_image_pixels", 5000))
    assert Processor.load(copied).hash == Processor.load(bundle("idefics3")).hash


@pytest.mark.parametrize("name", ["processing.json", "tokenizer/tokenizer.json"])
def test_missing_file(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(BundleError, match=rf"{name} cannot be read .*No such file.*compile the bundle again"):
        Processor.load(copied)


def test_oversized_file(copied: Path) -> None:
    (copied / "processing.json").write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(ManifestError, match=r"processing\.json has 1048578 bytes; at most 1048576 are read"):
        Processor.load(copied)


def test_golden_with_other_pixels(copied: Path) -> None:
    image = Image.open(copied / "accuracy/golden.png")
    image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(copied / "accuracy/golden.png")
    with pytest.raises(AccuracyError, match=r"the golden image: a pixel is \d+\.\d+ steps of 1/255 away"):
        verify_golden(copied)


def change_golden(copied: Path, **arrays: Any) -> None:
    path = copied / "accuracy/golden.npz"
    with np.load(path) as stored:
        content = {name: stored[name] for name in stored.files}
    np.savez(path, **{**content, **arrays})


def test_golden_with_other_ids(copied: Path) -> None:
    ids = np.load(copied / "accuracy/golden.npz")["token_ids"].copy()
    ids[3] += 1
    change_golden(copied, token_ids=ids)
    with pytest.raises(AccuracyError, match=r"the golden prompt: .* they differ from position 3"):
        verify_golden(copied)
    change_golden(copied, token_ids=ids[:3])
    with pytest.raises(AccuracyError, match="transformers gives 3"):
        verify_golden(copied)


def test_golden_with_another_shape(copied: Path) -> None:
    change_golden(copied, pixel_values=np.zeros((1, 3, 64, 64), np.float32))
    with pytest.raises(AccuracyError, match=r"pixels \[5, 3, 64, 64\], transformers gives \[1, 3, 64, 64\]"):
        verify_golden(copied)


def test_golden_without_pixels(copied: Path) -> None:
    np.savez(copied / "accuracy/golden.npz", prompt=np.array("a"))
    with pytest.raises(BundleError, match=r"golden\.npz lacks token_ids, pixel_values"):
        verify_golden(copied)


@pytest.mark.parametrize("damage", ["pickle", "empty", "missing"])
def test_golden_that_cannot_be_read(copied: Path, damage: str) -> None:
    path = copied / "accuracy/golden.npz"
    if damage == "pickle":
        np.savez(path, prompt=np.array([object()], dtype=object))
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    with pytest.raises(BundleError, match=r"golden\.npz cannot be read"):
        verify_golden(copied)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(folder("idefics3"), tmp_path / "checkpoint")


def test_checkpoint_without_a_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json \(nor .*\), so its tokenizer is missing"):
        write_processing(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_checkpoint_without_an_image_processor(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "preprocessor_config.json").unlink()
    (checkpoint / "processor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json \(nor processor_config\.json\)"):
        write_processing(checkpoint, tmp_path / "out")


def test_checkpoint_without_a_configuration(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json, so its configuration is missing"):
        write_processing(checkpoint, tmp_path / "out")


def test_broken_tokenizer_file(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="transformers cannot load the tokenizer"):
        write_processing(checkpoint, tmp_path / "out")


def test_broken_processor_file(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "processor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="transformers cannot load the processor"):
        write_processing(checkpoint, tmp_path / "out")


def edit(checkpoint: Path, name: str, **values: Any) -> None:
    path = checkpoint / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("name", "file", "values", "said"),
    [
        ("idefics3", "processor_config.json", {"image_seq_len": 9}, "image_seq_len is 9, .* gives 4 features"),
        ("idefics3", "config.json", {"image_token_id": 5}, "image_token_id is 5, but the tokenizer gives '<image>'"),
        ("llava_clip", "processor_config.json", {"num_additional_image_tokens": 0}, "do not give the model's features"),
        ("llava_clip", "preprocessor_config.json", {"size": {"max_height": 9, "max_width": 9}}, "size is"),
        ("qwen2_vl", "preprocessor_config.json", {"patch_size": 7}, r"are \(7, 2, 2\); the model's are \(14, 2, 2\)"),
        ("qwen2_vl", "preprocessor_config.json", {"do_resize": False}, "do_resize is false"),
    ],
)
def test_checkpoint_at_odds_with_itself(name: str, file: str, values: dict, said: str, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(folder(name), tmp_path / "checkpoint")
    edit(checkpoint, file, **values)
    with pytest.raises(CheckpointError, match=said):
        write_processing(checkpoint, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_difference_from_transformers_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = image_layout.describe_pixels
    monkeypatch.setattr(image_layout, "describe_pixels", lambda image: replace(described(image), resample="nearest"))
    with pytest.raises(AccuracyError, match="steps of 1/255 away from transformers'"):
        write_processing(folder("idefics3"), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("layout", ["merged", "apart"])
def test_processor_config_merged_or_apart(layout: str, tmp_path: Path) -> None:
    """transformers has written the image processor into processor_config.json, and beside it."""
    checkpoint = shutil.copytree(folder("idefics3"), tmp_path / "checkpoint")
    if layout == "merged":
        path = checkpoint / "preprocessor_config.json"
        edit(checkpoint, "processor_config.json", image_processor=json.loads(path.read_text()))
        path.unlink()
    assert write_processing(checkpoint, tmp_path / "out") == Processor.load(bundle("idefics3")).config
