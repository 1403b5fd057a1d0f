"""What `processing.json` says: how text and images of one model are prepared."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ...engines.errors import BundleError, ConfigError, IntegrityError, ManifestError
from ...engines.schema import decode, encode, nearest

FILE = "processing.json"
TOKENIZER_FILE = "tokenizer/tokenizer.json"
TEMPLATE_FILE = "tokenizer/chat_template.jinja"
MAX_IMAGE_PIXELS = 100_000_000
LARGEST_EDGE = 1 << 14
LARGEST_AREA = 1 << 28
_SIZE_LIMITS = {FILE: 1 << 20, TEMPLATE_FILE: 1 << 20, TOKENIZER_FILE: 1 << 28}
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TextConfig:
    """Special tokens that the chat template may name, and the kind of message content that it renders.

    `content`: "string" (text only), "parts" (a list of text and image parts) or "any" (both).
    """

    special_tokens: dict[str, str]
    content: Literal["string", "parts", "any"]

    def __post_init__(self) -> None:
        for name in self.special_tokens:
            if name not in _SPECIAL_TOKENS:
                raise ConfigError(f"special_tokens.{name}: unknown key; {nearest(name, _SPECIAL_TOKENS)}")


@dataclass(frozen=True)
class PixelConfig:
    """From 8-bit RGB to the vision engine's floats: (value * rescale_factor - mean) / std, per channel."""

    resample: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_length("mean", self.mean, 3)
        _check_length("std", self.std, 3)
        if not all(math.isfinite(mean) for mean in self.mean):
            raise ConfigError(f"mean: found {self.mean}; finite numbers are expected")
        for name, value in (("rescale_factor", self.rescale_factor), *(("std", std) for std in self.std)):
            if not 1e-9 <= value <= 1e9:
                raise ConfigError(f"{name}: found {value}; allowed: 1e-9 to 1e9")


@dataclass(frozen=True, kw_only=True)
class Idefics3Config:
    """Square tiles of `tile_edge` pixels and a global tile; `longest_edge` null leaves the image's own size."""

    layout: Literal["idefics3"] = "idefics3"
    token: str
    boundary_token: str
    global_token: str
    tile_features: int
    longest_edge: int | None
    tile_edge: int
    split: bool
    pixels: PixelConfig

    def __post_init__(self) -> None:
        _check_token(self.token)
        _check("tile_features", self.tile_features, LARGEST_AREA)
        _check("longest_edge", self.longest_edge, LARGEST_EDGE)
        _check("tile_edge", self.tile_edge, LARGEST_EDGE)


@dataclass(frozen=True, kw_only=True)
class LlavaConfig:
    """One tile per image: pad to a square of `pad_color`, resize, crop the middle; null leaves a step out.

    `resize` and `crop` are (height, width). The tile yields one feature per patch and `additional_features` more
    (+1 for a kept class token, -1 for a dropped patch).
    """

    layout: Literal["llava"] = "llava"
    token: str
    pad_color: tuple[int, ...] | None
    shortest_edge: int | None
    resize: tuple[int, ...] | None
    crop: tuple[int, ...] | None
    patch_size: int
    additional_features: int
    pixels: PixelConfig

    def __post_init__(self) -> None:
        _check_token(self.token)
        _check("shortest_edge", self.shortest_edge, LARGEST_EDGE)
        _check("patch_size", self.patch_size, LARGEST_EDGE)
        if not -1 <= self.additional_features <= 64:
            raise ConfigError(f"additional_features: found {self.additional_features}; allowed: -1 to 64")
        for name, size in (("resize", self.resize), ("crop", self.crop)):
            if size is not None:
                _check_length(name, size, 2)
                for edge in size:
                    _check(name, edge, LARGEST_EDGE)
        if self.pad_color is not None:
            _check_length("pad_color", self.pad_color, 3)
            if not all(0 <= value <= 255 for value in self.pad_color):
                raise ConfigError(f"pad_color: found {self.pad_color}; allowed: 0 to 255")


@dataclass(frozen=True, kw_only=True)
class Qwen2VLConfig:
    """A grid of patches in merge order; `window_size` in pixels (Qwen2.5-VL) or null."""

    layout: Literal["qwen2_vl"] = "qwen2_vl"
    token: str
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    window_size: int | None
    pixels: PixelConfig

    def __post_init__(self) -> None:
        _check_token(self.token)
        for name in ("patch_size", "temporal_patch_size", "merge_size", "window_size"):
            _check(name, getattr(self, name), LARGEST_EDGE)
        _check("min_pixels", self.min_pixels, LARGEST_AREA)
        _check("max_pixels", self.max_pixels, LARGEST_AREA)
        block = self.patch_size * self.merge_size
        if self.max_pixels < max(self.min_pixels, block * block):
            least = max(self.min_pixels, block * block)
            raise ConfigError(f"max_pixels: found {self.max_pixels}; at least {least} (min_pixels, one merged patch)")
        if self.window_size is not None and self.window_size < block:
            raise ConfigError(f"window_size: found {self.window_size}; at least {block} (one merged patch)")


ImageConfig = Idefics3Config | LlavaConfig | Qwen2VLConfig
_LAYOUTS: dict[str, type[ImageConfig]] = {kind.layout: kind for kind in (Idefics3Config, LlavaConfig, Qwen2VLConfig)}


@dataclass(frozen=True)
class ProcessingConfig:
    """All of `processing.json`. `image` is null for models that read text alone.

    `hash` is SHA-256 over canonical JSON of everything that influences pixels or ids (see `compute_hash`);
    `max_image_pixels` bounds width x height of any image, decoded or resized.
    """

    version: Literal[1]
    text: TextConfig
    image: Idefics3Config | LlavaConfig | Qwen2VLConfig | None
    max_image_pixels: int
    hash: str

    def __post_init__(self) -> None:
        _check("max_image_pixels", self.max_image_pixels, LARGEST_AREA)


def _check(name: str, value: int | None, largest: int) -> None:
    if value is not None and not 1 <= value <= largest:
        raise ConfigError(f"{name}: found {value}; allowed: 1 to {largest}")


def _check_length(name: str, values: tuple[float, ...], length: int) -> None:
    if len(values) != length:
        raise ConfigError(f"{name}: found {len(values)} values; {length} are expected")


def _check_token(token: str) -> None:
    if not token:
        raise ConfigError("token: found ''; the image token's text is expected")


def compute_hash(text: TextConfig, image: ImageConfig | None, tokenizer: bytes, template: bytes | None) -> str:
    """SHA-256 (hex) over the canonical JSON of both sections, tokenizer.json's and the chat template's digests."""
    content = {
        "version": 1,
        "text": encode(text),
        "image": encode(image),
        "tokenizer": hashlib.sha256(tokenizer).hexdigest(),
        "template": hashlib.sha256(template).hexdigest() if template is not None else None,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_config(folder: Path) -> tuple[ProcessingConfig, bytes, bytes | None]:
    """`processing.json`, tokenizer.json's bytes and the chat template's (None without one) of a bundle's root.

    Raises ManifestError for an unknown key or a wrong value, IntegrityError when the hash does not fit the files.
    """
    config = parse_config(_read(folder, FILE))
    tokenizer = _read(folder, TOKENIZER_FILE)
    template = _read(folder, TEMPLATE_FILE) if (folder / TEMPLATE_FILE).exists() else None
    found = compute_hash(config.text, config.image, tokenizer, template)
    if found != config.hash:
        raise IntegrityError(
            f"{FILE}.hash: found {config.hash[:16]!r}, its content and the tokenizer give {found[:16]!r}; "
            "a file was altered: compile the bundle again"
        )
    return config, tokenizer, template


def parse_config(data: bytes) -> ProcessingConfig:
    """The content of `processing.json`. Raises ManifestError naming the key, what was found and what is allowed."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{FILE} is not JSON: {error}; compile the bundle again") from error
    image = value.get("image") if isinstance(value, Mapping) else None
    plain = {**value, "image": None} if isinstance(image, Mapping) else value
    config = decode(ProcessingConfig, plain, FILE, ManifestError)
    return config if image is None else replace(config, image=_decode_image(image))


def _decode_image(value: Mapping[str, Any]) -> ImageConfig:
    layout = value.get("layout")
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise ManifestError(f"{FILE}.image.layout: found {layout!r}; allowed: {', '.join(_LAYOUTS)}")
    return decode(_LAYOUTS[layout], value, f"{FILE}.image", ManifestError)


def dump_config(config: ProcessingConfig) -> str:
    """The text of `processing.json`."""
    return json.dumps(encode(config), indent=2, ensure_ascii=False) + "\n"


def _read(folder: Path, name: str) -> bytes:
    limit = _SIZE_LIMITS[name]
    try:
        if (size := (folder / name).stat().st_size) > limit:
            raise ManifestError(f"{name} has {size} bytes; at most {limit} are read")
        return (folder / name).read_bytes()
    except OSError as error:
        raise BundleError(f"{name} cannot be read in {folder}: {error.strerror}; compile the bundle again") from error
