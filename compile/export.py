"""From a loaded checkpoint to canonical ONNX graphs, one per part."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from ..engines.errors import ExportError
from ..engines.files import whole_file
from ..plugins import cached_attention as operator
from .attention import attend_cached, attend_full
from .canonical import canonicalise, rename_dimensions
from .checkpoint import Checkpoint, open_checkpoint
from .decoder import DecoderStep
from .tracing import traceable

OPSET = operator.OPSET
IR_VERSION = 11

Progress = Callable[[str, float], None]
Dimensions = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True)
class ExportedModel:
    """The canonical graphs of a checkpoint by part ("decoder", "vision"), in memory.

    Weights are views of the loaded model; `paths` tells where the graphs were saved, if they were.
    """

    checkpoint: Checkpoint
    parts: dict[str, ir.Model]
    paths: dict[str, Path]


def export_parts(
    source: Checkpoint | Path | str, out: Path | str | None = None, *, progress: Progress | None = None
) -> ExportedModel:
    """Export every part of a checkpoint; with `out`, save each as `out/<part>.onnx` beside `out/<part>.onnx.data`.

    `progress` is called with a part's name and its seconds when the part is done. Raises CheckpointError, ExportError.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    exporters = {"decoder": export_decoder}
    if checkpoint.family.has_vision:
        exporters["vision"] = export_vision
    parts, paths = {}, {}
    for part, export in exporters.items():
        started = time.perf_counter()
        parts[part] = export(checkpoint)
        if out is not None:
            paths[part] = save_graph(parts[part], Path(out) / f"{part}.onnx")
        if progress is not None:
            progress(part, time.perf_counter() - started)
    return ExportedModel(checkpoint, parts, paths)


def save_graph(model: ir.Model, path: Path) -> Path:
    """Write a graph with its weights in one file `<name>.data` beside it; nothing is left behind when it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        ir.save(model, partial, format="protobuf", external_data=f"{path.name}.data")
    return path


def export_decoder(checkpoint: Checkpoint) -> ir.Model:
    """The decoder's step over the cache; inputs and outputs as documented for the canonical graph `decoder`."""
    family, model = checkpoint.family, checkpoint.model
    text = checkpoint.text_config
    step = DecoderStep(
        model.get_input_embeddings(),
        family.text_model(model),
        model.get_output_embeddings(),
        getattr(text, "final_logit_softcapping", None),
    )
    inputs, dimensions = _decoder_inputs(checkpoint)
    outputs = ["logits", "hidden"]
    outputs += [f"present_{kind}.{layer}" for kind in "kv" for layer in range(checkpoint.layers)]
    graph = _trace(step, inputs, dimensions, outputs, attend_cached, part="decoder")
    function = ir.serde.deserialize_function(operator.function_proto())
    graph.functions[function.identifier()] = function
    return graph


def export_vision(checkpoint: Checkpoint) -> ir.Model:
    """The vision tower with its projector; inputs and outputs as documented for the canonical graph `vision`."""
    part = checkpoint.family.vision_part(checkpoint.model)
    if part is None:
        raise ExportError(f"the family {checkpoint.family.name} has no vision part")
    graph = _trace(
        part.module, part.inputs, part.dynamic, ["image_features"], attend_full, part="vision", group=part.group
    )
    if part.group > 1:
        groups = graph.graph.outputs[0].shape[0]
        names = {f"{part.group}*groups": "patches", f"{part.group}*{groups}": "patches"}
        rename_dimensions(graph.graph, names | {str(groups): f"patches/{part.group}"})
    return graph


def _decoder_inputs(checkpoint: Checkpoint) -> tuple[dict[str, Any], Dimensions]:
    """Example inputs in the graph's order and the names of their dimensions; no size is 1, which would fix it."""
    batch, width, capacity, rows = 2, 3, 8, 5
    token = {0: "batch", 1: "width"}
    positions = torch.arange(width).expand(batch, width).clone()
    inputs: dict[str, Any] = {"input_ids": torch.zeros(batch, width, dtype=torch.int64)}
    dimensions: dict[str, dict[int, str]] = {"input_ids": token}
    if checkpoint.family.has_vision:
        inputs["image_features"] = torch.zeros(4, checkpoint.hidden)
        inputs["feature_index"] = torch.zeros(batch, width, dtype=torch.int64)
        dimensions |= {"image_features": {0: "features"}, "feature_index": token}
    if checkpoint.family.rope == "mrope":
        inputs["position_ids"] = positions.expand(3, batch, width).clone()
        dimensions["position_ids"] = {1: "batch", 2: "width"}
    else:
        inputs["position_ids"] = positions
        dimensions["position_ids"] = token
    inputs["write_index"] = torch.zeros(batch, dtype=torch.int64)
    inputs["kv_length"] = torch.full((batch,), width)
    inputs["mask"] = torch.ones(batch, 1, width, capacity, dtype=torch.bool)
    inputs["logit_index"] = torch.zeros(rows, dtype=torch.int64)
    dimensions |= {
        "write_index": {0: "batch"},
        "kv_length": {0: "batch"},
        "mask": {0: "batch", 2: "width", 3: "capacity"},
        "logit_index": {0: "rows"},
    }
    cache = torch.zeros(batch, checkpoint.kv_heads, capacity, checkpoint.head_dim)
    for kind in "kv":
        inputs[f"cache_{kind}"] = [cache.clone() for _ in range(checkpoint.layers)]
        dimensions |= {f"cache_{kind}.{layer}": {0: "batch", 2: "capacity"} for layer in range(checkpoint.layers)}
    return inputs, dimensions


def _trace(
    module: nn.Module,
    inputs: dict[str, Any],
    dimensions: Dimensions,
    outputs: list[str],
    attend: Callable[..., Any],
    *,
    part: str,
    group: int = 1,
) -> ir.Model:
    names = [name for key, value in inputs.items() for name in _flat_names(key, value)]
    shapes = {key: _dynamic_shapes(key, value, dimensions, group) for key, value in inputs.items()}
    module.eval()
    try:
        with traceable(module, attend), torch.no_grad(), quiet():
            program = torch.onnx.export(
                module, (), kwargs=inputs, dynamic_shapes=shapes, opset_version=OPSET, optimize=False, verbose=False
            )
    except Exception as error:
        cause = error.__cause__ or error
        reason = str(cause).strip().splitlines()[0]
        raise ExportError(f"{part}: the model could not be traced ({type(cause).__name__}: {reason})") from error
    assert program is not None
    graph: ir.Model = program.model
    graph.ir_version = IR_VERSION
    for value, name in zip(graph.graph.inputs, names, strict=True):
        value.name = name
    canonicalise(graph, outputs)
    return graph


def _flat_names(key: str, value: Tensor | list[Tensor]) -> list[str]:
    return [key] if isinstance(value, Tensor) else [f"{key}.{index}" for index in range(len(value))]


def _dynamic_shapes(key: str, value: Tensor | list[Tensor], dimensions: Dimensions, group: int) -> Any:
    shapes = [
        {axis: _dimension(symbol, group) for axis, symbol in dimensions.get(name, {}).items()}
        for name in _flat_names(key, value)
    ]
    return shapes[0] if isinstance(value, Tensor) else shapes


def _dimension(symbol: str, group: int) -> Any:
    return group * torch.export.Dim("groups") if symbol == "patches" else torch.export.Dim(symbol)


@contextmanager
def quiet() -> Iterator[None]:
    """The exporter's notes on optional packages and deprecations say nothing to the user of a checkpoint."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
