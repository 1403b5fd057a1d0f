"""The preflight: parameters counted without loading, and refusals that say how much is missing."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from speceyes.compile import plan as plans
from speceyes.compile.checkpoint import open_checkpoint
from speceyes.compile.plan import check_plan, make_plan
from speceyes.compile.recipe import make_recipe
from speceyes.engines.errors import ResourceError

from .checkpoints import checkpoint


def stored(folder: Path, marker: str) -> tuple[int, int]:
    """Numbers in the tensors of a checkpoint whose name contains `marker`, and in the others."""
    inside = outside = 0
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            size = tensors.get_tensor(name).numel()
            inside, outside = (inside + size, outside) if marker in name else (inside, outside + size)
    return inside, outside


def test_counts_every_weight_of_each_part_once() -> None:
    folder = checkpoint("idefics3")
    plan = make_plan(open_checkpoint(folder), make_recipe(changes={"precision": {"decoder": "fp32", "vision": "fp32"}}))
    rest, decoder = stored(folder, "vision_model")
    connector, _ = stored(folder, "connector")
    assert plan.parts["vision"].parameters == rest + connector
    assert plan.parts["decoder"].parameters == decoder - connector
    assert plan.parts["decoder"].engine_bytes == plan.parts["decoder"].fp32_bytes == 4 * (decoder - connector)
    assert plan.memory > 4 * (rest + decoder) and plan.disk > 4 * (rest + decoder)


def test_smaller_weights_need_less() -> None:
    opened = open_checkpoint(checkpoint("idefics3"))
    sizes = [
        make_plan(opened, make_recipe(assignments=[f"precision.decoder={p}"])).parts["decoder"].engine_bytes
        for p in ("fp32", "int8", "int4")
    ]
    assert sizes[0] > 3 * sizes[1] and sizes[1] > 1.5 * sizes[2]


def test_the_peak_counts_the_model_the_engines_twice_and_the_tokenizer() -> None:
    recipe = make_recipe(assignments=["precision.decoder=fp32"])
    plan = make_plan(open_checkpoint(checkpoint("llama")), recipe)
    (decoder,) = plan.parts.values()
    tokenizer = (checkpoint("llama") / "tokenizer.json").stat().st_size
    expected = 1.2 * (600e6 + decoder.fp32_bytes + 2 * decoder.engine_bytes + 15 * tokenizer)
    assert plan.memory == pytest.approx(expected, rel=1e-6)


def test_quantising_a_large_vocabulary_sets_the_peak(tmp_path: Path) -> None:
    """Two and a half copies of the head weigh more than a small decoder's engines."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = 1_000_000
    (folder / "config.json").write_text(json.dumps(config))
    plan = make_plan(open_checkpoint(folder), make_recipe())
    head = 4 * 1_000_000 * config["hidden_size"]
    (decoder,) = plan.parts.values()
    expected = 1.2 * (600e6 + decoder.fp32_bytes + decoder.engine_bytes + 2.5 * head)
    assert plan.memory == pytest.approx(expected, rel=1e-6)


def test_a_text_model_has_one_part() -> None:
    assert list(make_plan(open_checkpoint(checkpoint("llama")), make_recipe()).parts) == ["decoder"]


def test_lack_of_memory_or_disk_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(checkpoint("idefics3")), make_recipe())
    out = tmp_path / "deep" / "folder" / "x.speceyes"
    check_plan(plan, out)
    monkeypatch.setattr(plans, "available_memory", lambda: plan.memory - 1)
    with pytest.raises(ResourceError, match=r"memory: the build needs about 0\.7 GB, 0\.7 GB are available"):
        check_plan(plan, out)
    monkeypatch.setattr(plans, "available_memory", lambda: plan.memory)
    usage = type("Usage", (), {"free": plan.disk - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(ResourceError, match=rf"disk: the build needs about .* free in {tmp_path}; "):
        check_plan(plan, out)


def test_a_control_group_limits_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plans, "_CGROUP", tmp_path)
    free = plans.available_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert plans.available_memory() == pytest.approx(free, rel=0.2)
    (tmp_path / "memory.max").write_text("100000000\n")
    (tmp_path / "memory.current").write_text("60000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 20000000\n")
    assert plans.available_memory() == 60_000_000
