"""The other way to an engine: Torch-TensorRT converts the traced vision tower itself, without ONNX in between.

Decoders and predictors are traced in ONNX's own operators (attention over a cache, a loop), as is the tower of
Qwen2-VL; Torch-TensorRT does not know these, and such parts go through TensorRT's parser.
"""

from __future__ import annotations

import copy
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...engines.errors import EngineError, LoweringError
from ..families.family import VisionPart
from .options import BuilderOptions

TARGET = "tensorrt"
INPUT, OUTPUT = "pixel_values", "image_features"
_MIB = 1 << 20
_HALVES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}


class HalfTower(nn.Module):
    """A vision tower in half precision with fp32 pixels and features."""

    def __init__(self, tower: nn.Module, half: torch.dtype) -> None:
        super().__init__()
        self.tower: nn.Module = copy.deepcopy(tower).to(dtype=half)
        self.dtype = half

    def forward(self, pixel_values: Tensor) -> Tensor:
        features: Tensor = self.tower(pixel_values.to(self.dtype))
        return features.float()


def import_torch_tensorrt(target: str) -> ModuleType:
    """The package torch_tensorrt. Raises EngineError, in one line, where it cannot be used."""
    if target != TARGET:
        raise EngineError(f"builder torch-tensorrt: found target {target}; it builds for {TARGET} alone")
    try:
        return importlib.import_module("torch_tensorrt")
    except Exception as fault:
        reason = " ".join(str(fault).split())[:200]
        raise EngineError(
            f"builder torch-tensorrt: torch_tensorrt cannot be imported ({type(fault).__name__}: {reason}); it needs "
            "an NVIDIA driver and `pip install 'speceyes[torch-tensorrt]'`; or build with `--builder onnx-parser`"
        ) from fault


def trace_tower(part: VisionPart, precision: str) -> torch.export.ExportedProgram:
    """The tower over one tile as Torch-TensorRT takes it.

    Raises LoweringError for int8 weights, and for a tower that takes more than pixels, which is traced in operators of
    ONNX.
    """
    if precision not in _HALVES:
        raise LoweringError(
            f"rule torch-tensorrt: found precision {precision} of the vision part; it has fp16 and bf16"
        )
    if set(part.inputs) != {INPUT}:
        raise LoweringError(
            f"rule torch-tensorrt: the vision part takes {', '.join(part.inputs)} and is traced in operators of ONNX; "
            "build with `--builder onnx-parser`"
        )
    tower = HalfTower(part.module, _HALVES[precision]).eval()
    with torch.no_grad():
        return torch.export.export(tower, (part.inputs[INPUT][:1],))


def convert(library: ModuleType, program: torch.export.ExportedProgram, options: BuilderOptions) -> bytes:
    """The serialised engine. Raises EngineError with Torch-TensorRT's own words."""
    (pixels,) = (value for value in program.example_inputs[0])
    try:
        made: Any = library.dynamo.convert_exported_program_to_serialized_trt_engine(
            program,
            arg_inputs=[pixels],
            optimization_level=options.builder_optimization_level,
            workspace_size=(options.workspace or 0) * _MIB,
            arg_input_binding_names=(INPUT,),
            output_binding_names=OUTPUT,
        )
    except Exception as fault:
        reason = " ".join(str(fault).split())[:300]
        raise EngineError(f"vision: Torch-TensorRT could not convert it: {type(fault).__name__}: {reason}") from fault
    return bytes(made)
