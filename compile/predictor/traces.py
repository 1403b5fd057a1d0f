"""Traces: what the target answered to each request and what it had in mind, recorded once, in shards.

For every token of an answer: the hidden state that chose it, its 20 best logits, whether the images decided it (without
their features another token would have been chosen) and whether it repeats what follows the same token earlier on.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ...engines.bundle import Bundle
from ...engines.engine import Buffer
from ...engines.errors import ConfigError, PredictorError
from ...engines.files import whole_file
from ...engines.target import choose_target
from ...runtime.cache import Output
from ...runtime.decoder import Decoder
from ...runtime.processing.processor import Processor
from ...runtime.processing.prompt import Prompt
from ...runtime.vision import Vision
from .requests import Request, hash_requests

BEST = 20
SHARD = 32
SPLITS = ("training", "calibration", "test")
_META = "traces.json"
_CHUNK = 512

Arrays = dict[str, NDArray[Any]]
Advance = Callable[[int], None]


@dataclass(frozen=True)
class TraceInfo:
    """What a folder of traces belongs to; another target, tokenizer, engine or data set is refused."""

    target_sha256: str
    tokenizer_sha256: str
    engines_sha256: str
    data_sha256: str
    requests: int
    max_new_tokens: int


@dataclass(frozen=True)
class Traces:
    """Recorded answers, one after the other.

    tokens, copied, visual   [tokens] int32, bool, bool
    hidden                   [tokens, hidden] fp16, the state that chose each token
    best, logits             [tokens, 20] int32, fp16, highest first
    features                 [features, hidden] fp16, of each request's images
    ends, feature_ends       [requests] int64, where each request ends in the arrays above
    first, split             [requests] int32, uint8: the prompt's first token; index into SPLITS
    """

    arrays: Arrays

    def __getattr__(self, name: str) -> NDArray[Any]:
        try:
            return self.arrays[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def requests(self) -> int:
        return len(self.arrays["ends"])

    def of(self, split: str) -> list[int]:
        """Numbers of the requests of a split that have an answer to learn from."""
        lengths = np.diff(self.arrays["ends"], prepend=0)
        chosen = (self.arrays["split"] == SPLITS.index(split)) & (lengths > 1)
        return [int(number) for number in np.flatnonzero(chosen)]

    def span(self, number: int) -> slice:
        """The tokens of a request."""
        return _span(self.arrays["ends"], number)

    def feature_span(self, number: int) -> slice:
        """The image features of a request."""
        return _span(self.arrays["feature_ends"], number)


class Tracer:
    """A bundle that answers greedily and plainly, writing down what it had in mind."""

    def __init__(self, bundle: Bundle, threads: int | None) -> None:
        target, _ = choose_target(bundle)
        entries = bundle.manifest.targets[target.name].engines
        engines = {
            part: target.load(bundle.path / entry.path, threads, entry)
            for part, entry in entries.items()
            if part in ("decoder", "vision")
        }
        self.model = bundle.manifest.model
        self.decoder = Decoder(engines["decoder"], self.model, entries["decoder"].min_width)
        self.vision = Vision(engines["vision"], self.model.hidden) if "vision" in engines else None
        self.processor = Processor.load(bundle.path)

    def record(self, request: Request, limit: int) -> Arrays:
        """Answer `request` with at most `limit` tokens and give its arrays (see Traces)."""
        entry = request.entry
        prompt = self.processor.prepare(entry.messages, prompt=entry.prompt, images=request.images)
        limit = min(entry.max_new_tokens or limit, self.model.context_length - len(prompt.token_ids))
        if limit < 1:
            raise ConfigError(
                f"request {request.sha256[:12]}: its prompt of {len(prompt.token_ids)} tokens leaves no room for an "
                f"answer in the context of {self.model.context_length}; shorten it"
            )
        features = self.vision.encode(prompt.tiles).buffer if prompt.tiles and self.vision is not None else None
        tokens, states, rows = self._answer(prompt, features, limit)
        logits = np.stack(rows)
        best = np.argsort(-logits, axis=1, kind="stable")[:, :BEST]
        blind = self._answer_blind(prompt, features, tokens) if features is not None else np.array(tokens)
        found = np.zeros((0, self.model.hidden), np.float32) if features is None else features.array.view(np.float32)
        return {
            "tokens": np.array(tokens, np.int32),
            "hidden": np.stack(states).astype(np.float16),
            "best": best.astype(np.int32),
            "logits": np.take_along_axis(logits, best, axis=1).astype(np.float16),
            "visual": blind != tokens,
            "copied": find_copies(prompt.token_ids[prompt.feature_index < 0], tokens),
            "features": found.astype(np.float16),
            "first": np.array(prompt.token_ids[:1], np.int32),
            "split": np.array([SPLITS.index(request.split)], np.uint8),
        }

    def _answer(self, prompt: Prompt, features: Buffer | None, limit: int) -> tuple[list[int], list[Any], list[Any]]:
        cache = self.decoder.open(1, len(prompt.token_ids) + limit)
        output = cache.prefill(0, prompt.token_ids, prompt.position_ids, prompt.feature_index, features, chunk=_CHUNK)
        tokens: list[int] = []
        states, rows = [], []
        while True:
            logits, hidden = output.logits.reshape(-1), output.hidden.reshape(-1)
            tokens.append(int(logits.argmax()))
            states.append(hidden.copy())
            rows.append(logits.copy())
            if tokens[-1] in self.model.eos_token_ids or len(tokens) == limit:
                return tokens, states, rows
            output = cache.forward(np.array([tokens[-1:]]), _positions(prompt, len(tokens) - 1, 1), np.array([1]))

    def _answer_blind(self, prompt: Prompt, features: Buffer, tokens: Sequence[int]) -> NDArray[Any]:
        """The token chosen at each place when the images' features are zeros and the answer so far is the same."""
        cache = self.decoder.open(1, len(prompt.token_ids) + len(tokens))
        blank = self.decoder.engine.allocate(features.shape, np.float32)
        output: Output = cache.prefill(
            0, prompt.token_ids, prompt.position_ids, prompt.feature_index, blank, chunk=_CHUNK
        )
        chosen = [int(output.logits.argmax())]
        width = len(tokens) - 1
        if width:
            ids = np.array([tokens[:-1]])
            output = cache.forward(ids, _positions(prompt, 0, width), np.array([width]), every=True)
            chosen += output.logits[0].argmax(axis=-1).tolist()
        return np.array(chosen)


def find_copies(prompt: NDArray[np.int64], tokens: Sequence[int]) -> NDArray[np.bool_]:
    """For each token of an answer: whether it is what last followed the token before it, in prompt or answer."""
    follows = dict(zip(prompt[:-1].tolist(), prompt[1:].tolist(), strict=True))
    last, copied = int(prompt[-1]) if len(prompt) else None, []
    for token in tokens:
        copied.append(follows.get(last) == token)
        follows[last], last = token, token
    return np.array(copied, np.bool_)


def record_traces(
    bundle: Bundle,
    requests: Sequence[Request],
    folder: Path,
    *,
    max_new_tokens: int,
    threads: int | None = None,
    advance: Advance = lambda done: None,
) -> TraceInfo:
    """Record the answers to `requests` in `folder`, in shards; shards that are there already are kept.

    `advance` is called with the number of requests done. Raises PredictorError when the folder holds traces of another
    target or of other data.
    """
    info = describe_traces(bundle, requests, max_new_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, info)
    tracer: Tracer | None = None
    for start in range(0, len(requests), SHARD):
        part, path = requests[start : start + SHARD], _shard(folder, start)
        if not path.exists():
            tracer = tracer or Tracer(bundle, threads)
            records = []
            for number, request in enumerate(part, start + 1):
                records.append(tracer.record(request, max_new_tokens))
                advance(number)
            _write(path, _join(records))
        advance(start + len(part))
    return info


def describe_traces(bundle: Bundle, requests: Sequence[Request], max_new_tokens: int) -> TraceInfo:
    """What traces of `requests` by `bundle` belong to."""
    manifest = bundle.manifest
    engines = [
        entry.sha256
        for entry in manifest.files
        if entry.path.startswith("engines/") and Path(entry.path).name.split(".")[0] in ("decoder", "vision")
    ]
    return TraceInfo(
        target_sha256=manifest.provenance.checkpoint_sha256,
        tokenizer_sha256=manifest.tokenizer_sha256,
        engines_sha256=hashlib.sha256("".join(engines).encode()).hexdigest(),
        data_sha256=hash_requests(requests),
        requests=len(requests),
        max_new_tokens=max_new_tokens,
    )


def load_traces(folder: Path, info: TraceInfo) -> Traces:
    """All shards of `folder` in memory. Raises PredictorError for traces of something else than `info` says."""
    _claim(folder, info)
    return Traces(_join([load_file(_shard(folder, start)) for start in range(0, info.requests, SHARD)]))


def _positions(prompt: Prompt, start: int, width: int) -> NDArray[np.int64]:
    """Positions of answer tokens `start` to `start + width`: int64 [1, width], or [3, 1, width] for M-RoPE."""
    positions = prompt.next_position + np.arange(start, start + width, dtype=np.int64)
    return np.broadcast_to(positions, (*prompt.position_ids.shape[:-1], 1, width))


def _join(parts: Sequence[Mapping[str, NDArray[Any]]]) -> Arrays:
    """Arrays of single requests, or of shards, as one; ends are counted on."""
    joined: Arrays = {}
    for name in parts[0]:
        if not name.endswith("ends"):
            joined[name] = np.concatenate([part[name] for part in parts])
    for name, counted in (("ends", "tokens"), ("feature_ends", "features")):
        starts = np.cumsum([0, *(len(part[counted]) for part in parts[:-1])])
        ends = [part.get(name, np.array([len(part[counted])])) for part in parts]
        joined[name] = np.concatenate([end + start for end, start in zip(ends, starts, strict=True)]).astype(np.int64)
    return joined


def _claim(folder: Path, info: TraceInfo) -> None:
    """Write what the folder's traces belong to, or compare it with what stands there."""
    path, wanted = folder / _META, asdict(info)
    if not path.exists():
        with whole_file(path) as partial:
            partial.write_text(json.dumps(wanted, indent=2) + "\n")
    found = json.loads(path.read_text())
    for name, value in wanted.items():
        if found.get(name) != value:
            raise PredictorError(
                f"traces in {folder}: {name} is {str(found.get(name))[:16]}, {str(value)[:16]} is wanted; "
                "choose another folder with --work or delete this one to record anew"
            )


def _shard(folder: Path, start: int) -> Path:
    return folder / f"traces-{start:07}.safetensors"


def _write(path: Path, arrays: Arrays) -> None:
    with whole_file(path) as partial:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, partial)


def _span(ends: NDArray[Any], number: int) -> slice:
    return slice(int(ends[number - 1]) if number else 0, int(ends[number]))
