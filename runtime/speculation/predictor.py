"""The learned drafter: a small recurrent network that reads the model's last hidden state and looks at the image.

It is trained by `speceyes-compile train-predictor` and compiled into the bundle as two engines, see docs/predictor.md.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...engines.engine import Buffer, Engine, Step
from ..memory.pool import Pool
from ..processing.prompt import Prompt
from .drafter import Draft, DraftState, Floats

NAME = "predictor"
MODULES = ("text_encoder", "image_encoder", "cross_attention", "decoder")
"""What the work plan speaks of, in the order of `mod_probs`."""

_NONE: Floats = np.zeros((0, 0), np.float32)
_BLOCK = 64
_KEPT = 16
_LEAST = 1e-9
"""Below it a confidence is none: the engine gives 0 behind the end of an answer."""


class PredictorState:
    """The last committed token, the hidden state that chose it, and what the request's images left to attend to."""

    _serials = itertools.count()

    def __init__(self, hidden: int, first_token: int, memory: Floats, free: Callable[[], None] | None = None) -> None:
        self.serial = next(self._serials)
        self.token: int | None = None
        self.first_token = first_token
        self.memory = memory
        self.hidden: Floats = np.zeros(hidden, np.float32)
        self._free = free

    def commit(self, tokens: Sequence[int], hidden: Floats) -> None:
        """See DraftState.commit; the last row of `hidden` is copied."""
        if len(tokens):
            self.token = int(tokens[-1])
            self.hidden[:] = hidden[-1]

    def close(self) -> None:
        """Give the memory back."""
        self.memory = _NONE
        if self._free is not None:
            self._free()
            self._free = None


class PredictorDrafter:
    """Drafts with the engines `predictor`, and `image` (`predictor_image`) where the model sees images.

    Several threads may use one drafter; they take turns.
    """

    name = NAME

    def __init__(self, predictor: Engine, image: Engine | None, hidden: int, pool: Pool | None = None) -> None:
        """`hidden`: width of the model's hidden states. `pool`: where what images leave to attend to is held."""
        self._engine, self._image, self._hidden, self._pool = predictor, image, hidden, pool
        self._benches: OrderedDict[tuple[int, int], _Bench] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, prompt: Prompt, features: Floats | None) -> PredictorState | None:
        """Begin a request; the image engine runs once over its features [features, hidden]."""
        first = int(prompt.token_ids[0])
        if self._image is None or features is None or not len(features):
            return PredictorState(self._hidden, first, _NONE)
        memory = self._remember(self._image, features)
        if self._pool is None:
            return PredictorState(self._hidden, first, memory)
        slab = self._pool.take(memory.nbytes, NAME)
        if slab is None:
            return None
        held = slab.array(memory.shape, np.float32).view(np.float32)
        held[...] = memory
        return PredictorState(self._hidden, first, held, partial(self._pool.give, slab))

    def propose(self, states: Sequence[DraftState], windows: Sequence[int], confidence: float) -> list[Draft]:
        """See Drafter.propose. A draft also ends after a token that ends answers."""
        drafts = [Draft(NAME) for _ in states]
        asked = [i for i, state in enumerate(states) if windows[i] > 0 and _own(state).token is not None]
        if asked:
            with self._lock:
                bench = self._load([_own(states[i]) for i in asked])
                found = bench.draft(max(windows[i] for i in asked), confidence)
                for row, i in enumerate(asked):
                    drafts[i] = found.take(row, windows[i], confidence)
        return drafts

    def plan(self, states: Sequence[DraftState]) -> Floats:
        """The work plan for the next token of each request: float32 [states, 4], probabilities in the order of MODULES.

        States without a committed token get zeros.
        """
        plans = np.zeros((len(states), len(MODULES)), np.float32)
        asked = [i for i, state in enumerate(states) if _own(state).token is not None]
        if asked:
            with self._lock:
                plans[asked] = self._load([_own(states[i]) for i in asked]).draft(1, 1.0).plan
        return plans

    def _load(self, states: Sequence[PredictorState]) -> "_Bench":
        """The buffers for so many rows and features, filled."""
        features = max(len(state.memory) for state in states)
        key = (len(states), -(-max(1, features) // _BLOCK) * _BLOCK)
        if key not in self._benches:
            self._benches[key] = _Bench(self._engine, *key)
            if len(self._benches) > _KEPT:
                self._benches.popitem(last=False)
        self._benches.move_to_end(key)
        bench = self._benches[key]
        bench.load(states)
        return bench

    def _remember(self, engine: Engine, features: Floats) -> Floats:
        rows, width = engine.outputs["memory"].shape
        source = engine.allocate(features.shape, np.float32)
        source.array[...] = features
        memory = engine.allocate((rows if isinstance(rows, int) else len(features), width), np.float32)  # type: ignore[arg-type]
        engine.bind({"features": source, "memory": memory}).run()
        return memory.array.view(np.float32)


@dataclass(frozen=True)
class _Drafted:
    """Outputs of a run: tokens and confidences [window, rows], hidden states [window, rows, hidden], plan [rows, 4].

    A confidence is the chance that the token and all before it are right; it is 0 where nothing was drafted.
    """

    tokens: NDArray[np.int64]
    confidences: Floats
    hidden: Floats
    plan: Floats

    def take(self, row: int, window: int, confidence: float) -> Draft:
        """The draft of a row: at most `window` tokens, none whose confidence is below `confidence`."""
        chances = self.confidences[:window, row].tolist()
        least = max(confidence, _LEAST)
        length = next((i for i, chance in enumerate(chances) if chance < least), len(chances))
        if not length:
            return Draft(NAME)
        tokens = tuple(self.tokens[:length, row].tolist())
        return Draft(NAME, tokens, tuple(chances[:length]), self.hidden[:length, row].copy())


class _Bench:
    """Buffers of some rows, bound once for each window."""

    def __init__(self, engine: Engine, rows: int, features: int) -> None:
        self._engine, self._sizes = engine, {"rows": rows, "features": features}
        self._inputs = {name: self._allocate(name) for name in engine.inputs}
        self._held: list[int | None] = [None] * rows
        self._runs: dict[int, tuple[Step, _Drafted]] = {}

    def load(self, states: Sequence[PredictorState]) -> None:
        """Put requests into the rows; the memory of one that is there already is not copied again."""
        arrays = {name: buffer.array for name, buffer in self._inputs.items()}
        for row, state in enumerate(states):
            if "token" in arrays:
                arrays["token"][row] = state.token  # type: ignore[assignment]
                arrays["hidden"][row] = state.hidden
            if self._held[row] == state.serial:
                continue
            self._held[row] = state.serial
            if "first_token" in arrays:
                arrays["first_token"][row] = state.first_token  # type: ignore[assignment]
            if "memory" in arrays:
                length = len(state.memory)
                if length:
                    arrays["memory"][row, :length] = state.memory
                arrays["memory"][row, length:] = 0
                arrays["lengths"][row] = length  # type: ignore[assignment]

    def draft(self, window: int, confidence: float) -> _Drafted:
        """Draft for all rows until `window` tokens are drafted or no row is confident; the next run overwrites it."""
        if window not in self._runs:
            self._runs[window] = self._bind(window)
        step, drafted = self._runs[window]
        # An engine whose draft has a fixed length takes neither.
        for name, value in (("window", window), ("threshold", max(confidence, _LEAST))):
            if name in self._inputs:
                self._inputs[name].array[...] = value
        step.run()
        return drafted

    def _bind(self, window: int) -> tuple[Step, _Drafted]:
        outputs = {name: self._allocate(name, window) for name in self._engine.outputs}
        arrays = (outputs[name].array for name in ("next_token", "confidence", "next_hidden", "mod_probs"))
        return self._engine.bind({**self._inputs, **outputs}, repeated=True), _Drafted(*arrays)  # type: ignore[arg-type]

    def _allocate(self, name: str, window: int = 0) -> Buffer:
        spec = self._engine.inputs.get(name) or self._engine.outputs[name]
        sizes = {**self._sizes, "window": window}
        return self._engine.allocate([d if isinstance(d, int) else sizes[d] for d in spec.shape], spec.dtype)


def _own(state: DraftState) -> PredictorState:
    assert isinstance(state, PredictorState)
    return state
