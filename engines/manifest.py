"""The manifest of a bundle: what was compiled, from what, for what, and the hash of every file."""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Literal

from .engine import TensorSpec
from .errors import ManifestError
from .schema import decode, encode

FORMAT = "speceyes-bundle"
VERSION = 2
MAX_BYTES = 4 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PATH = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_MAX_PATH = 200
MAX_WIDTH = 1024


@dataclass(frozen=True)
class FileEntry:
    """A file of the bundle: path relative to its folder, size in bytes, SHA-256 in hexadecimal digits."""

    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        check_path(self.path)
        if self.size < 0:
            raise ManifestError(f"size of {self.path}: found {self.size}; it cannot be negative")
        if not _SHA256.fullmatch(self.sha256):
            raise ManifestError(f"sha256 of {self.path}: found {self.sha256[:70]!r}; 64 hexadecimal digits wanted")


@dataclass(frozen=True)
class EngineEntry:
    """One part lowered for one target.

    `parameters`: weights of the part in the model; `weight_bytes`: what the engine stores for them.
    `min_width`: fewest token rows in a step for which every width gives bit-identical results.
    `max_width`: most token rows of such a step, None where there is no limit.
    `seams`: lengths of the cache at which the attention's arithmetic changes: a token just below one and a token at it
    or above have the results of plain decoding only in different steps.
    `cost_ms`: measured milliseconds of a step, by width (decoder) or of one tile (vision).
    `accuracy`: the figures of the check against the fp32 model, with the bounds that were applied.
    """

    path: str
    precision: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: int
    weight_bytes: int
    min_width: int = 1
    max_width: int | None = None
    seams: tuple[int, ...] = ()
    options: dict[str, str] = field(default_factory=dict)
    cost_ms: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_path(self.path)
        for name in ("parameters", "weight_bytes"):
            if getattr(self, name) < 1:
                raise ManifestError(f"{name}: found {getattr(self, name)}; at least 1 is expected")
        if not 1 <= self.min_width <= MAX_WIDTH:
            raise ManifestError(f"min_width: found {self.min_width}; 1 to {MAX_WIDTH} is allowed")
        if self.max_width is not None and not self.min_width <= self.max_width <= MAX_WIDTH:
            raise ManifestError(f"max_width: found {self.max_width}; {self.min_width} to {MAX_WIDTH} is allowed")


@dataclass(frozen=True)
class PackEntry:
    """An accuracy pack and what the target's engines have to reach beside the reference outputs in it.

    `path`: its folder. An element may be off by `atol` + `rtol` times its magnitude; `atol` is by output, under `*` for
    those not named. `cosine`: lowest of a row; `agreement`: least share of rows with the same largest element.
    """

    path: str
    atol: dict[str, float]
    rtol: float
    cosine: float
    agreement: float

    def __post_init__(self) -> None:
        check_path(self.path)
        for name, value in (("rtol", self.rtol), *((f"atol.{output}", value) for output, value in self.atol.items())):
            if value < 0:
                raise ManifestError(f"{name}: found {value}; it cannot be negative")


@dataclass(frozen=True)
class RehearsalEntry:
    """What `speceyes-compile rehearse` found on a device.

    `shapes`: passes that were run, `captured`: those that became a graph. `refused`: captures that failed, by shape,
    with the reason; `differing`: shapes that did not give the same bytes twice.
    """

    device: str
    shapes: int
    captured: int
    refused: dict[str, str] = field(default_factory=dict)
    differing: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorRtEntry:
    """Which TensorRT built a target's engines, and for which GPUs; they run with no other.

    `compute_capabilities`: 89 is 8.9. `driver`: version of CUDA that the driver knew, None where there was no driver.
    `timing_cache_sha256`: of the timing cache that the build began with. `engines_sha256` by part. `deterministic`, by
    part: whether two builds gave the same bytes; a part that was built once is not in it. `lifted`: by part, how many
    tensors and weights do not fit in fp16 and are fp32.
    """

    flavour: str
    version: str
    compute_capabilities: tuple[int, ...]
    engines_sha256: dict[str, str]
    deterministic: dict[str, bool] = field(default_factory=dict)
    lifted: dict[str, int] = field(default_factory=dict)
    driver: str | None = None
    timing_cache_sha256: str | None = None

    def __post_init__(self) -> None:
        hashes = {f"engines_sha256.{part}": value for part, value in self.engines_sha256.items()}
        for name, value in {**hashes, "timing_cache_sha256": self.timing_cache_sha256}.items():
            if value is not None and not _SHA256.fullmatch(value):
                raise ManifestError(f"{name}: found {value[:70]!r}; 64 hexadecimal digits wanted")


@dataclass(frozen=True)
class TargetEntry:
    """The engines built for one target, the versions they were built with, and accuracy packs by part."""

    versions: dict[str, str]
    engines: dict[str, EngineEntry]
    packs: dict[str, PackEntry] = field(default_factory=dict)
    rehearsal: RehearsalEntry | None = None
    tensorrt: TensorRtEntry | None = None


@dataclass(frozen=True)
class ModelEntry:
    """What every part of the runtime has to agree on about the model."""

    family: str
    architecture: str
    hidden: int
    vocabulary: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    rope: Literal["default", "mrope", "learned"]
    eos_token_ids: tuple[int, ...]
    parameters: int
    image_token_id: int | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    hidden_taps: tuple[str, ...] = ("hidden",)

    def __post_init__(self) -> None:
        for name in ("hidden", "vocabulary", "layers", "heads", "kv_heads", "head_dim", "context_length"):
            if getattr(self, name) < 1:
                raise ManifestError(f"{name}: found {getattr(self, name)}; at least 1 is expected")


@dataclass(frozen=True)
class Provenance:
    """Where the model came from: the checkpoint's name, the hash of its files, the versions that exported it."""

    checkpoint: str
    checkpoint_sha256: str
    versions: dict[str, str]


@dataclass(frozen=True)
class PredictorEntry:
    """A predictor and the target that it was trained for.

    `window`: drafted tokens that training unrolled; `slice`: tokens that it can draft; `own_parameters` were trained,
    `shared_parameters` are the target's; `acceptance`: by position, the share of drafts accepted where all before were,
    on held-out requests; `ece`: expected error of its confidence there; `plan`: by output of the work plan, `share` of
    true labels, `precision`, `recall` and `brier` score there; `provenance`: command, hash of the data, versions.
    """

    window: int
    slice: int
    own_parameters: int
    shared_parameters: int
    target_sha256: str
    tokenizer_sha256: str
    acceptance: tuple[float, ...]
    ece: float
    plan: dict[str, dict[str, float]]
    provenance: dict[str, str]

    def __post_init__(self) -> None:
        for name in ("window", "slice", "own_parameters", "shared_parameters"):
            if getattr(self, name) < 1:
                raise ManifestError(f"{name}: found {getattr(self, name)}; at least 1 is expected")
        for name in ("target_sha256", "tokenizer_sha256"):
            if not _SHA256.fullmatch(getattr(self, name)):
                raise ManifestError(f"{name}: found {getattr(self, name)[:70]!r}; 64 hexadecimal digits wanted")


@dataclass(frozen=True)
class Manifest:
    """See docs/bundle.md for the format."""

    model: ModelEntry
    provenance: Provenance
    processing_sha256: str
    tokenizer_sha256: str
    targets: dict[str, TargetEntry]
    files: tuple[FileEntry, ...]
    predictor: PredictorEntry | None = None
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ManifestError(f"format: found {self.format!r}; {FORMAT!r} is expected")
        if self.version != VERSION:
            raise ManifestError(
                f"version: found {self.version}; this release reads version {VERSION}; "
                "build the bundle again with `speceyes-compile build`"
            )
        paths = [entry.path for entry in self.files]
        if len(set(paths)) != len(paths):
            raise ManifestError("files: a path is listed twice")
        for target, build in self.targets.items():
            for part, engine in build.engines.items():
                if engine.path not in paths:
                    raise ManifestError(f"targets.{target}.engines.{part}.path: {engine.path!r} is not in files")
                if part.startswith("predictor") and self.predictor is None:
                    raise ManifestError(
                        f"targets.{target}.engines.{part}: there is no entry `predictor` to describe it"
                    )
            for part, pack in build.packs.items():
                if not any(path.startswith(f"{pack.path}/") for path in paths):
                    raise ManifestError(f"targets.{target}.packs.{part}.path: no file of {pack.path!r} is in files")
        if self.predictor is not None:
            self._check_predictor(self.predictor)

    def _check_predictor(self, predictor: PredictorEntry) -> None:
        """A predictor drafts for the one target whose hidden states and tokens it was trained on."""
        for name, have in (
            ("target_sha256", self.provenance.checkpoint_sha256),
            ("tokenizer_sha256", self.tokenizer_sha256),
        ):
            trained = getattr(predictor, name)
            if trained != have:
                raise ManifestError(
                    f"predictor.{name}: found {trained}, the bundle's is {have}: it was trained for another model; "
                    "train one with `speceyes-compile train-predictor` and build with `--predictor`"
                )


def check_path(path: str) -> None:
    """Raise ManifestError unless `path` is a plain relative path that stays inside the bundle on every system."""
    plain = len(path) <= _MAX_PATH and _PATH.fullmatch(path) and not {".", ".."} & set(path.split("/"))
    if not plain or path == "manifest.json":
        raise ManifestError(
            f"path: found {path[:80]!r}; a path inside the bundle is expected, of letters, digits and `_.-/`, "
            f"at most {_MAX_PATH} characters"
        )


def loads(data: bytes) -> Manifest:
    """Read a manifest from untrusted bytes. Raises ManifestError for anything that is not a valid one."""
    if len(data) > MAX_BYTES:
        raise ManifestError(f"manifest.json: found {len(data)} bytes; at most {MAX_BYTES} are allowed")
    try:
        value = json.loads(data, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
    except ManifestError:
        raise
    except (ValueError, RecursionError) as fault:
        raise ManifestError(f"manifest.json: not valid JSON ({fault})") from None
    return decode(Manifest, value, "manifest", ManifestError)


def dumps(manifest: Manifest) -> bytes:
    """Canonical JSON: sorted keys, two spaces, a final newline."""
    return (json.dumps(encode(manifest), indent=2, sort_keys=True) + "\n").encode()


def _refuse_constant(name: str) -> float:
    raise ManifestError(f"manifest.json: found {name}; numbers are finite")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text[:20])


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ManifestError("manifest.json: a key stands twice in one mapping")
    return found
