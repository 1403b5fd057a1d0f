"""The recipe: every choice a build can make, once, with its default."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from ..engines.errors import ConfigError
from ..engines.schema import decode, encode
from ..engines.target import find_target
from ..runtime.yaml_file import UniqueKeyLoader, read_yaml
from .tensorrt.options import BuilderOptions

Kv = Literal["fp32", "int8"]
PARTS = ("decoder", "vision", "predictor")
HALVES = ("fp16", "bf16")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}: found {value}; {low} to {high} is allowed")


@dataclass(frozen=True)
class Precision:
    """Weights of each part on onnxruntime-cpu. `int8`: one scale per output channel; `int4`: in blocks."""

    decoder: Literal["fp32", "int8", "int4"] = "int8"
    vision: Literal["fp32", "int8"] = "fp32"
    predictor: Literal["fp32", "int8"] = "int8"


@dataclass(frozen=True)
class DecoderBounds:
    """What the engine's logits have to reach beside the fp32 model's, over every text position.

    `cosine`: lowest cosine of one position. `agreement`: share of positions with the same best token.
    `divergence`: highest Kullback-Leibler divergence of one position, in nats.
    """

    cosine: float
    agreement: float
    divergence: float

    def __post_init__(self) -> None:
        _check_range("cosine", self.cosine, -1, 1)
        _check_range("agreement", self.agreement, 0, 1)
        _check_range("divergence", self.divergence, 0, float("inf"))


@dataclass(frozen=True)
class VisionBounds:
    """`cosine`: lowest cosine of one image feature beside the fp32 model's."""

    cosine: float

    def __post_init__(self) -> None:
        _check_range("cosine", self.cosine, -1, 1)


@dataclass(frozen=True)
class DecoderChecks:
    """The bounds for each precision of the decoder."""

    fp32: DecoderBounds = DecoderBounds(cosine=0.9999, agreement=0.99, divergence=0.001)
    fp16: DecoderBounds = DecoderBounds(cosine=0.999, agreement=0.97, divergence=0.01)
    bf16: DecoderBounds = DecoderBounds(cosine=0.99, agreement=0.93, divergence=0.1)
    int8: DecoderBounds = DecoderBounds(cosine=0.95, agreement=0.9, divergence=0.5)
    int4: DecoderBounds = DecoderBounds(cosine=0.9, agreement=0.75, divergence=1.0)


@dataclass(frozen=True)
class VisionChecks:
    """The bounds for each precision of the vision part."""

    fp32: VisionBounds = VisionBounds(cosine=0.9999)
    fp16: VisionBounds = VisionBounds(cosine=0.999)
    bf16: VisionBounds = VisionBounds(cosine=0.99)
    int8: VisionBounds = VisionBounds(cosine=0.97)


@dataclass(frozen=True)
class Check:
    """The comparison with the fp32 model: `steps` tokens follow the prompt; a figure out of bounds is an error."""

    enabled: bool = True
    steps: int = 32
    decoder: DecoderChecks = field(default_factory=DecoderChecks)
    vision: VisionChecks = field(default_factory=VisionChecks)

    def __post_init__(self) -> None:
        _check_range("steps", self.steps, 1, 4096)

    def bounds(self, part: str, precision: str, kv: str = "fp32") -> DecoderBounds | VisionBounds:
        """The bounds of a part in a precision; one with int8 weights, or an int8 cache, has those of int8."""
        half, _, weights = precision.partition("-")
        if part == "decoder" and kv == "int8" and half == "fp32":
            half = "int8"
        found: DecoderBounds | VisionBounds = getattr(getattr(self, part), "int8" if weights else half)
        return found


@dataclass(frozen=True)
class Accuracy:
    """The accuracy packs: inputs and fp32 outputs that are kept in the bundle, for `speceyes-compile check`.

    `steps`: tokens that the session decodes. `margin`: an engine is held to so many times the error that it has beside
    the fp32 graph when it is built.
    """

    enabled: bool = True
    steps: int = 10
    margin: float = 2.0

    def __post_init__(self) -> None:
        _check_range("steps", self.steps, 2, 256)
        _check_range("margin", self.margin, 1, 1000)


@dataclass(frozen=True)
class Measure:
    """The cost of a step: token rows per step, tokens in the cache before it, runs of each width and of a tile."""

    enabled: bool = True
    widths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 16)
    past: int = 256
    repeats: int = 20
    tile_repeats: int = 3

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ConfigError(f"widths: found {list(self.widths)}; one or more numbers of at least 1 are expected")
        _check_range("past", self.past, 0, 1 << 20)
        _check_range("repeats", self.repeats, 1, 10_000)
        _check_range("tile_repeats", self.tile_repeats, 1, 10_000)


@dataclass(frozen=True)
class Recipe:
    """How to compile a checkpoint. See docs/recipe.md.

    `target`: one, or several that the bundle is to hold. `kv`: what the decoder's cache holds on onnxruntime-cpu, fp32
    or int8 with one scale for each token and head (docs/int8-attention.md). `tensorrt`: options of the targets tensorrt
    and tensorrt-rtx.
    `predictor`: the folder of a predictor trained for the checkpoint, or None. `settings`: a YAML file of speculation
    and memory settings (docs/speculation.md) that the bundle is loaded with unless others are given, or None.
    """

    target: str | tuple[str, ...] = "onnxruntime-cpu"
    precision: Precision = field(default_factory=Precision)
    kv: Kv = "fp32"
    keep_graphs: bool = False
    predictor: str | None = None
    settings: str | None = None
    check: Check = field(default_factory=Check)
    accuracy: Accuracy = field(default_factory=Accuracy)
    measure: Measure = field(default_factory=Measure)
    tensorrt: BuilderOptions = field(default_factory=BuilderOptions)

    def __post_init__(self) -> None:
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise ConfigError(f"target: found {list(self.targets)}; one or more different ones are expected")
        for name in self.targets:
            find_target(name)

    @property
    def targets(self) -> tuple[str, ...]:
        """The names in `target`."""
        return (self.target,) if isinstance(self.target, str) else self.target


def make_recipe(
    source: "str | os.PathLike[str] | Recipe | None" = None,
    changes: Mapping[str, Any] | None = None,
    assignments: Iterable[str] = (),
) -> Recipe:
    """A recipe from a file (or another recipe, or the defaults), then `changes`, then `key=value` assignments.

    `changes` nests like the file. An assignment names a key with dots (`check.steps=16`), its value is YAML.
    Raises ConfigError for an unreadable file, an unknown key (naming the nearest) or a value that is not allowed.
    """
    values = encode(source if isinstance(source, Recipe) else Recipe())
    if source is not None and not isinstance(source, Recipe):
        _merge(values, read_yaml(source, "recipe"))
    _merge(values, changes or {})
    for assignment in assignments:
        _merge(values, _parse_assignment(assignment))
    return decode(Recipe, values, "recipe")


def parse_precision(text: str) -> dict[str, str]:
    """`int8` for every part, or `decoder=int8,vision=fp32`."""
    if "=" not in text:
        return dict.fromkeys(PARTS, text.strip())
    found = {}
    for item in text.split(","):
        part, equals, precision = (piece.strip() for piece in item.partition("="))
        if not equals or part in found:
            raise ConfigError(f"precision: found {text!r}; `int8` or `decoder=int8,vision=fp32` is expected")
        found[part] = precision
    return found


def precision_changes(text: str) -> dict[str, Any]:
    """What `parse_precision` reads, as changes to the recipe.

    Values that begin with fp16 or bf16 are those of the TensorRT targets, the others of onnxruntime-cpu. A predictor
    has no int8 weights on TensorRT: given for every part, `fp16-w8a16` is `fp16` for it.
    """
    found = parse_precision(text)
    halves = {part: value for part, value in found.items() if value.startswith(HALVES)}
    if "=" not in text and halves:
        halves["predictor"] = halves["predictor"].partition("-")[0]
    others = {part: value for part, value in found.items() if part not in halves}
    changes: dict[str, Any] = {"precision": others} if others else {}
    return changes | ({"tensorrt": {"precision": halves}} if halves else {})


def dump_recipe(recipe: Recipe) -> str:
    """The recipe with every key, as YAML that `make_recipe` reads back."""
    return yaml.safe_dump(encode(recipe), sort_keys=False)


def _parse_assignment(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {text!r}: key=value is expected, for instance check.steps=16")
    try:
        nested: Any = yaml.load(value, UniqueKeyLoader)
    except yaml.YAMLError:
        raise ConfigError(f"--set {text!r}: {value!r} is not valid YAML") from None
    for name in reversed(names):
        nested = {name: nested}
    return dict(nested)


def _merge(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, change in changes.items():
        held = values.get(key)
        if isinstance(change, Mapping) and isinstance(held, dict):
            _merge(held, change)
        else:
            values[key] = change
