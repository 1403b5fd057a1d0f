"""The predictor as ONNX graphs: one step of drafting, and the image vector of a request.

What is constant is multiplied out once: the step reads projected embeddings instead of projecting them, and the head
takes the cell's state, since a foreseen hidden state is a linear map of it.
"""

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...engines.errors import ExportError
from ..canonical import canonicalise
from ..checkpoint import Checkpoint
from ..export import IR_VERSION, OPSET, quiet
from .artifact import Artifact
from .image import ImageAttention, ImageMean
from .model import Predictor

STEP, MEMORY = "predictor", "predictor_image"


class StepGraph(nn.Module):
    """A step of the recurrent form; inputs and outputs as in docs/predictor.md."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.predictor = predictor
        head, bias = predictor.get_buffer("frozen_head"), predictor.get_buffer("frozen_bias")
        with torch.no_grad():
            embedding = predictor.get_buffer("frozen_embedding")
            self.register_buffer("table", predictor.token(F.layer_norm(embedding, embedding.shape[-1:])))
            self.register_buffer("head", head @ predictor.foresee.weight)
            self.register_buffer("bias", head @ predictor.foresee.bias + bias)

    def forward(
        self,
        state: Tensor,
        hidden: Tensor,
        token: Tensor,
        position: Tensor,
        memory: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        predictor = self.predictor
        assert predictor.hidden is not None and predictor.gates is not None
        fused = self._see(self._embed(token) + predictor.hidden(hidden), memory, lengths)
        gate, candidate = predictor.gates(torch.cat([predictor.norm(fused), state], -1)).chunk(2, -1)
        state = state + torch.sigmoid(gate) * (torch.tanh(candidate) - state)
        return (*self._judge(state, position), state)

    def _embed(self, token: Tensor) -> Tensor:
        rows = F.embedding(token, self.predictor.get_buffer("frozen_rows")[:, None])[:, 0]
        return F.embedding(rows, self.get_buffer("table"))

    def _see(self, fused: Tensor, memory: Tensor | None, lengths: Tensor | None) -> Tensor:
        if self.predictor.image is None or memory is None or lengths is None:
            return fused
        seen: Tensor = self.predictor.image(fused, memory, lengths)
        return fused + seen

    def _judge(self, state: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        predictor = self.predictor
        logits = F.linear(state, self.get_buffer("head"), self.get_buffer("bias"))
        if predictor.softcap is not None:
            logits = torch.tanh(logits / predictor.softcap) * predictor.softcap
        judged = predictor.judge(state)
        certain = logits.amax(-1) - logits.logsumexp(-1)
        place = position.clamp(max=predictor.shape.window - 1)
        scale, shift = (predictor.get_buffer(name).index_select(0, place) for name in ("scale", "shift"))
        odds = (judged[:, 0] + predictor.certainty * certain) * scale + shift
        chosen = predictor.get_buffer("frozen_ids").index_select(0, logits.argmax(-1))
        return chosen, torch.sigmoid(odds), predictor.foresee(state), torch.sigmoid(judged[:, 1:])


class DocumentGraph(StepGraph):
    """The same of the document's form, which has no state and reads neither hidden states nor drafted tokens."""

    def forward(  # type: ignore[override]
        self, first_token: Tensor, position: Tensor, memory: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        fused = self.predictor.norm(self._see(self._embed(first_token), memory, lengths))
        return self._judge(torch.tanh(fused), position)


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
    parts = [(STEP, export_step(predictor), entry.own_parameters + entry.shared_parameters)]
    if predictor.image is not None:
        parts.append((MEMORY, export_memory(predictor), seen))
    return parts


def export_step(predictor: Predictor) -> ir.Model:
    """The canonical graph `predictor`: one drafted token for each row."""
    rows, hidden = 2, predictor.foresee.out_features
    tokens = torch.zeros(rows, dtype=torch.int64)
    outputs = ["next_token", "confidence", "next_hidden", "mod_probs"]
    if predictor.shape.form == "document":
        graph: StepGraph = DocumentGraph(predictor)
        inputs = {"first_token": tokens}
    else:
        graph = StepGraph(predictor)
        inputs = {
            "state": torch.zeros(rows, predictor.shape.state),
            "hidden": torch.zeros(rows, hidden),
            "token": tokens,
        }
        outputs.append("next_state")
    dimensions = {name: {0: "rows"} for name in inputs}
    inputs["position"] = torch.zeros(1, dtype=torch.int64)
    if predictor.image is not None:
        memory = predictor.image.remember(torch.zeros(5, hidden))
        inputs |= {"memory": memory.expand(rows, -1, -1).clone(), "lengths": tokens.clone()}
        dimensions |= {"memory": {0: "rows", 1: "features"} if len(memory) > 1 else {0: "rows"}, "lengths": {0: "rows"}}
    return _export(graph, inputs, outputs, dimensions)


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
