"""The learned drafter: a small recurrent network that reads the model's last hidden state and looks at the image.

It is trained by `speceyes-compile train-predictor` and compiled into the bundle as two engines, see docs/predictor.md.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...engines.engine import Array, Buffer, Engine, Step
from ...engines.manifest import ModelEntry
from ..processing.prompt import Prompt
from .drafter import Draft, DraftState, Floats

NAME = "predictor"
MODULES = ("text_encoder", "image_encoder", "cross_attention", "decoder")
"""What the work plan speaks of, in the order of `mod_probs`."""

_BLOCK = 64
_KEPT = 16


class PredictorState:
    """The last committed token, the hidden state that chose it, and what the request's images left to attend to."""

    _serials = itertools.count()

    def __init__(self, hidden: int, first_token: int, memory: Floats) -> None:
        self.serial = next(self._serials)
        self.token: int | None = None
        self.first_token = first_token
        self.memory = memory
        self.hidden: Floats = np.zeros(hidden, np.float32)

    def commit(self, tokens: Sequence[int], hidden: Floats) -> None:
        """See DraftState.commit; the last row of `hidden` is copied."""
        if len(tokens):
            self.token = int(tokens[-1])
            self.hidden[:] = hidden[-1]


class PredictorDrafter:
    """Drafts with the engines `predictor`, and `image` (`predictor_image`) where the model sees images.

    Several threads may use one drafter; they take turns.
    """

    name = NAME

    def __init__(self, predictor: Engine, image: Engine | None, model: ModelEntry) -> None:
        self._engine, self._image, self._model = predictor, image, model
        self._end = frozenset(model.eos_token_ids)
        self._chains: OrderedDict[tuple[int, int], _Chain] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, prompt: Prompt, features: Floats | None) -> PredictorState:
        """Begin a request; the image engine runs once over its features [features, hidden]."""
        memory: Floats = np.zeros((0, 0), np.float32)
        if self._image is not None and features is not None and len(features):
            memory = self._remember(self._image, features)
        return PredictorState(self._model.hidden, int(prompt.token_ids[0]), memory)

    def propose(self, states: Sequence[DraftState], windows: Sequence[int], confidence: float) -> list[Draft]:
        """See Drafter.propose. A draft also ends after a token that ends answers."""
        drafts = [Draft(NAME) for _ in states]
        asked = [i for i, state in enumerate(states) if windows[i] > 0 and _own(state).token is not None]
        if asked:
            with self._lock:
                chain = self._load([_own(states[i]) for i in asked])
                lengths, certain = self._run(chain, [windows[i] for i in asked], confidence)
                for row, i in enumerate(asked):
                    drafts[i] = chain.draft(row, lengths[row], certain[row])
        return drafts

    def plan(self, states: Sequence[DraftState]) -> Floats:
        """The work plan for the next token of each request: float32 [states, 4], probabilities in the order of MODULES.

        States without a committed token get zeros.
        """
        plans = np.zeros((len(states), len(MODULES)), np.float32)
        asked = [i for i, state in enumerate(states) if _own(state).token is not None]
        if asked:
            with self._lock:
                chain = self._load([_own(states[i]) for i in asked])
                chain.run(0)
                plans[asked] = chain.modules.array
        return plans

    def _run(self, chain: "_Chain", windows: Sequence[int], confidence: float) -> tuple[list[int], list[list[float]]]:
        """Draft until every row has ended; the tokens kept of each row and their cumulative confidences."""
        lengths, certain = [0] * len(windows), [[1.0] for _ in windows]
        open_rows = list(range(len(windows)))
        for depth in range(max(windows)):
            tokens, confidences = chain.run(depth)
            for row in list(open_rows):
                cumulative = certain[row][-1] * float(confidences[row])
                if cumulative < confidence:
                    open_rows.remove(row)
                    continue
                certain[row].append(cumulative)
                lengths[row] = depth + 1
                if lengths[row] == windows[row] or int(tokens[row]) in self._end:
                    open_rows.remove(row)
            if not open_rows:
                break
        return lengths, [found[1:] for found in certain]

    def _load(self, states: Sequence[PredictorState]) -> "_Chain":
        """The buffers for so many rows and features, filled."""
        features = max(len(state.memory) for state in states)
        key = (len(states), -(-max(1, features) // _BLOCK) * _BLOCK)
        if key not in self._chains:
            self._chains[key] = _Chain(self._engine, *key)
            if len(self._chains) > _KEPT:
                self._chains.popitem(last=False)
        self._chains.move_to_end(key)
        chain = self._chains[key]
        chain.load(states)
        return chain

    def _remember(self, engine: Engine, features: Floats) -> Floats:
        rows, width = engine.outputs["memory"].shape
        source = engine.allocate(features.shape, np.float32)
        source.array[...] = features
        memory = engine.allocate((rows if isinstance(rows, int) else len(features), width), np.float32)  # type: ignore[arg-type]
        engine.bind({"features": source, "memory": memory}).run()
        return memory.array.view(np.float32)


class _Chain:
    """Buffers of some rows: what each step writes, the next one reads, so nothing is copied between steps."""

    def __init__(self, engine: Engine, rows: int, features: int) -> None:
        self._engine, self._rows = engine, rows
        self._fixed: dict[str, Buffer] = {}
        for name in ("first_token", "memory", "lengths"):
            if name in engine.inputs:
                self._fixed[name] = self._allocate(name, features)
        self.modules = self._allocate("mod_probs")
        self._held: list[int | None] = [None] * rows
        self._flow = [{name: self._allocate(name) for name in ("state", "hidden", "token") if name in engine.inputs}]
        self._said: list[dict[str, Buffer]] = []
        self._steps: list[Step] = []

    def load(self, states: Sequence[PredictorState]) -> None:
        """Put requests into the rows; the memory of one that is there already is not copied again."""
        first = self._flow[0]
        for row, state in enumerate(states):
            if "token" in first:
                first["token"].array[row] = state.token  # type: ignore[assignment]
                first["hidden"].array[row] = state.hidden
            if self._held[row] == state.serial:
                continue
            self._held[row] = state.serial
            if "first_token" in self._fixed:
                self._fixed["first_token"].array[row] = state.first_token  # type: ignore[assignment]
            if "memory" in self._fixed:
                length = len(state.memory)
                memory = self._fixed["memory"].array
                if length:
                    memory[row, :length] = state.memory
                memory[row, length:] = 0
                self._fixed["lengths"].array[row] = length  # type: ignore[assignment]

    def run(self, depth: int) -> tuple[NDArray[np.int64], Floats]:
        """Draft the tokens of `depth`, those before having been drafted: ids [rows] and confidences [rows]."""
        if depth == len(self._steps):
            self._bind()
        self._steps[depth].run()
        said = self._said[depth]
        return said["next_token"].array.view(np.int64), said["confidence"].array.view(np.float32)

    def draft(self, row: int, length: int, confidences: Sequence[float]) -> Draft:
        """The first `length` tokens of a row."""
        said = self._said[:length]
        tokens = tuple(int(step["next_token"].array[row]) for step in said)
        if not tokens:
            return Draft(NAME)
        hidden: Array = np.stack([step["next_hidden"].array[row] for step in said])
        return Draft(NAME, tokens, tuple(confidences), hidden.view(np.float32))

    def _bind(self) -> None:
        """One step more: it reads what the last one wrote."""
        said = {name: self._allocate(name) for name in ("next_token", "confidence", "next_hidden")}
        self._said.append(said)
        flow = self._flow[-1]
        position = self._allocate("position")
        position.array[0] = len(self._steps)  # type: ignore[assignment]
        buffers = {**self._fixed, **flow, **said, "position": position, "mod_probs": self.modules}
        if flow:
            after = {"state": self._allocate("state"), "hidden": said["next_hidden"], "token": said["next_token"]}
            buffers["next_state"] = after["state"]
            self._flow.append(after)
        self._steps.append(self._engine.bind(buffers))

    def _allocate(self, name: str, features: int = 0) -> Buffer:
        spec = self._engine.inputs.get(name) or self._engine.outputs[name]
        sizes = {"rows": self._rows, "features": features}
        shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
        return self._engine.allocate(shape, spec.dtype)


def _own(state: DraftState) -> PredictorState:
    assert isinstance(state, PredictorState)
    return state
