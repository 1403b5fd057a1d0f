"""Damage to a bundle that its hashes do not show."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import external_data_helper, numpy_helper


def reseal(folder: Path) -> None:
    """Write the sizes and hashes of the files as they are now into the manifest."""
    document = json.loads((folder / "manifest.json").read_text())
    for entry in document["files"]:
        data = (folder / entry["path"]).read_bytes()
        entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(document))


def change_graph(folder: Path, part: str, change: Callable[[onnx.ModelProto], None]) -> None:
    """Change the engine of a part and seal the bundle again."""
    path = folder / "engines" / "onnxruntime-cpu" / f"{part}.onnx"
    model = onnx.load(path)
    change(model)
    data = f"{path.name}.data"
    (path.parent / data).unlink()
    external_data_helper.convert_model_to_external_data(model, location=data, size_threshold=1024)
    onnx.save(model, path)
    reseal(folder)


def change_weight(model: onnx.ModelProto, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change one weight matrix in the middle of a graph: the second of those that MatMuls read."""
    read = {node.input[1] for node in model.graph.node if node.op_type.startswith("MatMul") and len(node.input) > 1}
    weights = [tensor for tensor in model.graph.initializer if tensor.name in read and len(tensor.dims) == 2]
    tensor = weights[1]
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), tensor.name))


def shift_cache_write(model: onnx.ModelProto) -> None:
    """Let every step write its K and V one slot too far."""
    one = onnx.helper.make_tensor("one_too_far", onnx.TensorProto.INT64, [1], [1])
    model.graph.initializer.append(one)
    shifted = onnx.helper.make_node("Add", ["write_index", "one_too_far"], ["write_index_shifted"])
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name == "write_index":
                node.input[place] = "write_index_shifted"
    model.graph.node.insert(0, shifted)
