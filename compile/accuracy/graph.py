"""A canonical graph in ONNX Runtime, as it was exported: the reference of every engine lowered from it."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from ...engines.engine import Array
from ...engines.onnxruntime import NUMPY_TYPES
from ..export import save_graph

Outputs = dict[str, Array]


class ReferenceGraph:
    """A saved graph that takes and gives arrays; weights stay in the mapped file."""

    def __init__(self, path: Path) -> None:
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        settings.add_session_config_entry("session.disable_prepacking", "1")
        self._session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        self.inputs = {i.name: (NUMPY_TYPES[i.type], tuple(i.shape)) for i in self._session.get_inputs()}
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, feed: Mapping[str, Array]) -> Outputs:
        """All outputs for the inputs that the graph has."""
        known = {name: feed[name] for name in self.inputs}
        return dict(zip(self._outputs, self._session.run(None, known), strict=True))

    def empty_cache(self, capacity: int) -> Outputs:
        """Zeros for every cache input, one row of `capacity` tokens."""
        sizes = {"batch": 1, "capacity": capacity}
        return {
            name: np.zeros([size if isinstance(size, int) else sizes[size] for size in shape], dtype)
            for name, (dtype, shape) in self.inputs.items()
            if name.startswith("cache_")
        }


@contextmanager
def opened(graph: ir.Model, folder: Path) -> Iterator[ReferenceGraph]:
    """The graph loaded from a file in `folder`, which is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".reference-") as scratch:
        yield ReferenceGraph(save_graph(graph, Path(scratch) / "graph.onnx"))
