"""YAML files of options, read strictly."""

import os
from pathlib import Path
from typing import Any

import yaml

from ..engines.errors import ConfigError


def read_yaml(source: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """The mapping in a file; an empty file gives an empty one. `what` names the file's kind in messages.

    Raises ConfigError for an unreadable file, bad YAML, a key that stands twice, or anything but a mapping.
    """
    try:
        value = yaml.load(Path(source).read_text(encoding="utf-8"), UniqueKeyLoader)
    except (OSError, UnicodeDecodeError, RecursionError) as fault:
        raise ConfigError(f"{what} {str(source)!r}: it cannot be read ({fault})") from None
    except yaml.YAMLError as fault:
        raise ConfigError(f"{what} {str(source)!r}: not valid YAML ({' '.join(str(fault).split())})") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{what} {str(source)!r}: found {type(value).__name__}; a mapping of options is expected")
    return value


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, where YAML readers would keep the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
