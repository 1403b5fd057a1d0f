"""Bundles that several test files share; each is built once."""

from pathlib import Path
from typing import Any

import pytest
import speceyes
from speceyes.engines.bundle import Bundle

from .checkpoints import checkpoint

FAST: dict[str, Any] = {
    "check": {"steps": 8},
    "measure": {"widths": [1, 2, 4], "past": 8, "repeats": 2, "tile_repeats": 1},
}


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny idefics3 checkpoint compiled in fp32; treat the folder as read-only."""
    out = tmp_path_factory.mktemp("bundles") / "idefics3.speceyes"
    precision = {"decoder": "fp32", "vision": "fp32"}
    made = speceyes.compile(checkpoint("idefics3"), out, precision=precision, **FAST)
    assert isinstance(made.bundle, Bundle)
    return out
