"""An accuracy pack on disk: inputs and outputs in Polygraphy's JSON, and a script that loads the inputs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from polygraphy.comparator import RunResults
from polygraphy.constants import TYPE_MARKER
from polygraphy.exception import PolygraphyException
from polygraphy.json import Decoder, from_json, save_json

from ...engines.engine import Array
from ...engines.errors import BundleError
from .quiet import quiet

FOLDER = "accuracy"
SESSION = "session"
REFERENCE = "fp32"
INPUTS, OUTPUTS, LOADER = "inputs.json", "outputs.json", "data_loader.py"

_TYPES = ("ndarray", "LazyArray", "IterationResult", "RunResults")
_LEGACY = "__polygraphy_encoded_"

_LOADER = '''"""The inputs of this accuracy pack, for `polygraphy run --data-loader-script`."""

from pathlib import Path

from polygraphy.json import load_json


def load_data():
    yield from load_json(str(Path(__file__).with_name("inputs.json")))
'''


def pack_path(name: str) -> str:
    """Where a build puts the pack of a part, or of the SESSION."""
    return f"{FOLDER}/{name}"


@dataclass(frozen=True)
class Pack:
    """A pack at `path`, relative to the folder of its bundle."""

    bundle: Path
    path: str

    @property
    def folder(self) -> Path:
        return self.bundle / self.path

    def write(self, feeds: Sequence[dict[str, Array]], outputs: Sequence[dict[str, Array]]) -> None:
        """Keep the inputs of each run and the outputs of the reference for them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        results = RunResults()
        results.add(list(outputs), runtime=0.0, runner_name=REFERENCE)
        with quiet():
            save_json([dict(feed) for feed in feeds], str(self.folder / INPUTS))
            results.save(str(self.folder / OUTPUTS))
        (self.folder / LOADER).write_text(_LOADER)

    def feeds(self) -> list[dict[str, Array]]:
        """The inputs of each run. Raises BundleError for a file that holds something else."""
        found = self._read(INPUTS)
        if isinstance(found, list) and found and all(map(_is_feed, found)):
            return found
        raise BundleError(f"{self._name(INPUTS)}: a list of named arrays is expected; build the bundle again")

    def results(self) -> RunResults:
        """The outputs of the reference. Raises BundleError for a file that holds something else."""
        found = self._read(OUTPUTS)
        if isinstance(found, RunResults) and list(found.keys()) == [REFERENCE]:
            return found
        raise BundleError(f"{self._name(OUTPUTS)}: results of {REFERENCE!r} are expected; build the bundle again")

    def _read(self, name: str) -> Any:
        try:
            text = (self.folder / name).read_text(encoding="utf-8")
            with quiet():
                from_json("{}")  # registers the decoders
                return json.loads(text, object_pairs_hook=_decode)
        except FileNotFoundError:
            raise BundleError(f"{self._name(name)}: the file is missing; build the bundle again") from None
        except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError, PolygraphyException) as fault:
            raise BundleError(f"{self._name(name)}: it cannot be read ({fault}); build the bundle again") from None

    def _name(self, file: str) -> str:
        return f"{self.path}/{file}"


def _decode(pairs: list[tuple[str, Any]]) -> Any:
    """Polygraphy's decoding of arrays and results alone: a tensor of torch's would reach torch's reader of pickles."""
    for key, value in pairs:
        if key.startswith(_LEGACY) or (key == TYPE_MARKER and value not in _TYPES):
            raise ValueError(f"{key}: found {str(value)[:40]!r}; allowed: {', '.join(_TYPES)}")
    return Decoder()(pairs)


def _is_feed(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(array, np.ndarray) for array in value.values())
