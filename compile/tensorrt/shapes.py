"""Shapes in trtexec's spelling, and the ranges of dimensions that an engine is built for."""

import re
from collections.abc import Iterable, Mapping, Sequence

from ...engines.engine import TensorSpec
from ...engines.errors import ConfigError

Range = tuple[int, int, int]
"""The least size of a dimension, the one to be fastest at, the most."""

PATCHES = re.compile(r"patches/(\d+)")


def parse_shapes(texts: Iterable[str]) -> dict[str, str]:
    """`input_ids:1x4,pixel_values:1x3x224x224` -> {name: `1x4`}. Raises ConfigError."""
    found: dict[str, str] = {}
    for item in (item.strip() for text in texts for item in text.split(",")):
        name, colon, shape = item.rpartition(":")
        if not colon or not name:
            raise ConfigError(f"shapes: found {item!r}; name:1x3x224x224 is expected, several with commas")
        parse_shape(name, shape)
        found[name.strip("'\"")] = shape
    return found


def parse_shape(name: str, text: str) -> tuple[int, ...]:
    """`1x3x224` -> (1, 3, 224). Raises ConfigError."""
    sizes = text.split("x")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        raise ConfigError(f"shapes of {name}: found {text!r}; sizes of at least 1 with x between them are expected")
    return tuple(map(int, sizes))


def make_profile(
    inputs: Sequence[TensorSpec],
    ranges: Mapping[str, Range],
    given: Sequence[Mapping[str, str]],
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """By input with free dimensions its least, best and most shape.

    `ranges` by dimension; `given`: shapes by input for least, best and most, which go before. Raises ConfigError for a
    shape that does not fit its input, two that disagree, or sizes out of order.
    """
    sizes = [{name: size[place] for name, size in ranges.items()} | _read(inputs, given[place]) for place in range(3)]
    profile: dict[str, tuple[tuple[int, ...], ...]] = {}
    for spec in inputs:
        if all(isinstance(size, int) for size in spec.shape):
            continue
        least, best, most = (tuple(_size(spec, dimension, known) for dimension in spec.shape) for known in sizes)
        if not all(low <= middle <= high for low, middle, high in zip(least, best, most, strict=True)):
            shown = ", ".join("x".join(map(str, shape)) for shape in (least, best, most))
            raise ConfigError(f"shapes of {spec.name}: found {shown} as least, best and most; they have to ascend")
        profile[spec.name] = (least, best, most)
    return profile


def _read(inputs: Sequence[TensorSpec], given: Mapping[str, str]) -> dict[str, int]:
    """The dimensions that the given shapes name."""
    found: dict[str, int] = {}
    for spec in inputs:
        if spec.name not in given:
            continue
        shape = parse_shape(spec.name, given[spec.name])
        wanted = "x".join(map(str, spec.shape))
        if len(shape) != len(spec.shape):
            raise ConfigError(f"shapes of {spec.name}: found {given[spec.name]}; the input is {wanted}")
        for dimension, size in zip(spec.shape, shape, strict=True):
            name, value = _named(dimension, size)
            if (isinstance(dimension, int) and dimension != size) or found.setdefault(name, value) != value:
                held = dimension if isinstance(dimension, int) else found[name]
                raise ConfigError(
                    f"shapes of {spec.name}: found {given[spec.name]}; the input is {wanted}, and {dimension} is {held}"
                )
    return found


def _named(dimension: int | str, size: int) -> tuple[str, int]:
    divided = PATCHES.fullmatch(str(dimension))
    return ("patches", size * int(divided[1])) if divided else (str(dimension), size)


def _size(spec: TensorSpec, dimension: int | str, known: Mapping[str, int]) -> int:
    if isinstance(dimension, int):
        return dimension
    if divided := PATCHES.fullmatch(dimension):
        return known["patches"] // int(divided[1])
    if dimension not in known:
        raise ConfigError(
            f"shapes of {spec.name}: {dimension!r} is unknown; give --min-shapes, --opt-shapes, --max-shapes"
        )
    return known[dimension]
