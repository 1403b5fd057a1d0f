"""How a loaded model speculates and how much memory that may take; read from YAML with units such as `256MB`, `5ms`."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...engines.errors import ConfigError
from ...engines.schema import decode, encode
from ..yaml_file import read_yaml

DRAFTERS = ("predictor", "lookup")
FILE = "settings.yaml"
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


@dataclass(frozen=True)
class Speculation:
    """The `speculation` section.

    `window_size`: the most tokens of a draft; each round takes 0 to that many by measured cost and acceptance, or
    always all of them with `adaptive` off. `max_parallel`: the most branches of a round. `warmup_steps`: tokens of an
    answer that are decoded plainly while statistics gather, `long_warmup_steps` for prompts above `long_input_tokens`.
    `confidence_thresh`: a draft ends before the token at which its cumulative confidence falls below this.
    `drafters`: who proposes, among those the bundle has. `past_outputs`: tokens of earlier answers that `lookup` keeps.
    `mode`: `exact` gives the text that plain decoding gives; `approximate` also accepts a drafted token whose foreseen
    hidden state deviates by at most `fallback_thresh` (relative L2) from the model's. `double_buffer`: draft the next
    window while one is verified. `journal`: folder for the journal of a round that failed.
    """

    window_size: int = 8
    warmup_steps: int = 0
    max_parallel: int = 2
    fallback_thresh: float = 0.3
    confidence_thresh: float = 0.2
    long_input_tokens: int = 512
    long_warmup_steps: int = 0
    drafters: tuple[str, ...] = DRAFTERS
    past_outputs: int = 16384
    mode: Literal["exact", "approximate"] = "exact"
    enabled: bool = True
    adaptive: bool = True
    double_buffer: bool = False
    journal: str | None = None

    def __post_init__(self) -> None:
        _check_range("window_size", self.window_size, 0, 32)
        _check_range("warmup_steps", self.warmup_steps, 0, 1 << 20)
        _check_range("max_parallel", self.max_parallel, 1, 8)
        _check_range("fallback_thresh", self.fallback_thresh, 0, 1)
        _check_range("confidence_thresh", self.confidence_thresh, 0, 1)
        _check_range("long_input_tokens", self.long_input_tokens, 0, 1 << 30)
        _check_range("long_warmup_steps", self.long_warmup_steps, 0, 1 << 20)
        _check_range("past_outputs", self.past_outputs, 0, 1 << 24)
        for name in self.drafters:
            if name not in DRAFTERS:
                raise ConfigError(f"drafters: found {name!r}; allowed: {', '.join(DRAFTERS)}")

    def warmup(self, prompt_tokens: int) -> int:
        """Tokens to decode plainly after a prompt of this length."""
        return self.long_warmup_steps if prompt_tokens > self.long_input_tokens else self.warmup_steps


@dataclass(frozen=True)
class Memory:
    """The `memory` section.

    `cache_size`: bytes for what is kept in case it is needed again, and for what speculation holds; with 0 no request
    finds anything of an earlier one, and what speculation holds is not counted. `release_delay`:
    seconds that a released buffer waits for another use. `features`: how features of images are kept, `exact` or as
    `int8` with `quant_groups` scales a row, which rounds them once, found or not.
    """

    cache_size: int = 256_000_000
    quant_groups: int = 8
    release_delay: float = 0.005
    features: Literal["exact", "int8"] = "exact"

    def __post_init__(self) -> None:
        _check_range("cache_size", self.cache_size, 0, 1 << 50)
        _check_range("quant_groups", self.quant_groups, 1, 1 << 10)
        _check_range("release_delay", self.release_delay, 0, 60)


@dataclass(frozen=True)
class Settings:
    """All of it; see docs/speculation.md."""

    speculation: Speculation = field(default_factory=Speculation)
    memory: Memory = field(default_factory=Memory)


def read_settings(
    source: "str | os.PathLike[str] | Mapping[str, Any] | Settings | None", base: Settings | None = None
) -> Settings:
    """Settings from a YAML file or a mapping of the same shape; what it leaves out is as in `base`, or the defaults.

    Raises ConfigError for an unreadable file, an unknown key (naming the nearest) or a value that is not allowed.
    """
    if isinstance(source, Settings):
        return source
    values = source if isinstance(source, Mapping) else {} if source is None else read_yaml(source, "settings")
    plain = _plain(values)
    for section, held in encode(base or Settings()).items():
        given = plain.get(section, {})
        plain[section] = {**held, **given} if isinstance(given, Mapping) else given
    return decode(Settings, plain, "settings")


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `256MB` (10^6) or `1.5GiB` (2^30)."""
    number, unit = _quantity("size", text)
    if unit.upper() not in _BYTES:
        raise ConfigError(f"size: found {text!r}; units are B, KB, MB, GB, KiB, MiB, GiB")
    return round(number * _BYTES[unit.upper()])


def parse_seconds(text: str) -> float:
    """Seconds of a duration such as `5ms`."""
    number, unit = _quantity("duration", text)
    if unit not in _SECONDS:
        raise ConfigError(f"duration: found {text!r}; units are us, ms, s")
    return number * _SECONDS[unit]


def _quantity(what: str, text: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise ConfigError(f"{what}: found {text!r}; a number with a unit is expected, such as 256MB or 5ms")
    return float(match[1]), match[2]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping with quantities of the memory section as numbers."""
    plain = dict(values)
    memory = plain.get("memory")
    if isinstance(memory, Mapping):
        parsers = {"cache_size": parse_bytes, "release_delay": parse_seconds}
        plain["memory"] = {
            key: parsers[key](value) if key in parsers and isinstance(value, str) else value
            for key, value in memory.items()
        }
    return plain


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}: found {value}; {low} to {high} is allowed")
