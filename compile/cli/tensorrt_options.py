"""Options of `build` for the TensorRT targets, spelled as trtexec spells them."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from ...engines.errors import ConfigError
from ..tensorrt.options import BuilderOptions
from ..tensorrt.shapes import parse_shapes

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULTS = BuilderOptions()
SHAPES = ("min_shapes", "opt_shapes", "max_shapes")

_OPTIONS = (
    click.option("--compute-capability", metavar="80,86,…", help="GPUs that tensorrt-rtx builds for; 89 is 8.9."),
    click.option("--min-shapes", multiple=True, metavar="NAME:1x3x…", help="Least shapes of inputs, with commas."),
    click.option("--opt-shapes", multiple=True, metavar="NAME:1x3x…", help="Shapes to be fastest at."),
    click.option("--max-shapes", multiple=True, metavar="NAME:1x3x…", help="Most shapes of inputs."),
    click.option("--timing-cache", type=click.Path(dir_okay=False), help="A file that tensorrt reads and writes."),
    click.option(
        "--builder-optimization-level",
        type=int,
        help=f"0 to 5; {DEFAULTS.builder_optimization_level} by default.",
    ),
    click.option(
        "--profiling-verbosity",
        help=f"layer_names_only, detailed or none; {DEFAULTS.profiling_verbosity} by default.",
    ),
    click.option("--workspace", type=int, metavar="MIB", help="Most memory of a layer; no limit by default."),
    click.option("--builder", help=f"onnx-parser or torch-tensorrt; {DEFAULTS.builder} by default."),
)
NAMES = (
    *("compute_capability", *SHAPES, "timing_cache", "builder_optimization_level"),
    *("profiling_verbosity", "workspace", "builder"),
)


def tensorrt_options(command: Command) -> Command:
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def tensorrt_changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, as changes to the recipe's `tensorrt`. Raises ConfigError."""
    changes = {name: given[name] for name in NAMES if given[name] not in (None, ())}
    for name in SHAPES:
        if name in changes:
            changes[name] = parse_shapes(changes[name])
    if "compute_capability" in changes:
        changes["compute_capability"] = _parse_capabilities(changes["compute_capability"])
    return changes


def _parse_capabilities(text: str) -> list[int]:
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(piece.isascii() and piece.isdigit() for piece in pieces):
        raise ConfigError(f"compute_capability: found {text!r}; numbers such as 80,86,89,120 are expected")
    return [int(piece) for piece in pieces]
