"""The range audit: the largest magnitude of every tensor of a canonical graph, and which do not fit in fp16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...engines.engine import Array
from ...engines.errors import LoweringError
from ..accuracy.graph import opened

FP16_MAX = 65504.0
HEADROOM = 4.0
"""How much larger than anything seen in the audit a tensor may become in use."""

_PREFIX = "range of "


def audit(graph: ir.Model, feeds: Iterable[Mapping[str, Array]], folder: Path) -> dict[str, float]:
    """The largest magnitude of every fp32 tensor and weight of the graph over all runs, by name.

    `folder`: where a temporary file may stand. Raises LoweringError for one that is not finite.
    """
    found = {
        str(value.name): float(np.abs(value.const_value.numpy()).max(initial=0))
        for value in graph.graph.initializers.values()
        if value.dtype == ir.DataType.FLOAT and value.const_value is not None
    }
    with opened(_with_ranges(graph), folder) as reference:
        for feed in feeds:
            for name, array in reference.run(feed).items():
                if name.startswith(_PREFIX):
                    key = name.removeprefix(_PREFIX)
                    found[key] = float(np.maximum(found.get(key, 0.0), array))
    for name, largest in found.items():
        if not np.isfinite(largest):
            raise LoweringError(
                f"tensor {name!r}, rule range: found {largest} in the fp32 graph; the checkpoint overflows by itself"
            )
    return found


def find_lifted(ranges: Mapping[str, float], precision: str) -> tuple[str, ...]:
    """Names of the tensors that have to stay fp32; none in bf16, which has the range of fp32."""
    if not precision.startswith("fp16"):
        return ()
    return tuple(name for name, largest in ranges.items() if largest * HEADROOM > FP16_MAX)


def _with_ranges(graph: ir.Model) -> ir.Model:
    """A copy with one more output for every floating tensor that a node makes: the largest magnitude, a scalar."""
    copy = graph.clone()
    for node in tuple(copy.graph):
        for value in node.outputs:
            if value.dtype != ir.DataType.FLOAT or not value.name:
                continue
            magnitude = ir.node("Abs", [value])
            largest = ir.node("ReduceMax", [magnitude.outputs[0]], {"keepdims": 0})
            output = largest.outputs[0]
            output.name = f"{_PREFIX}{value.name}"
            output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
            copy.graph.extend([magnitude, largest])
            copy.graph.outputs.append(output)
    return copy
