"""Runners for Polygraphy: an engine as the runtime loads it, and a whole request on the runtime's decoder."""

import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from ...engines.engine import Array, Buffer, Engine, TensorSpec
from ...engines.errors import EngineError
from ...runtime.cache import Cache, Logits
from ...runtime.decoder import PREFILL_CHUNK, Decoder
from ...runtime.speculation.prefix import agreement
from .caches import SCALE, round_caches, widen_caches

DRAFTS = (2, 0, 3)
"""How many tokens of each round's draft are right; the round after the last one begins anew."""

DRAFTED = 3

_DIMENSION = re.compile(r"(?:(\d+)\*)?(\w+)(?:/(\d+))?")


class EngineRunner(BaseRunner):  # type: ignore[misc]
    """Runs a loaded engine; the cache is read and written in the same buffers, as in the decode loop."""

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(name=name)
        self._engine = engine

    def get_input_metadata_impl(self) -> TensorMetadata:
        metadata = TensorMetadata()
        for spec in self._engine.inputs.values():
            if SCALE not in spec.name:
                metadata.add(spec.name, np.dtype(spec.dtype), _shape(spec))
        return metadata

    def infer_impl(self, feed_dict: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name; a copy of the whole cache for those of the cache. Raises EngineError."""
        engine = self._engine
        feeds = round_caches(feed_dict, engine.inputs)
        sizes: dict[str, int] = {}
        buffers: dict[str, Buffer] = {}
        for name, spec in engine.inputs.items():
            array = feeds[name]
            sizes |= {dim: size for dim, size in zip(spec.shape, array.shape, strict=True) if isinstance(dim, str)}
            if array.shape == () and np.issubdtype(array.dtype, np.integer):
                sizes[name] = int(array)
            buffers[name] = engine.allocate(array.shape, spec.dtype)
            buffers[name].array[...] = array
        for name, spec in engine.outputs.items():
            cache = name.replace("present_", "cache_")
            shared = buffers.get(cache) if cache != name else None
            buffers[name] = shared or engine.allocate([_size(spec, dim, sizes) for dim in spec.shape], spec.dtype)
        step = engine.bind(buffers)
        began = time.perf_counter()
        step.run()
        self.inference_time = time.perf_counter() - began
        return widen_caches({name: buffers[name].array.copy() for name in engine.outputs}, feed_dict)


class SessionRunner(BaseRunner):  # type: ignore[misc]
    """Takes a request to its answer on the runtime's decoder, plainly or with drafts of which some are rejected.

    The answer's tokens are given: logits stay comparable where another engine would have chosen otherwise.
    Inputs: token_ids, feature_index int64 [tokens]; position_ids int64 [tokens] or [3, tokens]; next_position [1];
    answer_ids [steps]; image_features float32 [features, hidden] where the decoder takes them. Outputs: the logits
    [steps, vocabulary] that choose each token of the answer, and the tokens [steps] that they choose.
    """

    def __init__(self, decoder: Decoder, name: str, *, speculate: bool) -> None:
        super().__init__(name=name)
        self._decoder, self._speculate = decoder, speculate

    def get_input_metadata_impl(self) -> TensorMetadata:
        metadata = TensorMetadata()
        positions = (3, None) if self._decoder.model.rope == "mrope" else (None,)
        metadata.add("position_ids", np.dtype(np.int64), positions)
        for name in ("token_ids", "feature_index", "next_position", "answer_ids"):
            metadata.add(name, np.dtype(np.int64), (None,))
        if self._decoder.has_vision:
            metadata.add("image_features", np.dtype(np.float32), (None, self._decoder.model.hidden))
        return metadata

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> dict[str, Array]:
        """See the class. Raises EngineError."""
        began = time.perf_counter()
        ids, answer = feed_dict["token_ids"], feed_dict["answer_ids"].tolist()
        # Never closed, so never used again: what another run left in it could hide a slot that was not written.
        cache = self._decoder.open(1, len(ids) + len(answer) + DRAFTED + 1)
        rows = self._decode(cache, feed_dict, answer)
        self.inference_time = time.perf_counter() - began
        logits = np.stack(rows)
        return {"tokens": logits.argmax(axis=-1), "logits": logits}

    def _decode(self, cache: Cache, feed: Mapping[str, Any], answer: list[int]) -> list[Logits]:
        features: Buffer | None = None
        if "image_features" in feed:
            features = self._decoder.engine.allocate(feed["image_features"].shape, np.float32)
            features.array[...] = feed["image_features"]
        ids = feed["token_ids"]
        first = cache.prefill(0, ids, feed["position_ids"], feed["feature_index"], features, PREFILL_CHUNK)
        rows, position, number = [first.logits.copy()], int(feed["next_position"][0]), 0
        while len(rows) < len(answer):
            done = len(rows)
            draft = self._draft(answer[done:], number, cache.widest(1) - 1) if self._speculate else []
            length = cache.lengths[0]
            output = cache.advance([[answer[done - 1], *draft]], [position + done - 1], every=bool(draft))
            logits = output.logits[0] if draft else output.logits
            taken = min(agreement(draft, answer[done:]) + 1, len(answer) - done)
            rows += [row.copy() for row in logits[:taken]]
            cache.rewind(0, length + taken)
            number += 1
        return rows

    def _draft(self, answer: list[int], number: int, room: int) -> list[int]:
        """The next tokens of the answer, wrong from a place on that changes from round to round."""
        right = DRAFTS[number % len(DRAFTS)]
        tokens = answer[: min(DRAFTED, room)]
        return [
            token if place < right else (token + 1) % self._decoder.model.vocabulary
            for place, token in enumerate(tokens)
        ]


def _shape(spec: TensorSpec) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in spec.shape)


def _size(spec: TensorSpec, dimension: int | str, sizes: Mapping[str, int]) -> int:
    """A dimension in numbers: `rows`, and multiples and parts such as `4*tiles` and `patches/4`."""
    if isinstance(dimension, int):
        return dimension
    found = _DIMENSION.fullmatch(dimension)
    if found is None or found[2] not in sizes:
        raise EngineError(f"{spec.name}: dimension {dimension!r} follows from no input; compile the bundle again")
    return int(found[1] or 1) * sizes[found[2]] // int(found[3] or 1)
