"""A trained predictor on disk: the folder NAME.predictor with `predictor.safetensors` and `config.json`."""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...engines.errors import PredictorError
from ...engines.manifest import PredictorEntry
from ...engines.schema import decode, encode
from ..checkpoint import Checkpoint
from .frozen import Frozen, borrow
from .model import Predictor
from .settings import Shape

CONFIG, WEIGHTS = "config.json", "predictor.safetensors"


@dataclass(frozen=True)
class Artifact:
    """A predictor as it was read: its shape, whether it sees images, what the manifest will say of it, its weights.

    The weights are the predictor's own, in fp16, and `frozen_ids`, the tokens of the slice.
    """

    path: Path
    shape: Shape
    images: bool
    entry: PredictorEntry
    weights: dict[str, torch.Tensor]

    def check_target(self, checkpoint_sha256: str, checkpoint: str) -> None:
        """Raise PredictorError unless the predictor was trained for the checkpoint of this hash."""
        self._check("target_sha256", checkpoint_sha256, checkpoint)

    def check_tokenizer(self, tokenizer_sha256: str, checkpoint: str) -> None:
        """Raise PredictorError unless the predictor was trained with the tokenizer of this hash."""
        self._check("tokenizer_sha256", tokenizer_sha256, checkpoint)

    def _check(self, name: str, found: str, checkpoint: str) -> None:
        trained = getattr(self.entry, name)
        if trained != found:
            raise PredictorError(
                f"predictor {self.path}: {name} is {trained}, that of {checkpoint} is {found}; train it anew: "
                f"speceyes-compile train-predictor {checkpoint} --data DIR -o {self.path}"
            )

    def restore(self, checkpoint: Checkpoint) -> Predictor:
        """The predictor in torch, with the tables of its target. Raises PredictorError for weights that do not fit."""
        weights = dict(self.weights)
        try:
            ids = weights.pop("frozen_ids")
            frozen = borrow(checkpoint, ids.numpy())
            predictor = Predictor(self.shape, frozen, images=self.images)
            predictor.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
        except (KeyError, IndexError, RuntimeError) as fault:
            reason = " ".join(str(fault).split())[:200]
            raise PredictorError(f"predictor {self.path}: {WEIGHTS} does not fit {CONFIG} ({reason})") from None
        return predictor.eval()


def round_weights(predictor: Predictor) -> None:
    """Round the weights to fp16, in which they are kept, so that what is measured is what will run."""
    with torch.no_grad():
        for parameter in predictor.parameters():
            parameter.copy_(parameter.half().float())


def write_artifact(predictor: Predictor, frozen: Frozen, entry: PredictorEntry, path: Path) -> None:
    """Write the folder `path`, replacing a predictor that stands there; nothing half-written is left.

    Raises PredictorError when `path` is something else than a predictor.
    """
    check_artifact_output(path)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.absolute().parent))
    folder.chmod(0o755)
    try:
        weights = {name: tensor.contiguous() for name, tensor in predictor.state_dict().items()}
        halves = {name for name, _ in predictor.named_parameters()}
        weights = {name: tensor.half() if name in halves else tensor for name, tensor in weights.items()}
        save_file({**weights, "frozen_ids": frozen.ids.clone()}, folder / WEIGHTS)
        (folder / WEIGHTS).chmod(0o644)
        config = {"shape": encode(predictor.shape), "images": predictor.image is not None, "predictor": encode(entry)}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if path.exists():
            shutil.rmtree(path)
        os.replace(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_artifact_output(path: Path) -> None:
    """Raise PredictorError when `path` exists and is not a predictor, which may be replaced."""
    if path.exists() and not (path / WEIGHTS).is_file():
        raise PredictorError(
            f"output {str(path)!r}: it exists and is not a predictor; choose another name or delete it"
        )


def read_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Read a predictor's folder. Raises PredictorError when it is none."""
    folder = Path(path)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
    except (OSError, ValueError, RecursionError, SafetensorError) as fault:
        raise PredictorError(
            f"predictor {str(path)!r}: it cannot be read ({' '.join(str(fault).split())[:200]}); make one with "
            "`speceyes-compile train-predictor`"
        ) from None
    if not isinstance(config, dict) or set(config) != {"shape", "images", "predictor"}:
        raise PredictorError(f"predictor {str(path)!r}: {CONFIG} holds other keys than shape, images and predictor")
    return Artifact(
        path=folder,
        shape=decode(Shape, config["shape"], f"{CONFIG}.shape", PredictorError),
        images=bool(config["images"]),
        entry=decode(PredictorEntry, config["predictor"], f"{CONFIG}.predictor", PredictorError),
        weights=weights,
    )
