"""From messages and images to a prompt for the engines."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...engines.errors import BundleError, PromptError
from .config import Idefics3Config, ImageConfig, LlavaConfig, ProcessingConfig, read_config
from .idefics3 import Idefics3Layout
from .images import open_image
from .llava import LlavaLayout
from .messages import Messages, read_messages
from .prompt import ImageSource, Layout, PreparedImage, Prompt
from .qwen2_vl import Qwen2VLLayout
from .text import Tokenizer
from .text_only import TextOnlyLayout


class Processor:
    """Tokenizer and image layout of one model. Safe to use from several threads."""

    def __init__(self, config: ProcessingConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.layout: Layout = _build_layout(config.image, config.max_image_pixels)
        self.image_token_id: int | None = None
        if self.layout.token is not None:
            self.image_token_id = tokenizer.token_to_id(self.layout.token)
            if self.image_token_id is None:
                raise BundleError(f"the image token {self.layout.token!r} is not in tokenizer.json; compile again")

    @classmethod
    def load(cls, folder: Path) -> "Processor":
        """Read `processing.json` and `tokenizer/` of a bundle's root. Raises BundleError and its kinds."""
        config, tokenizer, template = read_config(folder)
        return cls(config, Tokenizer(tokenizer, config.text, template))

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of everything that influences pixels or ids."""
        return self.config.hash

    def prepare(
        self,
        messages: Messages | None = None,
        *,
        prompt: str | None = None,
        images: Sequence[ImageSource] = (),
    ) -> Prompt:
        """Ids, positions and tiles of one request.

        Either `messages` (rendered by the model's chat template, ready for the assistant's turn) or `prompt` (taken
        verbatim, with one image token per image). Nothing is truncated.
        Raises PromptError when messages, placeholders and images do not fit, ImageError for an image.
        """
        return self._prepare(messages, prompt, images, self.prepare_image)

    def compose(self, messages: Messages, images: Sequence[PreparedImage]) -> Prompt:
        """As `prepare`, of images that were prepared before."""
        return self._prepare(messages, None, images, lambda source, field: source)

    def prepare_image(self, source: ImageSource, field: str) -> PreparedImage:
        """Tiles of one image. Raises ImageError naming `field`."""
        return self.layout.prepare(open_image(source, field, self.config.max_image_pixels), field)

    def _prepare(
        self,
        messages: Messages | None,
        prompt: str | None,
        images: Sequence[Any],
        prepare_image: Callable[[Any, str], PreparedImage],
    ) -> Prompt:
        if (messages is None) == (prompt is None):
            raise PromptError("pass exactly one of messages and prompt")
        if isinstance(images, str | bytes) or not isinstance(images, Sequence):
            raise PromptError(f"images is a {type(images).__name__}; allowed: a list of images")
        if messages is not None:
            conversation = read_messages(messages, images, self.config.text.content)
            sources = conversation.images
            self._check_takes_images(sources)
            text = self.tokenizer.apply_chat_template(conversation.messages)
            add_special_tokens = self._adds_special_tokens(text)
        else:
            if not isinstance(prompt, str):
                raise PromptError(f"prompt is a {type(prompt).__name__}; allowed: a str")
            sources = [(f"images[{i}]", image) for i, image in enumerate(images)]
            self._check_takes_images(sources)
            text, add_special_tokens = prompt, True
        pieces = self._split(text, len(sources))
        prepared = [prepare_image(source, field) for field, source in sources]
        return self._assemble(pieces, prepared, add_special_tokens)

    def _adds_special_tokens(self, rendered: str) -> bool:
        """As transformers: a text model's template writes them all, a processor adds them unless bos is there."""
        bos = self.tokenizer.bos_token
        return self.layout.token is not None and not (bos is not None and rendered.startswith(bos))

    def _check_takes_images(self, sources: Sequence[tuple[str, ImageSource]]) -> None:
        if sources and self.layout.token is None:
            raise PromptError(f"{sources[0][0]} is an image, but this model reads text alone; leave it out")

    def _split(self, text: str, images: int) -> list[str]:
        """The text between the placeholders, of which there must be one per image."""
        token = self.layout.token
        if token is None:
            return [text]
        pieces = text.split(token)
        found = len(pieces) - 1
        if found > images:
            raise PromptError(
                f"the prompt holds {found} placeholders ({token}), but {images} images are given: "
                "a placeholder without an image; pass the image or take the placeholder out of the text"
            )
        if found < images:
            raise PromptError(
                f"the prompt holds {found} placeholders ({token}), but {images} images are given: "
                "an image without a placeholder; add one per image"
            )
        return pieces

    def _assemble(self, pieces: list[str], images: list[PreparedImage], add_special_tokens: bool) -> Prompt:
        texts = [image.text for image in images]
        text = "".join(part for pair in zip(pieces, [*texts, ""], strict=True) for part in pair)
        ids = np.array(self.tokenizer.encode(text, add_special_tokens), dtype=np.int64)
        if not len(ids):
            raise PromptError("the prompt is empty; at least one token is needed")
        tiles = tuple(tile for image in images for tile in image.tiles)
        is_tile = ids == self.image_token_id if self.image_token_id is not None else np.zeros(len(ids), dtype=bool)
        if int(is_tile.sum()) != len(tiles):
            raise PromptError(
                f"the prompt has {int(is_tile.sum())} image tokens for {len(tiles)} tiles; "
                f"the tokenizer does not keep {self.layout.token!r} whole: compile the bundle again"
            )
        counts = np.ones(len(ids), dtype=np.int64)
        counts[is_tile] = [tile.features for tile in tiles]
        token_ids = np.repeat(ids, counts)
        is_feature = np.repeat(is_tile, counts)
        feature_index = np.where(is_feature, np.cumsum(is_feature) - 1, -1)
        position_ids, next_position = self.layout.positions(is_feature, images)
        return Prompt(token_ids, feature_index, position_ids, next_position, tiles, len(images))


def _build_layout(image: ImageConfig | None, max_pixels: int) -> Layout:
    if image is None:
        return TextOnlyLayout()
    if isinstance(image, Idefics3Config):
        return Idefics3Layout(image)
    if isinstance(image, LlavaConfig):
        return LlavaLayout(image, max_pixels)
    return Qwen2VLLayout(image)
