"""Strict reading of untrusted JSON or YAML values into frozen dataclasses."""

import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from .errors import ConfigError, SpecEyesError

T = TypeVar("T")


def decode(cls: type[T], value: Any, where: str, error: type[SpecEyesError] = ConfigError) -> T:
    """Turn plain values into an instance of the dataclass `cls`.

    Handles nested dataclasses, `tuple[X, ...]`, `dict[str, X]`, unions, `Literal` and scalars;
    ints are taken for floats, bools never for ints. `where` names the value in messages (`manifest.files[3].size`).
    Raises `error` for an unknown key (naming the nearest known one), a missing key, or a value of another type.
    """
    if not isinstance(value, Mapping):
        raise error(f"{where}: found {_shown(value)}; a mapping is expected")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in value:
        if key not in fields:
            raise error(f"{where}.{str(key)[:60]}: unknown key; {nearest(str(key), fields)}")
    hints = typing.get_type_hints(cls)
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _decode(hints[name], value[name], f"{where}.{name}", error)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise error(f"{where}.{name}: the key is missing")
    try:
        return cls(**arguments)
    except SpecEyesError as fault:
        if isinstance(fault, error):
            raise
        raise error(f"{where}: {fault}") from None


def encode(value: Any) -> Any:
    """The inverse of `decode`: dataclasses to plain dicts, tuples to lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """A phrase for error messages: the known name that `name` resembles, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def _decode(hint: Any, value: Any, where: str, error: type[SpecEyesError]) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _decode_union(args, value, where, error)
    if origin is typing.Literal:
        if value not in args or isinstance(value, bool) != any(isinstance(a, bool) for a in args):
            raise error(f"{where}: found {_shown(value)}; allowed: {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise error(f"{where}: found {_shown(value)}; a list is expected")
        return tuple(_decode(args[0], item, f"{where}[{i}]", error) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise error(f"{where}: found {_shown(value)}; a mapping is expected")
        for key in value:
            if not isinstance(key, str):
                raise error(f"{where}: key {_shown(key)}; keys are strings")
        return {key: _decode(args[1], item, f"{where}.{key}", error) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast(type, hint), value, where, error)
    return _decode_scalar(hint, value, where, error)


def _decode_union(args: tuple[Any, ...], value: Any, where: str, error: type[SpecEyesError]) -> Any:
    if value is None and type(None) in args:
        return None
    faults = []
    for option in args:
        if option is type(None):
            continue
        try:
            return _decode(option, value, where, error)
        except error as fault:
            faults.append(fault)
    raise faults[0] if len(faults) == 1 else error(f"{where}: found {_shown(value)}; no allowed form fits")


def _decode_scalar(hint: Any, value: Any, where: str, error: type[SpecEyesError]) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise error(f"{where}: found {_shown(value)}; {hint.__name__} is expected")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
