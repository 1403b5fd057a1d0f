"""The predictor as ONNX graphs: the draft of a round in one run, and what a request's images leave to attend to."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from ...engines.errors import ExportError
from ...runtime.speculation.predictor import MODULES
from ..canonical import canonicalise
from ..checkpoint import Checkpoint
from ..export import IR_VERSION, OPSET, quiet
from .artifact import Artifact
from .image import ImageAttention, ImageMean
from .loop import WINDOW, add, append, join_loop, pad_turns
from .model import Predictor
from .turns import DocumentOpening, DocumentTurn, Opening, Turn

STEP, MEMORY = "predictor", "predictor_image"
_COLLECTED = ("best", "right", "cell", "modules")
_LONG = (("keys", 3), ("values", 2), ("unseen", 3))


class MemoryGraph(nn.Module):
    """features [features, hidden] -> memory [rows, memory], what the steps of a request attend to."""

    def __init__(self, image: ImageAttention | ImageMean) -> None:
        super().__init__()
        self.image = image

    def forward(self, features: Tensor) -> Tensor:
        return self.image.remember(features)


def compile_predictor(artifact: Artifact, checkpoint: Checkpoint) -> list[tuple[str, ir.Model, int]]:
    """The parts of a predictor: names, graphs, and the weights in each, those shared with the target included.

    Raises PredictorError for weights that do not fit the target.
    """
    predictor = artifact.restore(checkpoint)
    seen = sum(parameter.numel() for parameter in predictor.image.parameters()) if predictor.image is not None else 0
    entry = artifact.entry
    parts = [(STEP, export_step(predictor, checkpoint.eos_token_ids), entry.own_parameters + entry.shared_parameters)]
    if predictor.image is not None:
        parts.append((MEMORY, export_memory(predictor), seen))
    return parts


def export_step(predictor: Predictor, ends: Sequence[int]) -> ir.Model:
    """The canonical graph `predictor`: a draft for each row, see docs/predictor.md. `ends`: tokens that end answers."""
    rows, hidden = 2, predictor.foresee.out_features
    tokens = torch.zeros(rows, dtype=torch.int64)
    endings = torch.tensor(ends, dtype=torch.int64)
    inputs: dict[str, Tensor]
    if predictor.shape.form == "document":
        opening: nn.Module = DocumentOpening(predictor)
        turn: nn.Module = DocumentTurn(predictor, endings)
        carried, outer = ["chance"], ["only"]
        inputs = {"first_token": tokens}
    else:
        opening, turn = Opening(predictor), Turn(predictor, endings)
        carried, outer = (
            ["row", "flow", "gates", "state", "chance"],
            ["keys", "values", "unseen"] if predictor.image else [],
        )
        inputs = {"hidden": torch.zeros(rows, hidden), "token": tokens}
    dynamic: dict[str, dict[int, str]] = {name: {0: "rows"} for name in inputs}
    if predictor.image is not None:
        memory = predictor.image.remember(torch.zeros(5, hidden))
        inputs |= {"memory": memory.expand(rows, -1, -1).clone(), "lengths": tokens.clone()}
        dynamic |= {"memory": {0: "rows", 1: "features"} if len(memory) > 1 else {0: "rows"}, "lengths": {0: "rows"}}
    names = [*carried, *outer]
    graph = _export(opening, inputs, names, dynamic)
    with torch.no_grad():
        flows = dict(zip(names, opening(**inputs), strict=True))
    dimensions = {name: {0: "rows"} for name in names}
    dimensions |= {name: {0: "rows", axis: "features"} for name, axis in _LONG if name in names}
    following = [f"next_{name}" for name in carried]
    body = _export(turn, {"position": torch.tensor(0), **flows}, [*following, *_COLLECTED], dimensions)
    _close(graph, join_loop(graph, body, len(carried), _COLLECTED), predictor)
    return graph


def _close(model: ir.Model, collected: Sequence[ir.Value], predictor: Predictor) -> None:
    """The outputs: drafts of `window` tokens, zeros behind the last turn, and the work plan of the first."""
    graph = model.graph
    row, chance, state = pad_turns(graph, collected[:3], ("rows drafted", "chances", "states"))
    ids = add(graph, "ids", predictor.get_buffer("frozen_ids").numpy())
    last = add(graph, "last axis", np.array([-1]))
    token = append(graph, "Gather", [ids, row], {"axis": 0}, name="next_token")
    confidence = append(graph, "Squeeze", [chance, last], name="confidence")
    foresee = predictor.foresee
    weight = add(graph, "foresee.weight", foresee.weight.detach().numpy().T.copy())
    product = append(graph, "MatMul", [state, weight], name="foreseen")
    hidden = append(
        graph, "Add", [product, add(graph, "foresee.bias", foresee.bias.detach().numpy())], name="next_hidden"
    )
    first = append(graph, "Gather", [collected[3], add(graph, "first", np.array(0))], {"axis": 0}, name="plan")
    plan = append(graph, "Sigmoid", [first], name="mod_probs")
    shapes = {
        token: (WINDOW, "rows"),
        confidence: (WINDOW, "rows"),
        hidden: (WINDOW, "rows", foresee.out_features),
        plan: ("rows", len(MODULES)),
    }
    for value, shape in shapes.items():
        value.type = ir.TensorType(ir.DataType.INT64 if value is token else ir.DataType.FLOAT)
        value.shape = ir.Shape(shape)
        graph.outputs.append(value)


def export_memory(predictor: Predictor) -> ir.Model:
    """The canonical graph `predictor_image`. Only for predictors that see images."""
    assert predictor.image is not None
    features = torch.zeros(5, predictor.foresee.out_features)
    return _export(MemoryGraph(predictor.image), {"features": features}, ["memory"], {"features": {0: "features"}})


def _export(
    module: nn.Module, inputs: dict[str, Tensor], outputs: list[str], dimensions: dict[str, dict[int, str]]
) -> ir.Model:
    shapes = {
        name: {axis: torch.export.Dim(dimension) for axis, dimension in dimensions.get(name, {}).items()}
        for name in inputs
    }
    module.eval()
    try:
        with torch.no_grad(), quiet():
            program = torch.onnx.export(
                module, (), kwargs=inputs, dynamic_shapes=shapes, opset_version=OPSET, optimize=False, verbose=False
            )
    except Exception as error:
        raise ExportError(f"predictor: it could not be traced ({str(error).strip().splitlines()[0]})") from error
    assert program is not None
    graph: ir.Model = program.model
    graph.ir_version = IR_VERSION
    canonicalise(graph, outputs)
    return graph
