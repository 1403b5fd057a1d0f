"""What a recipe chooses about TensorRT engines; options that trtexec has are spelled as there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...engines.errors import ConfigError
from .shapes import parse_shape

TensorRtPrecision = Literal["fp16", "bf16", "fp16-w8a16", "bf16-w8a16", "fp16-w8a8", "bf16-w8a8"]
"""fp16 or bf16 activations; weights the same, or int8 (w8a16), or int8 with activations rounded row by row (w8a8)."""


@dataclass(frozen=True)
class Precisions:
    """What each part is built in."""

    decoder: TensorRtPrecision = "fp16"
    vision: TensorRtPrecision = "fp16"
    predictor: Literal["fp16", "bf16"] = "fp16"


@dataclass(frozen=True)
class BuilderOptions:
    """Options of the targets tensorrt and tensorrt-rtx.

    `compute_capability`: GPUs to build for (89 is 8.9), of tensorrt-rtx alone; tensorrt builds for the GPU at hand.
    `capacity`: slots of the decoder's cache, which TensorRT wants fixed; less if the context is shorter.
    `width`: tokens of a decoding step, plain or not; one width gives one set of kernels, so the same bits.
    `min_shapes`, `opt_shapes`, `max_shapes`: by input, `1x3x224x224`; a dimension given for one input holds for all
    that have it. `timing_cache`: a file that tensorrt reads and writes. `workspace`: MiB, no limit if None.
    `build_twice`: build every engine a second time and tell in the manifest whether the bytes are the same.
    """

    precision: Precisions = field(default_factory=Precisions)
    builder: Literal["onnx-parser", "torch-tensorrt"] = "onnx-parser"
    compute_capability: tuple[int, ...] = (80, 86, 89, 120)
    capacity: int = 2048
    width: int = 4
    min_shapes: dict[str, str] = field(default_factory=dict)
    opt_shapes: dict[str, str] = field(default_factory=dict)
    max_shapes: dict[str, str] = field(default_factory=dict)
    timing_cache: str | None = None
    builder_optimization_level: int = 3
    profiling_verbosity: Literal["layer_names_only", "detailed", "none"] = "layer_names_only"
    workspace: int | None = None
    build_twice: bool = True

    def __post_init__(self) -> None:
        _check_range("capacity", self.capacity, 16, 1 << 20)
        _check_range("width", self.width, 1, 64)
        _check_range("builder_optimization_level", self.builder_optimization_level, 0, 5)
        if self.workspace is not None:
            _check_range("workspace", self.workspace, 1, 1 << 20)
        if not self.compute_capability:
            raise ConfigError("compute_capability: found none; one or more are expected, for instance 80, 86, 89, 120")
        for shapes in (self.min_shapes, self.opt_shapes, self.max_shapes):
            for name, text in shapes.items():
                parse_shape(name, text)

    @property
    def shapes(self) -> tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]:
        """(least, best, most)."""
        return self.min_shapes, self.opt_shapes, self.max_shapes


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}: found {value}; {low} to {high} is allowed")
