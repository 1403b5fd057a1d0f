"""`rehearse` on the CPU; with graphs: tests/cuda_on_host/cases.py."""

import json
import shutil

import pytest
import speceyes
from speceyes.compile.cli import run
from speceyes.engines.bundle import Bundle
from speceyes.engines.manifest import RehearsalEntry

from .bundles import bundle


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(bundle("llama"), tmp_path / "copy.speceyes")


def test_every_shape_is_run_and_the_manifest_keeps_the_result(copied, capsys):
    assert run(["rehearse", str(copied), "--batch", "2", "--tokens", "64", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    # Up to 2 requests of 2 branches, and widths of 1 to 9 tokens.
    assert (printed["target"], printed["device"], printed["shapes"]) == ("onnxruntime-cpu", "CPU", 4 * 9)
    opened = Bundle.open(copied)
    assert opened.manifest.targets["onnxruntime-cpu"].rehearsal == RehearsalEntry("CPU", 36, 0)
    assert sorted(path.name for path in copied.iterdir() if path.name.startswith(".")) == []
    with speceyes.load(copied) as model, speceyes.load(bundle("llama")) as other:
        prompt = {"prompt": "the quick brown fox", "max_new_tokens": 8}
        assert model.generate(**prompt).token_ids == other.generate(**prompt).token_ids


def test_no_step_is_wider_than_the_engine_may_take(copied):
    with speceyes.load(copied) as model:
        decoder = model.engines.decoder
        decoder.min_width = decoder.max_width = 4
        assert model.rehearse((1,), 64).shapes == ("2×4", "2×1", "1×4", "1×1")


def test_without_speculation_plain_steps_alone_are_run(copied):
    with speceyes.load(copied, settings={"speculation": {"enabled": False}}) as model:
        assert model.rehearse((3,), 64).shapes == ("3×1", "2×1", "1×1")
