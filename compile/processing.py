"""Write `processing.json` and `tokenizer/`, and hold our processor against transformers' own."""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2VLProcessor,
)
from transformers.processing_utils import ProcessorMixin

from ..engines.errors import AccuracyError, CheckpointError, PromptError, SpecEyesError
from ..runtime.processing.chat_template import ChatTemplate
from ..runtime.processing.config import (
    FILE,
    MAX_IMAGE_PIXELS,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    Idefics3Config,
    ImageConfig,
    LlavaConfig,
    PixelConfig,
    ProcessingConfig,
    Qwen2VLConfig,
    TextConfig,
    compute_hash,
    dump_config,
)
from ..runtime.processing.golden import ARRAYS_FILE, IMAGE_FILE, check_ids, check_pixels, verify_golden
from ..runtime.processing.processor import Processor
from ..runtime.processing.text import Tokenizer

QUESTION = "What is in the picture?"
PROBE = "a lighthouse"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Source:
    """What transformers loads from a checkpoint. `processor` is None for models that read text alone."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    processor: ProcessorMixin | None
    template: str | None


class _Qwen2VLImages(Qwen2VLProcessor):
    """Without videos, whose processor needs torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **options: Any
    ) -> None:
        self.image_token = getattr(tokenizer, "image_token", "<|image_pad|>")
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


# SmolVLM's own processor differs in videos alone, and needs num2words for them.
_PROCESSORS = {
    "idefics3": Idefics3Processor,
    "smolvlm": Idefics3Processor,
    "llava": LlavaProcessor,
    "qwen2_vl": _Qwen2VLImages,
    "qwen2_5_vl": _Qwen2VLImages,
}


def write_processing(checkpoint: Path, out: Path) -> ProcessingConfig:
    """Write `processing.json`, `tokenizer/` and the golden image and arrays of a checkpoint's folder into `out`.

    Nothing is left in `out` unless ids equal transformers' and every pixel is within one step of 1/255.
    Raises CheckpointError for a missing file or an unknown image processor, AccuracyError for a difference.
    """
    source = load_source(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".processing-") as name:
        stage = Path(name)
        config = _write(source, stage)
        check_processing(source, stage)
        for path in sorted(path for path in stage.rglob("*") if path.is_file()):
            target = out / path.relative_to(stage)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    return config


def load_source(checkpoint: Path) -> Source:
    """Load tokenizer and image processor with transformers. Raises CheckpointError naming a missing file."""
    _require(checkpoint, ("config.json",), "configuration")
    _require(checkpoint, TOKENIZER_FILES, "tokenizer")
    config = _load(checkpoint, AutoConfig, "configuration")
    tokenizer = _load(checkpoint, AutoTokenizer, "tokenizer")
    if not tokenizer.is_fast:
        raise CheckpointError(f"{checkpoint}: the tokenizer has no tokenizer.json form; save a fast tokenizer there")
    options, _ = ProcessorMixin.get_processor_dict(checkpoint, local_files_only=True)
    template = options.pop("chat_template", None) or tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    processor = None
    if config.model_type in _PROCESSORS:
        _require(checkpoint, IMAGE_FILES, "image processor")
        image_processor = _load(checkpoint, AutoImageProcessor, "image processor", backend="pil")
        processor = _build_processor(config, image_processor, tokenizer, template, options)
    return Source(config, tokenizer, processor, template)


def check_processing(source: Source, folder: Path) -> float:
    """Largest pixel difference (steps of 1/255) from transformers over a few images; writes the golden files.

    Raises AccuracyError when ids, decoded text or a pixel differ.
    """
    ours = Processor.load(folder)
    golden = make_golden_image()
    extra = [golden.resize((24, 96)).convert("L"), golden.resize((64, 16)).convert("RGBA")]
    worst = 0.0
    if source.template is not None:
        for images in ([golden], extra, []) if source.processor is not None else ([],):
            worst = max(worst, _check_conversation(source, ours, images))
    _check_decoding(source, ours.tokenizer)
    _write_golden(source, ours, golden, folder)
    return max(worst, verify_golden(folder, ours))


def make_golden_image() -> Image.Image:
    """A 256x64 picture of gradients and squares; no random numbers, so it is the same everywhere."""
    y, x = np.indices((64, 256))
    planes = x, 4 * y, (x * y // 16 + 90 * ((x // 8 + y // 8) % 2)) % 256
    return Image.fromarray(np.stack(planes, axis=-1).astype(np.uint8))


def _require(checkpoint: Path, names: tuple[str, ...], what: str) -> None:
    if not any((checkpoint / name).is_file() for name in names):
        others = f" (nor {', '.join(names[1:])})" if names[1:] else ""
        raise CheckpointError(
            f"{checkpoint} has no {names[0]}{others}, so its {what} is missing; copy it from the original checkpoint"
        )


def _load(checkpoint: Path, loader: Any, what: str, **options: Any) -> Any:
    try:
        return loader.from_pretrained(checkpoint, local_files_only=True, **options)
    except Exception as error:  # transformers raises many kinds here
        raise CheckpointError(f"{checkpoint}: transformers cannot load the {what}: {error}") from error


def _build_processor(
    config: PreTrainedConfig, image_processor: Any, tokenizer: Any, template: str | None, options: dict[str, Any]
) -> ProcessorMixin:
    names = {
        "idefics3": ("image_seq_len",),
        "llava": ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens", "image_token"),
    }
    kind = "idefics3" if config.model_type == "smolvlm" else config.model_type
    known = {name: options[name] for name in names.get(kind, ()) if options.get(name) is not None}
    if kind == "llava":
        known.setdefault("patch_size", config.vision_config.patch_size)
        known.setdefault("vision_feature_select_strategy", config.vision_feature_select_strategy)
    return _PROCESSORS[config.model_type](image_processor, tokenizer, chat_template=template, **known)


def _write(source: Source, folder: Path) -> ProcessingConfig:
    tokenizer_folder = (folder / TOKENIZER_FILE).parent
    source.tokenizer.chat_template = source.template
    source.tokenizer.save_pretrained(tokenizer_folder)
    tokens = source.tokenizer.special_tokens_map
    text = TextConfig(special_tokens=dict(tokens), content=_find_content_kind(source.template, tokens))
    image = _describe_image(source) if source.processor is not None else None
    template = (folder / TEMPLATE_FILE).read_bytes() if source.template is not None else None
    hash = compute_hash(text, image, (folder / TOKENIZER_FILE).read_bytes(), template)
    config = ProcessingConfig(1, text, image, MAX_IMAGE_PIXELS, hash)
    (folder / FILE).write_text(dump_config(config), encoding="utf-8")
    return config


def _find_content_kind(template: str | None, tokens: dict[str, str]) -> Any:
    """Which content the template renders: "string", "parts" or "any"."""
    if template is None:
        return "string"
    compiled = ChatTemplate(template)

    def shows(content: Any) -> bool:
        try:
            text = compiled.render([{"role": "user", "content": content}], tokens)
        except PromptError:
            return False
        return PROBE in text and repr("text") not in text

    parts = shows([{"type": "text", "text": PROBE}])
    return ("any" if shows(PROBE) else "parts") if parts else "string"


def _describe_image(source: Source) -> ImageConfig:
    processor: Any = source.processor
    image = processor.image_processor
    kind = source.config.model_type
    expected = getattr(source.config, "image_token_id", None)
    found = source.tokenizer.convert_tokens_to_ids(processor.image_token)
    if expected is not None and found != expected:
        raise CheckpointError(
            f"config.json: image_token_id is {expected}, but the tokenizer gives {processor.image_token!r} id {found}"
        )
    try:
        if kind in ("idefics3", "smolvlm"):
            return _describe_idefics3(processor, image, source.config)
        if kind == "llava":
            return _describe_llava(processor, image, source.config)
        return _describe_qwen2_vl(processor, image, source.config)
    except SpecEyesError as error:
        raise CheckpointError(f"{type(image).__name__}: {error}") from error


def _describe_pixels(image: Any) -> PixelConfig:
    def three(value: Any) -> tuple[float, ...]:
        return tuple(float(item) for item in (value if isinstance(value, list | tuple) else [value] * 3))

    return PixelConfig(
        resample=Image.Resampling(image.resample).name.lower(),  # type: ignore[arg-type]
        rescale_factor=float(image.rescale_factor) if image.do_rescale else 1.0,
        mean=three(image.image_mean) if image.do_normalize else (0.0, 0.0, 0.0),
        std=three(image.image_std) if image.do_normalize else (1.0, 1.0, 1.0),
    )


def _describe_idefics3(processor: Any, image: Any, config: Any) -> Idefics3Config:
    edge = image.max_image_size["longest_edge"]
    if image.do_resize and not image.size.longest_edge:
        raise CheckpointError(f"size is {dict(image.size)}; longest_edge is expected")
    features = (edge // config.vision_config.patch_size) ** 2 // config.scale_factor**2
    if features != processor.image_seq_len:
        raise CheckpointError(
            f"image_seq_len is {processor.image_seq_len}, but the model gives {features} features for {edge} pixels"
        )
    return Idefics3Config(
        token=processor.image_token,
        boundary_token=processor.fake_image_token,
        global_token=processor.global_image_tag,
        tile_features=processor.image_seq_len,
        longest_edge=image.size.longest_edge if image.do_resize else None,
        tile_edge=edge,
        split=bool(image.do_image_splitting),
        pixels=_describe_pixels(image),
    )


def _describe_llava(processor: Any, image: Any, config: Any) -> LlavaConfig:
    name = type(image).__name__
    if not name.startswith(("CLIP", "Siglip", "Llava")):
        raise CheckpointError(f"the image processor {name} is not known; allowed: CLIP, Siglip and Llava")
    if image.do_pad and not name.startswith("Llava"):
        raise CheckpointError("do_pad is true; only LlavaImageProcessor pads")
    size = image.size
    square = (size.height, size.width) if size.height and size.width else None
    if image.do_resize and (not (square or size.shortest_edge) or size.longest_edge):
        raise CheckpointError(f"size is {dict(size)}; height and width, or shortest_edge, are expected")
    dropped = processor.vision_feature_select_strategy == "default"
    vision = config.vision_config
    tokens = processor.num_additional_image_tokens - dropped
    extra = (vision.model_type == "clip_vision_model") - (config.vision_feature_select_strategy == "default")
    if (tokens, processor.patch_size) != (extra, vision.patch_size):
        raise CheckpointError(
            f"processor_config.json: patch_size {processor.patch_size}, vision_feature_select_strategy "
            f"{processor.vision_feature_select_strategy!r} and num_additional_image_tokens "
            f"{processor.num_additional_image_tokens} do not give the model's features "
            f"(patch_size {vision.patch_size}, {config.vision_feature_select_strategy!r}, {vision.model_type})"
        )
    return LlavaConfig(
        token=processor.image_token,
        pad_color=tuple(int(mean * 255) for mean in image.image_mean) if image.do_pad else None,
        shortest_edge=size.shortest_edge if image.do_resize and not square else None,
        resize=square if image.do_resize else None,
        crop=(image.crop_size.height, image.crop_size.width) if image.do_center_crop else None,
        patch_size=processor.patch_size,
        additional_features=tokens,
        pixels=_describe_pixels(image),
    )


def _describe_qwen2_vl(processor: Any, image: Any, config: Any) -> Qwen2VLConfig:
    vision = config.vision_config
    found = image.patch_size, image.temporal_patch_size, image.merge_size
    wanted = vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size
    if found != wanted:
        raise CheckpointError(f"patch_size, temporal_patch_size, merge_size are {found}; the model's are {wanted}")
    if not image.do_resize:
        raise CheckpointError("do_resize is false; patches need a size that they divide")
    return Qwen2VLConfig(
        token=processor.image_token,
        patch_size=image.patch_size,
        temporal_patch_size=image.temporal_patch_size,
        merge_size=image.merge_size,
        min_pixels=image.size.shortest_edge,
        max_pixels=image.size.longest_edge,
        window_size=getattr(vision, "window_size", None) if config.model_type == "qwen2_5_vl" else None,
        pixels=_describe_pixels(image),
    )


def _check_conversation(source: Source, ours: Processor, images: list[Image.Image]) -> float:
    parts = [{"type": "image", "image": image} for image in images]
    content: Any = [*parts, {"type": "text", "text": QUESTION}]
    if ours.config.text.content == "string":
        if images:
            return 0.0
        content = QUESTION
    messages = [{"role": "user", "content": content}]
    what = f"a conversation with {len(images)} images"
    reference: Any = source.processor if source.processor is not None else source.tokenizer
    expected = reference.apply_chat_template(
        messages, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="np"
    )
    return _compare(ours, ours.prepare(messages), expected, what)


def _compare(ours: Processor, prompt: Any, expected: Any, what: str) -> float:
    check_ids(prompt.token_ids, np.asarray(expected["input_ids"])[0], what)
    image = ours.config.image
    if image is None or not prompt.tiles:
        return 0.0
    return check_pixels(prompt.tiles, _reference_pixels(image, expected), image.pixels, what)


def _reference_pixels(image: ImageConfig, expected: Any) -> npt.NDArray[np.float32]:
    """transformers' pixel_values with all tiles (or patches) along the first axis."""
    pixels = np.asarray(expected["pixel_values"], dtype=np.float32)
    return pixels[0] if isinstance(image, Idefics3Config) else pixels


def _check_decoding(source: Source, tokenizer: Tokenizer) -> None:
    ids = source.tokenizer.encode(f"{QUESTION} Ein Café, 東京 🗼 …\n\tdone.")
    expected = source.tokenizer.decode(ids, skip_special_tokens=True)
    stream = tokenizer.stream()
    streamed = "".join([stream.push(id) for id in ids] + [stream.finish()])
    for name, text in (("decode", tokenizer.decode(ids)), ("stream", streamed)):
        if text != expected:
            raise AccuracyError(f"{name}: {json.dumps(text)}, transformers gives {json.dumps(expected)}")


def _write_golden(source: Source, ours: Processor, golden: Image.Image, folder: Path) -> None:
    (folder / IMAGE_FILE).parent.mkdir()
    token = ours.layout.token
    prompt = f"{token or ''}{QUESTION}"
    arrays: dict[str, npt.NDArray[Any]] = {"prompt": np.array(prompt)}
    image = ours.config.image
    if image is None or source.processor is None:
        arrays["token_ids"] = np.array(source.tokenizer(prompt)["input_ids"], dtype=np.int64)
    else:
        golden.save(folder / IMAGE_FILE)
        expected = source.processor(text=prompt, images=[golden], return_tensors="np")
        arrays["token_ids"] = np.asarray(expected["input_ids"])[0].astype(np.int64)
        arrays["pixel_values"] = _reference_pixels(image, expected)
    with (folder / ARRAYS_FILE).open("wb") as stream:
        np.savez_compressed(stream, **arrays)
