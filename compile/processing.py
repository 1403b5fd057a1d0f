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

from ..engines.errors import AccuracyError, CheckpointError, PromptError
from ..runtime.processing.chat_template import ChatTemplate
from ..runtime.processing.config import (
    FILE,
    MAX_IMAGE_PIXELS,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    Idefics3Config,
    ImageConfig,
    ProcessingConfig,
    TextConfig,
    compute_hash,
    dump_config,
)
from ..runtime.processing.golden import ARRAYS_FILE, IMAGE_FILE, check_ids, check_pixels, verify_golden
from ..runtime.processing.processor import Processor
from ..runtime.processing.text import Tokenizer
from .image_layout import describe_image

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


class _Qwen2VLImages(Qwen2VLProcessor):  # type: ignore[misc]
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
    options = _read_options(checkpoint)
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


def _read_options(checkpoint: Path) -> dict[str, Any]:
    """processor_config.json and the chat template, wherever this version of transformers looks for them."""
    try:
        options, _ = ProcessorMixin.get_processor_dict(checkpoint, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{checkpoint}: transformers cannot load the processor: {error}") from error
    return dict(options)


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
    image = describe_image(source.processor, source.config) if source.processor is not None else None
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
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
