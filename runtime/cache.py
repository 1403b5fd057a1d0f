"""K and V of sequences that run together, and the passes over them: lengths that move forward and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engines.engine import Buffer, Step
from ..engines.errors import EngineError
from .prefix import Content

if TYPE_CHECKING:
    from .decoder import Decoder

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]
Hidden = NDArray[np.float32]


class Output(NamedTuple):
    """What a pass gives, valid until the next one: `logits` float32 [..., vocabulary], and the last hidden states that
    they were made from, float32 [..., hidden]."""

    logits: Logits
    hidden: Hidden


@dataclass(frozen=True)
class _Pass:
    """Buffers of one shape of pass and the step bound to them."""

    buffers: Mapping[str, Buffer]
    step: Step
    every: bool
    output: Output


class Cache:
    """K and V of up to `rows` sequences in buffers of fixed capacity; `lengths` says how many tokens are live.

    `held`: of a closed cache, what still stands in its rows. `first_step`: tokens of the step that began each row.
    """

    def __init__(self, decoder: Decoder, rows: int, capacity: int) -> None:
        self._decoder = decoder
        self.lengths = [0] * rows
        self.held: list[Content | None] = [None] * rows
        self.first_step = [0] * rows
        self.capacity = capacity
        engine = decoder.engine
        self._layers: dict[str, Buffer] = {}
        for name, spec in engine.inputs.items():
            if name.startswith("cache_"):
                _, heads, _, channels = spec.shape
                shape = (rows, int(heads), capacity, int(channels))
                self._layers[name.removeprefix("cache_")] = engine.allocate(shape, spec.dtype, resident=True)
        self._passes: dict[tuple[int, int, bool], _Pass] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated for K and V."""
        return sum(buffer.nbytes for buffer in self._layers.values())

    def held_of(self, row: int, content: Content) -> int:
        """How many of the first tokens of `content` stand in a row of this closed cache, and may be used for it.

        The last token of a prompt is never among them: its logits are wanted. Where the arithmetic has seams, tokens
        are those of a fresh prefill only if both began with a step that reached beyond the last seam.
        """
        held = self.held[row]
        if held is None:
            return 0
        shared = min(held.shared(content), len(content) - 1)
        seam = max(self._decoder.seams, default=0)
        return shared if min(shared, self.first_step[row]) >= seam else 0

    def take_over(self, source: Cache, place: int, row: int, start: int, stop: int) -> None:
        """Copy tokens `start` to `stop` of another cache's row `place` into `row`."""
        for name, buffer in self._layers.items():
            buffer.copy_from(source._layers[name], place, row, start, stop)
        self.first_step[row] = source.first_step[place]

    def prefill(self, row: int, ids: Ids, positions: Ids, index: Ids, features: Buffer | None, chunk: int) -> Output:
        """Run a prompt through the decoder in chunks of at most `chunk` tokens.

        `ids` and `index` (feature row, −1 for text) int64 [tokens]; `positions` int64 [tokens] or [3, tokens];
        `features` float32 [features, hidden]. Returns logits [vocabulary] and hidden state [hidden] of the last token.
        """
        passed: _Pass | None = None
        if self.lengths[row] == 0:
            self.first_step[row] = min(len(ids), chunk)
        for start in range(0, len(ids), chunk):
            part = slice(start, start + chunk)
            tokens = ids[part]
            width = self._decoder.pad(len(tokens))
            if passed is None or passed.buffers["input_ids"].shape[1] != width:
                passed = self._bind(slice(row, row + 1), width, every=False, features=features)
            counts = np.array([len(tokens)])
            self._fill(passed, slice(row, row + 1), tokens[None], positions[..., None, part], counts, index[None, part])
            passed.step.run()
            self.lengths[row] += len(tokens)
        if passed is None:
            raise EngineError("prefill: found no tokens; at least one is needed")
        return Output(passed.output.logits[0], passed.output.hidden[0])

    def forward(self, ids: Ids, positions: Ids, counts: Ids, *, every: bool = False) -> Output:
        """One pass over the first rows of the cache, with any positions.

        `ids` int64 [rows, width]; `positions` int64 [rows, width] or [3, rows, width]; `counts` int64 [rows], the real
        tokens of each row, the rest is padding. Appends them to the cache. Gives logits and hidden states after each
        row's last token, [rows, …], or after every token, [rows, width, …], with `every`. A pass narrower than the
        engine's minimal width is padded, since its results would not be bit-identical to those of wider ones.
        """
        rows, width = ids.shape
        passed = self._pass(rows, width, every)
        self._fill(passed, slice(0, rows), ids, positions, counts, None)
        passed.step.run()
        for row in range(rows):
            self.lengths[row] += int(counts[row])
        logits, hidden = passed.output
        return Output(logits[:, :width], hidden[:, :width]) if every else Output(logits[:rows], hidden[:rows])

    def advance(self, tokens: Sequence[Sequence[int]], starts: Sequence[int], *, every: bool = False) -> Output:
        """One pass over the first rows, as `forward`: `tokens` of each row at positions from `starts` on.

        With `every`, the second dimension of the output may be longer than the longest row. This is the path of the
        decode loop: it writes into the bound buffers and builds no arrays.
        """
        rows, width = len(tokens), max(map(len, tokens))
        passed = self._pass(rows, width, every)
        wide = passed.buffers["input_ids"].shape[1]
        self._check_room(max(self.lengths[:rows]), wide)
        ids, positions = passed.buffers["input_ids"].array, passed.buffers["position_ids"].array
        write, last = passed.buffers["write_index"].array, passed.buffers["logit_index"].array
        for row, (own, start) in enumerate(zip(tokens, starts, strict=True)):
            count, length = len(own), self.lengths[row]
            ids[row, :count] = own  # type: ignore[call-overload]
            positions[..., row, :count] = self._decoder.places[start : start + count]
            # Padding repeats the last position: one beyond the context would have no embedding.
            positions[..., row, count:] = start + count - 1
            write[row] = length  # type: ignore[call-overload]
            if "kv_length" in passed.buffers:
                passed.buffers["kv_length"].array[row] = length + count  # type: ignore[call-overload]
            if not every:
                last[row:] = row * wide + count - 1
        passed.step.run()
        for row, own in enumerate(tokens):
            self.lengths[row] += len(own)
        return passed.output

    def widest(self, rows: int) -> int:
        """The most tokens that the next step over the first `rows` may have for the bits to be those of plain steps.

        Plain steps of two tokens, one of them padding, reach a seam with the token before it; a step that begins
        before that token has to end before it, and one of all rows ends for each of them at the same width.
        """
        ends = [seam - 1 for seam in self._decoder.seams]
        left = [end - length for length in self.lengths[:rows] for end in ends if length < end]
        return min([*left, self._decoder.max_width or self.capacity])

    def rewind(self, row: int, length: int) -> None:
        """Forget everything of `row` after its first `length` tokens; copies nothing."""
        if not 0 <= length <= self.lengths[row]:
            raise EngineError(f"rewind: found length {length}; row {row} holds {self.lengths[row]} tokens")
        self.lengths[row] = length

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy tokens `start` to `stop` of row `source` into row `target`, which then has `stop` tokens."""
        if stop > start:
            for buffer in self._layers.values():
                buffer.copy_tokens(source, target, start, stop)
        self.lengths[target] = stop
        if start == 0:
            self.first_step[target] = self.first_step[source]

    def _bind(self, rows: slice, width: int, *, every: bool, features: Buffer | None, repeated: bool = False) -> _Pass:
        decoder, engine = self._decoder, self._decoder.engine
        count = rows.stop - rows.start
        # Like a pass, the head takes another kernel for a row that is alone.
        logits = count * width if every else max(count, decoder.min_width)
        shapes: dict[str, Sequence[int]] = {
            "input_ids": (count, width),
            "feature_index": (count, width),
            "position_ids": (3, count, width) if decoder.model.rope == "mrope" else (count, width),
            "write_index": (count,),
            "kv_length": (count,),
            "logit_index": (logits,),
            "logits": (logits, decoder.model.vocabulary),
            "hidden": (logits, decoder.model.hidden),
        }
        specs = {**engine.inputs, **engine.outputs}
        buffers: dict[str, Buffer] = {
            name: engine.allocate(shape, specs[name].dtype) for name, shape in shapes.items() if name in specs
        }
        if decoder.has_vision:
            buffers["feature_index"].array[:] = -1
            buffers["image_features"] = features or decoder._no_features
        if every:
            buffers["logit_index"].array[:] = np.arange(logits)
        for name, layer in self._layers.items():
            buffers[f"cache_{name}"] = buffers[f"present_{name}"] = layer.row(rows.start, rows.stop)
        made, hidden = (buffers[name].array.view(np.float32) for name in ("logits", "hidden"))
        if every:
            made, hidden = (array.reshape(count, width, -1) for array in (made, hidden))
        return _Pass(buffers, engine.bind(buffers, repeated=repeated), every, Output(made, hidden))

    def _pass(self, rows: int, width: int, every: bool) -> _Pass:
        """The pass over the first rows that holds `width` tokens."""
        key = (rows, self._decoder.pad(width), every)
        if key not in self._passes:
            self._passes[key] = self._bind(slice(0, rows), key[1], every=every, features=None, repeated=True)
        return self._passes[key]

    def _check_room(self, length: int, width: int) -> None:
        if length + width > self.capacity:
            raise EngineError(f"cache: {length} + {width} tokens do not fit in its capacity of {self.capacity}")

    def _fill(self, passed: _Pass, rows: slice, ids: Ids, positions: Ids, counts: Ids, index: Ids | None) -> None:
        buffers = passed.buffers
        width, wide = ids.shape[1], buffers["input_ids"].shape[1]
        lengths = np.array(self.lengths[rows])
        self._check_room(int(lengths.max()), wide)
        buffers["input_ids"].array[:, :width] = ids
        buffers["position_ids"].array[..., :width] = positions
        buffers["position_ids"].array[..., width:] = positions[..., -1:]
        buffers["write_index"].array[:] = lengths
        if "kv_length" in buffers:
            buffers["kv_length"].array[:] = lengths + counts
        if index is not None and "feature_index" in buffers:
            buffers["feature_index"].array[:, :width] = index
        if not passed.every:
            buffers["logit_index"].array[: len(lengths)] = last = np.arange(len(lengths)) * wide + counts - 1
            buffers["logit_index"].array[len(lengths) :] = last[-1]
