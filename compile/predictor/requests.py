"""The data of a training: a folder with `requests.jsonl` and the images that it names."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engines.bundle import hash_file
from ...engines.errors import ConfigError
from ...engines.schema import decode

FILE = "requests.jsonl"
_TENTHS = ("calibration", "test")


@dataclass(frozen=True)
class Entry:
    """One line of `requests.jsonl`.

    `messages`: a list of messages, or a text that stands for one user turn with the images before it. `prompt`: raw
    text instead. `images`: paths relative to the folder. `max_new_tokens`: the most tokens of the answer.
    """

    messages: Any = None
    prompt: str | None = None
    images: tuple[str, ...] = ()
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ConfigError("messages, prompt: exactly one of them is needed")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens: found {self.max_new_tokens}; allowed: 1 or more")


@dataclass(frozen=True)
class Request:
    """An entry with its images found; `sha256` is over its text and the content of its images."""

    entry: Entry
    images: tuple[Path, ...]
    sha256: str
    split: str


def read_requests(folder: Path) -> list[Request]:
    """Requests in the order of the file.

    Of the pictures (of the texts, where a request has none) a tenth is held out for calibration and a tenth for the
    test, by hash: requests about one picture fall on one side, and adding requests moves none to another side.
    Raises ConfigError naming the line for anything that is not a request or an image that is not there.
    """
    source = folder / FILE
    found = read_file(source)
    for split in ("training", *_TENTHS):
        if not any(request.split == split for request in found):
            raise ConfigError(f"{source}: no request of {len(found)} falls to the {split} split; give more requests")
    return found


def read_file(source: Path) -> list[Request]:
    """All requests of one file; images are relative to its folder. Raises ConfigError as `read_requests` does."""
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(
            f"requests {str(source)!r}: the file cannot be read ({fault}); see docs/predictor.md"
        ) from None
    return [
        _read(source.parent, f"{source.name} line {number}", line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def hash_requests(requests: Sequence[Request]) -> str:
    """SHA-256 over all requests in order."""
    return hashlib.sha256("".join(f"{request.sha256}\n" for request in requests).encode()).hexdigest()


def _read(folder: Path, where: str, line: str) -> Request:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{where}: not valid JSON ({fault})") from None
    try:
        entry = decode(Entry, value, where)
    except ConfigError as fault:
        raise ConfigError(str(fault) if str(fault).startswith(where) else f"{where}: {fault}") from None
    images = tuple(folder / name for name in entry.images)
    for path in images:
        if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{where}: image {path.name!r} is not in the folder; paths are relative to {folder}")
    pictures = "".join(hash_file(path) for path in images)
    text = json.dumps([entry.messages, entry.prompt, entry.max_new_tokens], sort_keys=True)
    subject = hashlib.sha256((pictures or text).encode()).digest()
    tenth = int.from_bytes(subject[:4], "big") % 10
    split = _TENTHS[tenth] if tenth < len(_TENTHS) else "training"
    return Request(entry, images, hashlib.sha256((pictures + text).encode()).hexdigest(), split)
