"""From a checkpoint or bundle and a folder of requests to a trained predictor: trace, train, calibrate, test, write."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ... import __version__
from ...engines.bundle import MANIFEST, Bundle
from ...engines.errors import PredictorError
from ...engines.manifest import PredictorEntry
from ..build import build, hash_checkpoint
from ..checkpoint import Checkpoint, open_checkpoint
from ..recipe import Recipe, make_recipe
from .artifact import check_artifact_output, round_weights, write_artifact
from .batches import Batches
from .calibrate import (
    Bin,
    acceptance,
    calibrate,
    confidences,
    expected_error,
    hits,
    judge,
    plan_figures,
    reliability,
    tokens_per_pass,
)
from .frozen import Frozen, borrow, choose_slice
from .model import Predictor
from .requests import Request, read_requests
from .settings import Shape, Training
from .traces import SPLITS, TraceInfo, Traces, load_traces, record_traces
from .train import train

Progress = Callable[[str, int, int, str], None]
"""Called with a stage, what is done of it, its whole, and a note such as the loss."""

_FRAMEWORK = ("torch", "transformers")


@dataclass(frozen=True)
class Trained:
    """What a training gave: the manifest entry, held-out figures, the reliability curve, answers by split."""

    path: Path
    entry: PredictorEntry
    tokens_per_pass: float
    curve: tuple[Bin, ...]
    requests: dict[str, int]


def train_predictor(
    source: str | os.PathLike[str],
    data: Path,
    out: Path,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    work: Path | None = None,
    shape: Shape | None = None,
    training: Training | None = None,
    threads: int | None = None,
    command: str = "",
    progress: Progress = lambda stage, done, total, note: None,
) -> Trained:
    """Train a predictor for `source`, a bundle or a checkpoint, on the requests in `data`, and write it to `out`.

    `checkpoint`: the checkpoint that a bundle was built from, whose embedding and head are borrowed. `work`: keeps
    traces and the state of the training (beside `out` by default); calling again with the same arguments goes on.
    Raises ConfigError for bad requests or options, PredictorError for traces or a checkpoint of another target.
    """
    shape, training = shape or Shape(), training or Training()
    work = work or out.with_name(f"{out.name}.work")
    check_artifact_output(out)
    requests = read_requests(data)
    if threads is not None:
        torch.set_num_threads(threads)
    work.mkdir(parents=True, exist_ok=True)
    bundle, opened = _open_target(source, checkpoint, work, progress)
    traces, info = _trace(bundle, requests, work / "traces", training, threads, progress)
    frozen = borrow(opened, choose_slice(traces, shape.slice, bundle.manifest.model.vocabulary))
    batches = Batches(traces, frozen, shape.window, shape.form)
    predictor = _train(batches, frozen, shape, training, info, opened.family.has_vision, work, progress)
    round_weights(predictor)
    calibrate(predictor, batches)
    judged = judge(predictor, batches, "test")
    curve = reliability(confidences(predictor, judged), hits(judged))
    shares = acceptance(judged)
    entry = PredictorEntry(
        window=shape.window,
        slice=len(frozen.ids),
        own_parameters=predictor.parameters_own,
        shared_parameters=frozen.parameters,
        target_sha256=info.target_sha256,
        tokenizer_sha256=info.tokenizer_sha256,
        acceptance=tuple(shares),
        ece=round(expected_error(curve), 4),
        plan=plan_figures(judged),
        provenance={
            "command": command,
            "data_sha256": info.data_sha256,
            "engines_sha256": info.engines_sha256,
            "options": json.dumps({**asdict(shape), **asdict(training)}),
            "speceyes": __version__,
            **{name: importlib.metadata.version(name) for name in _FRAMEWORK},
        },
    )
    write_artifact(predictor, frozen, entry, out)
    counts = {split: len(traces.of(split)) for split in SPLITS}
    return Trained(out, entry, round(tokens_per_pass(shares), 3), tuple(curve), counts)


def _open_target(
    source: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None, work: Path, progress: Progress
) -> tuple[Bundle, Checkpoint]:
    """The bundle that answers and its checkpoint; a checkpoint is compiled first, with the recipe's defaults."""
    if (Path(source) / MANIFEST).is_file():
        bundle = Bundle.open(source)
        if checkpoint is None:
            raise PredictorError(
                f"{source}: a bundle holds no fp32 embedding and head to borrow; name the checkpoint that it was built "
                "from with --checkpoint"
            )
        opened = open_checkpoint(os.fspath(checkpoint))
        found, wanted = hash_checkpoint(opened.folder), bundle.manifest.provenance.checkpoint_sha256
        if found != wanted:
            raise PredictorError(
                f"--checkpoint {checkpoint}: its SHA-256 is {found}, the bundle was built from {wanted}; name the "
                "bundle's own checkpoint, or build the bundle again with `speceyes-compile build`"
            )
        return bundle, opened
    opened = open_checkpoint(os.fspath(source))
    built = work / "target.speceyes"
    if built.exists() and Bundle.open(built).manifest.provenance.checkpoint_sha256 == hash_checkpoint(opened.folder):
        return Bundle.open(built, verify=False), opened
    progress("compiling the target", 0, 1, "")
    recipe: Recipe = make_recipe(changes={"measure": {"enabled": False}})
    bundle = build(source, built, recipe).bundle
    progress("compiling the target", 1, 1, "")
    return bundle, opened


def _trace(
    bundle: Bundle,
    requests: Sequence[Request],
    folder: Path,
    training: Training,
    threads: int | None,
    progress: Progress,
) -> tuple[Traces, TraceInfo]:
    total = len(requests)
    info = record_traces(
        bundle,
        requests,
        folder,
        max_new_tokens=training.max_new_tokens,
        threads=threads,
        advance=lambda done: progress("recording answers", done, total, ""),
    )
    traces = load_traces(folder, info)
    for split in SPLITS:
        if not traces.of(split):
            raise PredictorError(
                f"traces: no answer of the {split} split has two tokens; give more requests with --data"
            )
    return traces, info


def _train(
    batches: Batches,
    frozen: Frozen,
    shape: Shape,
    training: Training,
    info: TraceInfo,
    images: bool,
    work: Path,
    progress: Progress,
) -> Predictor:
    options = json.dumps([asdict(shape), asdict(training), asdict(info)], sort_keys=True)
    save = work / f"training-{hashlib.sha256(options.encode()).hexdigest()[:12]}.pt"

    def report(done: int, total: int, loss: float) -> None:
        progress("training", done, total, f"loss {loss:.3f}")

    return train(batches, frozen, shape, training, save, images=images, identity=asdict(info), report=report)
