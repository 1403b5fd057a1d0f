"""Incremental decoders, one per kind of `decoder` that tokenizer.json may name.

A stage turns one token into text as far as it is certain, `finish` gives the rest; states are immutable. Joined, the
pieces equal what the `tokenizers` library decodes from all tokens at once.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from ...engines.errors import BundleError

State = tuple[Any, ...]
REPLACEMENT = "\ufffd"


class Stage(Protocol):
    """One step of a decoder over tokens."""

    @property
    def initial(self) -> Any: ...

    def push(self, state: Any, token: str) -> tuple[Any, list[str]]: ...

    def finish(self, state: Any) -> list[str]: ...


def _build_byte_map() -> dict[str, int]:
    """Characters that stand for bytes in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTES = _build_byte_map()


def _split_utf8(data: bytes) -> tuple[str, bytes]:
    """Text of all whole characters, and the 0 to 3 bytes at the end that may begin another."""
    for kept in range(1, min(3, len(data)) + 1):
        lead = data[-kept]
        if lead & 0xC0 == 0x80:
            continue
        tail = data[len(data) - kept :]
        if lead >= 0xC2 and _may_begin_character(tail):
            return data[: len(data) - kept].decode("utf-8", "replace"), tail
        break
    return data.decode("utf-8", "replace"), b""


def _may_begin_character(tail: bytes) -> bool:
    try:
        tail.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


@dataclass(frozen=True)
class ByteLevel:
    """Tokens spell bytes; the state is the beginning of a character."""

    initial: bytes = b""

    def push(self, state: bytes, token: str) -> tuple[bytes, list[str]]:
        spelled = [_BYTES.get(char) for char in token]
        data = token.encode() if None in spelled else bytes(spelled)  # type: ignore[arg-type]
        text, state = _split_utf8(state + data)
        return state, [text]

    def finish(self, state: bytes) -> list[str]:
        return [state.decode("utf-8", "replace")]


@dataclass(frozen=True)
class ByteFallback:
    """Tokens such as <0xE2> spell bytes; the state is their run, which is text only if all of it is valid."""

    initial: bytes = b""

    def push(self, state: bytes, token: str) -> tuple[bytes, list[str]]:
        byte = _parse_byte(token)
        if byte is not None:
            return state + bytes((byte,)), []
        return b"", [*self.finish(state), token]

    def finish(self, state: bytes) -> list[str]:
        try:
            return [state.decode()] if state else []
        except UnicodeDecodeError:
            return [REPLACEMENT] * len(state)


def _parse_byte(token: str) -> int | None:
    if len(token.encode()) != 6 or not token.startswith("<0x") or token[-1] != ">":
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


@dataclass(frozen=True)
class Replace:
    """A string replaced within each token."""

    pattern: str
    content: str
    initial: None = None

    def push(self, state: None, token: str) -> tuple[None, list[str]]:
        return None, [token.replace(self.pattern, self.content)]

    def finish(self, state: None) -> list[str]:
        return []


@dataclass(frozen=True)
class StripStart:
    """Up to `count` leading characters taken off: of each token, or, after a fuse, of the whole text.

    The state is how many may still be taken off.
    """

    char: str
    count: int
    fused: bool

    @property
    def initial(self) -> int:
        return self.count

    def push(self, state: int, token: str) -> tuple[int, list[str]]:
        rest = token
        while state and rest.startswith(self.char):
            rest, state = rest[1:], state - 1
        if not self.fused:
            state = self.count
        elif rest:
            state = 0
        return state, [rest]

    def finish(self, state: int) -> list[str]:
        return []


@dataclass(frozen=True)
class Metaspace:
    """A mark stands for a space; in the first token it is left out (unless nothing was ever prepended)."""

    mark: str
    prepended: bool

    @property
    def initial(self) -> bool:
        return self.prepended

    def push(self, state: bool, token: str) -> tuple[bool, list[str]]:
        return False, [token.replace(self.mark, "" if state else " ")]

    def finish(self, state: bool) -> list[str]:
        return []


class Decoder:
    """Stages one after the other."""

    def __init__(self, stages: list[Stage]) -> None:
        self._stages = stages
        self.initial: State = tuple(stage.initial for stage in stages)

    def push(self, state: State, token: str) -> tuple[State, str]:
        tokens = [token]
        states = []
        for stage, current in zip(self._stages, state, strict=True):
            current, tokens = _push_all(stage, current, tokens)
            states.append(current)
        return tuple(states), "".join(tokens)

    def finish(self, state: State) -> str:
        tokens: list[str] = []
        for stage, current in zip(self._stages, state, strict=True):
            current, tokens = _push_all(stage, current, tokens)
            tokens += stage.finish(current)
        return "".join(tokens)


def _push_all(stage: Stage, state: Any, tokens: list[str]) -> tuple[Any, list[str]]:
    out: list[str] = []
    for token in tokens:
        state, pieces = stage.push(state, token)
        out += pieces
    return state, out


def build_decoder(spec: dict[str, Any] | None) -> Decoder:
    """The decoder that tokenizer.json describes. Raises BundleError for a kind that cannot be streamed exactly."""
    kinds = [] if spec is None else spec["decoders"] if spec["type"] == "Sequence" else [spec]
    if not kinds:
        raise BundleError("tokenizer.json has no decoder; allowed: ByteLevel, Metaspace or a Sequence")
    stages: list[Stage] = []
    fused = False
    for kind in kinds:
        if fused and kind["type"] not in ("Fuse", "Strip"):
            raise BundleError(f"tokenizer.json: the decoder {kind['type']} cannot come after the tokens were joined")
        stage = _build_stage(kind, fused)
        fused = fused or kind["type"] in ("Fuse", "ByteLevel")
        if stage is not None:
            stages.append(stage)
    return Decoder(stages)


def _build_stage(kind: dict[str, Any], fused: bool) -> Stage | None:
    name = kind["type"]
    if name == "ByteLevel":
        return ByteLevel()
    if name == "ByteFallback":
        return ByteFallback()
    if name == "Fuse":
        return None
    if name == "Metaspace":
        return Metaspace(kind["replacement"], kind["prepend_scheme"] != "never")
    if name == "Replace" and "String" in kind["pattern"]:
        return Replace(kind["pattern"]["String"], kind["content"])
    if name == "Strip" and kind["stop"] == 0:
        return StripStart(kind["content"], kind["start"], fused)
    raise BundleError(
        f"tokenizer.json: the decoder {kind} cannot be streamed; "
        "allowed: ByteLevel, Metaspace, Replace of a string, ByteFallback, Fuse, Strip at the start"
    )
