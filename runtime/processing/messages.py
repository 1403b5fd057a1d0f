"""Check a conversation and take its images out of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...engines.errors import PromptError
from ...engines.schema import nearest
from .prompt import ImageSource

ROLES = ("system", "user", "assistant")
_PARTS = {"text": ("type", "text"), "image": ("type", "image")}

Messages = str | Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """Messages ready for the chat template, and the images in the order of their placeholders with their fields."""

    messages: list[dict[str, Any]]
    images: list[tuple[str, ImageSource]]


def read_messages(
    messages: Messages, images: Sequence[ImageSource], content: Literal["string", "parts", "any"]
) -> Conversation:
    """Check messages and pair image parts without a source with `images`, in order.

    `content` says what the chat template renders (see TextConfig): text is wrapped into parts, or parts of text
    joined into a string, where it must be. A str stands for one user turn, the images before the text.
    Raises PromptError naming the field for an unknown role or key, a wrong type, no messages, or when image parts and
    images do not match in number.
    """
    if images and content == "string":
        raise PromptError("images[0] is an image, but this model's messages take text alone; leave it out")
    if isinstance(messages, str):
        parts = [{"type": "image"} for _ in images]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": messages}] if parts else messages}]
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise PromptError(f"messages is a {type(messages).__name__}; allowed: a str or a list of messages")
    if not messages:
        raise PromptError("messages is empty; at least one message is needed")
    reader = _Reader(images)
    checked = [reader.read_message(message, f"messages[{i}]", content) for i, message in enumerate(messages)]
    reader.finish()
    return Conversation(checked, reader.found)


class _Reader:
    def __init__(self, images: Sequence[ImageSource]) -> None:
        self.images = images
        self.taken = 0
        self.found: list[tuple[str, ImageSource]] = []

    def read_message(self, message: Any, field: str, content: str) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise PromptError(f"{field} is a {type(message).__name__}; allowed: an object with role and content")
        _check_keys(message, ("role", "content"), field)
        role, value = message["role"], message["content"]
        if not isinstance(role, str) or role not in ROLES:
            raise PromptError(f"{field}.role is {role!r}; {nearest(str(role), ROLES)}")
        if isinstance(value, str):
            return {"role": role, "content": [{"type": "text", "text": value}] if content == "parts" else value}
        if not isinstance(value, list | tuple):
            raise PromptError(f"{field}.content is a {type(value).__name__}; allowed: a str or a list of parts")
        if not value:
            raise PromptError(f"{field}.content is empty; at least one part is needed")
        parts = [self.read_part(part, f"{field}.content[{i}]") for i, part in enumerate(value)]
        if content == "string":
            return {"role": role, "content": "".join(_text_of(part, field) for part in parts)}
        return {"role": role, "content": parts}

    def read_part(self, part: Any, field: str) -> dict[str, Any]:
        if not isinstance(part, dict):
            raise PromptError(f"{field} is a {type(part).__name__}; allowed: an object with type text or image")
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _PARTS:
            raise PromptError(f"{field}.type is {kind!r}; {nearest(str(kind), tuple(_PARTS))}")
        _check_keys(part, _PARTS[kind], field, optional=("image",))
        if kind == "text":
            if not isinstance(part["text"], str):
                raise PromptError(f"{field}.text is a {type(part['text']).__name__}; allowed: a str")
            return {"type": "text", "text": part["text"]}
        if "image" in part:
            self.found.append((f"{field}.image", part["image"]))
            return {"type": "image", "image": "(image)"}
        if self.taken == len(self.images):
            raise PromptError(f"{field} is a placeholder without an image; images= holds {len(self.images)}")
        self.found.append((f"images[{self.taken}]", self.images[self.taken]))
        self.taken += 1
        return {"type": "image"}

    def finish(self) -> None:
        if self.taken < len(self.images):
            raise PromptError(
                f"images[{self.taken}] has no placeholder: the messages hold {self.taken} and images= "
                f'{len(self.images)}; add {{"type": "image"}} to a message\'s content'
            )


def _check_keys(mapping: dict[str, Any], known: tuple[str, ...], field: str, optional: tuple[str, ...] = ()) -> None:
    for key in mapping:
        if key not in known:
            raise PromptError(f"{field} has the unknown key {key!r}; {nearest(str(key), known)}")
    for key in known:
        if key not in mapping and key not in optional:
            raise PromptError(f"{field} lacks {key!r}")


def _text_of(part: dict[str, Any], field: str) -> str:
    if part["type"] != "text":
        raise PromptError(f"{field}.content holds an image, but this model's messages take text alone; leave it out")
    return str(part["text"])
