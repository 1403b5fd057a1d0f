"""Real builds with TensorRT for RTX, which needs no GPU for them: every part of every family, and whole bundles."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import speceyes
import torch
from speceyes.compile.accuracy.sample import drawn_feed
from speceyes.compile.checkpoint import open_checkpoint
from speceyes.compile.cli import run
from speceyes.compile.export import save_graph
from speceyes.compile.lowering.tensorrt import PRECISIONS, lower_for_tensorrt
from speceyes.compile.predictor.artifact import read_artifact
from speceyes.compile.predictor.export import compile_predictor
from speceyes.compile.tensorrt.builder import build_engine
from speceyes.compile.tensorrt.options import BuilderOptions, Precisions
from speceyes.compile.tensorrt.parts import TensorRtParts
from speceyes.compile.tensorrt.ranges import FP16_MAX, HEADROOM, audit, find_lifted
from speceyes.compile.tensorrt.torch_route import import_torch_tensorrt, trace_tower
from speceyes.engines import cuda
from speceyes.engines.bundle import Bundle
from speceyes.engines.errors import EngineError, LoweringError
from speceyes.engines.manifest import EngineEntry, ModelEntry
from speceyes.engines.schema import decode
from speceyes.engines.tensorrt_library import import_library

from .checkpoints import MAKERS, checkpoint, exported, session_folder
from .lowered import Session as ReferenceSession
from .tensorrt_graphs import Session
from .test_predictor import trained

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed; `pip install 'speceyes[tensorrt-rtx]'`")

TARGET = "tensorrt-rtx"
NARROW = [family for family in MAKERS if family != "llama_broad"]
Capture = pytest.CaptureFixture[str]


def model_of(family: str) -> ModelEntry:
    value = {**exported(family).checkpoint.describe(), "architecture": "tiny", "parameters": 1}
    return decode(ModelEntry, value, "model")


def build(family: str, part: str, options: BuilderOptions, folder: Path) -> tuple[TensorRtParts, EngineEntry]:
    parts = TensorRtParts(TARGET, options)
    entry = parts.build(part, exported(family).parts[part].clone(), model_of(family), 1000, (), 0, folder)
    return parts, entry


@pytest.mark.parametrize("precision", [p for p in PRECISIONS if not p.startswith("bf16-")])
@pytest.mark.parametrize("family", NARROW)
def test_every_part_builds(family: str, precision: str, tmp_path: Path) -> None:
    options = BuilderOptions(Precisions(precision, precision), build_twice=False)
    for part in exported(family).parts:
        parts, entry = build(family, part, options, tmp_path)
        data = (tmp_path / entry.path).read_bytes()
        assert entry.path == f"engines/{TARGET}/{part}.engine" and entry.precision == precision
        assert hashlib.sha256(data).hexdigest() == parts.entry().engines_sha256[part]
        assert len(data) > entry.weight_bytes / 2
    left = [path for path in tmp_path.rglob("*") if path.name.startswith(".")]
    assert left == []


def test_heads_that_attention_has_no_kernel_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match=r"rule head_dim: found heads of 320 channels in the decoder"):
        TensorRtParts(TARGET, BuilderOptions()).check(320)
    graph = exported("llama_broad").parts["decoder"].clone()
    with pytest.raises(LoweringError, match=r"Attention.*rule head_dim|rule head_dim.*320"):
        TensorRtParts(TARGET, BuilderOptions()).build("decoder", graph, model_of("llama_broad"), 1, (), 0, tmp_path)


def test_the_entry_has_the_names_of_free_dimensions(tmp_path: Path) -> None:
    _, entry = build("idefics3", "decoder", BuilderOptions(Precisions("bf16", "bf16"), build_twice=False), tmp_path)
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in (*entry.inputs, *entry.outputs)}
    assert shapes["input_ids"] == ("int64", ("batch", "width"))
    assert shapes["cache_k.0"] == shapes["present_k.0"] == ("uint16", ("batch", 2, 640, 16))
    assert shapes["logits"] == ("float32", ("rows", 400))
    assert entry.min_width == 4


def test_two_builds_are_compared(tmp_path: Path) -> None:
    parts, entry = build("idefics3", "vision", BuilderOptions(), tmp_path)
    (tmp_path / "again").mkdir()
    again, second = build("idefics3", "vision", BuilderOptions(), tmp_path / "again")
    assert set(parts.entry().deterministic) == {"vision"}
    if parts.entry().deterministic["vision"] and again.entry().deterministic["vision"]:
        assert (tmp_path / entry.path).stat().st_size == (tmp_path / "again" / second.path).stat().st_size


def test_an_input_without_effect_is_an_error(tmp_path: Path) -> None:
    graph = exported("idefics3").parts["vision"].clone()
    graph.graph.inputs.append(ir.val("threshold", ir.DataType.FLOAT, [1]))
    path = save_graph(graph, tmp_path / "vision.onnx")
    library = import_library(TARGET)
    profile = {"pixel_values": ((1, 3, 32, 32),) * 3}
    with pytest.raises(EngineError, match=r"vision.onnx: TensorRT warns: Unused Input: threshold"):
        build_engine(path, tmp_path / "vision.engine", library, BuilderOptions(), profile, (89,))
    assert not (tmp_path / "vision.engine").exists()


def test_what_the_parser_refuses_names_the_node(tmp_path: Path) -> None:
    """The canonical decoder attends in fp32 and leaves the cache's length free."""
    path = save_graph(exported("llama").parts["decoder"].clone(), tmp_path / "decoder.onnx")
    library = import_library(TARGET)
    with pytest.raises(
        EngineError, match=r"decoder.onnx: TensorRT 1\.7\.\S+ cannot read it: .*present_k.*static sequence length"
    ):
        build_engine(path, tmp_path / "decoder.engine", library, BuilderOptions(), {}, (89,))


def test_too_little_workspace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"decoder.onnx: TensorRT \S+ cannot build it: .+"):
        build("idefics3", "decoder", BuilderOptions(workspace=1, max_shapes={"input_ids": "64x4096"}), tmp_path)


def test_the_audit_tells_the_largest_magnitudes(tmp_path: Path) -> None:
    graph = exported("idefics3").parts["vision"]
    tile = np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)
    found = audit(graph, [{"pixel_values": tile}, {"pixel_values": 2 * tile}], tmp_path)
    weight = graph.graph.initializers["patch_embedding.weight"].const_value
    assert weight is not None
    assert found["patch_embedding.weight"] == float(np.abs(weight.numpy()).max())
    once = audit(graph, [{"pixel_values": tile}], tmp_path)
    assert found["patch_embedding/Conv"] > 1.5 * once["patch_embedding/Conv"] > 0
    assert set(once) == set(found) >= {node.outputs[0].name for node in graph.graph if node.op_type == "MatMul"}
    assert find_lifted(found, "fp16") == () == find_lifted({"huge": 1e9}, "bf16-w8a8")
    assert find_lifted({"small": 1.0, "large": FP16_MAX / HEADROOM * 1.01}, "fp16-w8a8") == ("large",)


def test_what_overflows_by_itself_is_refused(tmp_path: Path) -> None:
    graph = exported("idefics3").parts["vision"]
    tile = np.full((1, 3, 32, 32), np.inf, np.float32)
    with pytest.raises(LoweringError, match=r"rule range: found (inf|nan)"):
        audit(graph, [{"pixel_values": tile}], tmp_path)


def test_a_tower_with_wide_states_is_lifted_and_builds(tmp_path: Path) -> None:
    graph = exported("idefics3").parts["vision"].clone()
    weight = graph.graph.initializers["encoder.layers.0.mlp.fc2.weight"]
    assert weight.const_value is not None
    weight.const_value = ir.tensor(weight.const_value.numpy() * 1e5, name=weight.name)
    tile = np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)
    parts = TensorRtParts(TARGET, BuilderOptions(build_twice=False))
    entry = parts.build("vision", graph, model_of("idefics3"), 1, [{"pixel_values": tile}], 0, tmp_path)
    assert parts.entry().lifted["vision"] >= 4
    assert (tmp_path / entry.path).stat().st_size > 0


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_turns_written_out_draft_what_the_loop_drafts(precision: str) -> None:
    """With a threshold of 0 the Loop runs its whole window as well."""
    parts = compile_predictor(read_artifact(trained()), open_checkpoint(checkpoint("idefics3")))
    graph = next(graph for part, graph, _ in parts if part == "predictor")
    feed = drawn_feed({str(value.name): spec_of(value) for value in graph.graph.inputs}, seed=3)
    feed |= {"window": np.array(3), "threshold": np.array(0, np.float32)}
    loop = ReferenceSession(graph).run(None, feed)
    lowered = lower_for_tensorrt(graph.clone(), "predictor", precision, turns=3)
    before, after = ({str(value.name) for value in model.graph.inputs} for model in (graph, lowered))
    assert before - after == {"window", "threshold"}
    found = Session(lowered).run(None, feed)
    np.testing.assert_array_equal(found[0], loop[0])
    for actual, expected in zip(found[1:], loop[1:], strict=True):
        assert actual.shape == expected.shape
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert error < 8 * {"fp16": 2.0**-11, "bf16": 2.0**-8}[precision]


def spec_of(value: ir.Value) -> tuple[str, tuple[int | str, ...]]:
    assert value.dtype is not None and value.shape is not None
    shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return {"FLOAT": "float32"}.get(value.dtype.name, "int64"), shape


@cache
def bundle() -> Path:
    """The tiny Idefics3 with its predictor for both targets, built by the command."""
    out = session_folder() / "two-targets.speceyes"
    arguments = ["build", checkpoint("idefics3"), "-o", out, "--predictor", trained(), "--no-check", "--json"]
    arguments += ["--target", TARGET, "--target", "onnxruntime-cpu", "--compute-capability", "86,89"]
    arguments += ["--precision", "decoder=bf16-w8a16,vision=fp16", "--max-shapes", "input_ids:2x64"]
    arguments += ["--builder-optimization-level", "2", "--profiling-verbosity", "detailed", "--workspace", "512"]
    assert run([str(argument) for argument in (*arguments, "--set", "measure.enabled=false")]) == 0
    return out


def test_a_bundle_of_two_targets(capsys: Capture) -> None:
    manifest = Bundle.open(bundle()).manifest
    build = manifest.targets[TARGET]
    assert {part: entry.precision for part, entry in build.engines.items()} == {
        "decoder": "bf16-w8a16",
        "vision": "fp16",
        "predictor": "fp16",
        "predictor_image": "fp16",
    }
    made = build.tensorrt
    assert made is not None and made.flavour == TARGET and made.version == build.versions["tensorrt_rtx"]
    assert made.compute_capabilities == (86, 89) and made.driver is None
    hashes = {entry.path: entry.sha256 for entry in manifest.files}
    assert {part: hashes[entry.path] for part, entry in build.engines.items()} == made.engines_sha256
    assert set(made.deterministic) == set(build.engines)
    (tokens,) = (spec for spec in build.engines["predictor"].outputs if spec.name == "next_token")
    assert tokens.shape == (3, "rows")
    assert {entry.precision for entry in manifest.targets["onnxruntime-cpu"].engines.values()} == {"int8", "fp32"}
    capsys.readouterr()
    assert run(["inspect", str(bundle())]) == 0
    assert TARGET in capsys.readouterr().out


@pytest.mark.skipif(cuda.refusal() is None, reason="this machine has a CUDA device")
def test_without_a_device_the_next_target_is_taken() -> None:
    with speceyes.load(bundle(), threads=1) as model:
        assert model.target == "onnxruntime-cpu"
        reason = model.passed_over[TARGET]
        assert reason.startswith("CUDA: ") and "\n" not in reason
        assert model.generate("what is item 4?", max_new_tokens=4).token_ids
    with pytest.raises(EngineError, match=r"no engine of the bundle runs here: tensorrt-rtx: CUDA: "):
        speceyes.load(bundle(), target=TARGET)


def refused(capsys: Capture, *arguments: str) -> str:
    capsys.readouterr()
    out = session_folder() / "refused.speceyes"
    assert run(["build", str(checkpoint("llama")), "-o", str(out), *arguments]) == 1
    assert not out.exists()
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_what_cannot_be_built_is_said_in_one_line(capsys: Capture) -> None:
    rtx = ("--target", TARGET)
    assert "rule capability: found compute capability 90; tensorrt-rtx" in refused(
        capsys, *rtx, "--compute-capability", "90"
    )
    assert "rule precision: found bf16 for compute capability 75; it needs 80" in refused(
        capsys, *rtx, "--compute-capability", "75", "--precision", "bf16"
    )
    assert "compute_capability: found 'all'" in refused(capsys, *rtx, "--compute-capability", "all")
    assert "shapes of input_ids: found '1xx'" in refused(capsys, *rtx, "--min-shapes", "input_ids:1xx")
    assert "recipe.tensorrt.precision.decoder: found 'fp16-w4'" in refused(
        capsys, *rtx, "--precision", "decoder=fp16-w4"
    )
    assert "target: found ['tensorrt-rtx', 'tensorrt-rtx']" in refused(capsys, *rtx, *rtx)


@pytest.mark.skipif(cuda.refusal() is None, reason="this machine has a CUDA device")
def test_full_tensorrt_without_package_or_device_is_said_in_one_line(capsys: Capture) -> None:
    assert "target tensorrt: " in (line := refused(capsys, "--target", "tensorrt")) or "CUDA: " in line


def test_shapes_out_of_order_are_refused(capsys: Capture) -> None:
    capsys.readouterr()
    out = session_folder() / "order.speceyes"
    arguments = [
        "build",
        str(checkpoint("llama")),
        "-o",
        str(out),
        "--target",
        TARGET,
        "--opt-shapes",
        "input_ids:1x999",
    ]
    assert run(arguments) == 1
    assert "shapes of input_ids: found 1x1, 1x999, 4x128 as least, best and most" in capsys.readouterr().err


def test_a_dry_run_tells_what_a_target_needs(capsys: Capture) -> None:
    capsys.readouterr()
    arguments = ["build", str(checkpoint("llama")), "-o", "unused.speceyes", "--target", TARGET, "--dry-run", "--json"]
    assert run(arguments) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    needed = plan["tensorrt"][TARGET]
    assert plan["parts"]["decoder"]["precision"] == "fp16"
    assert 0 < needed["seconds"] < 10 and needed["memory"] > needed["disk"] > 10_000_000
    assert not Path("unused.speceyes").exists()


@pytest.mark.parametrize(
    ("target", "message"), [(TARGET, "builds for tensorrt alone"), ("tensorrt", "cannot be imported")]
)
def test_torch_tensorrt_where_it_cannot_be_used(target: str, message: str) -> None:
    if target == "tensorrt" and importlib.util.find_spec("torch_tensorrt") is not None:
        pytest.skip("torch-tensorrt is installed")
    with pytest.raises(EngineError, match=rf"builder torch-tensorrt: .*{message}") as fault:
        import_torch_tensorrt(target)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("family", ["idefics3", "llava", "llava_siglip"])
def test_towers_are_traced_for_torch_tensorrt(family: str) -> None:
    part = exported(family).checkpoint.family.vision_part(exported(family).checkpoint.model)
    assert part is not None
    program = trace_tower(part, "bf16")
    assert not [node for node in program.graph.nodes if "onnx" in str(node.target)]
    pixels = torch.randn(1, *part.inputs["pixel_values"].shape[1:], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = program.module()(pixels), part.module(pixels)
    assert found.dtype == expected.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 8 * 2.0**-8


def test_other_towers_are_refused_by_torch_tensorrt() -> None:
    part = exported("qwen2_vl").checkpoint.family.vision_part(exported("qwen2_vl").checkpoint.model)
    assert part is not None
    with pytest.raises(LoweringError, match=r"rule torch-tensorrt: the vision part takes pixel_values, rotary"):
        trace_tower(part, "fp16")
    with pytest.raises(LoweringError, match=r"rule torch-tensorrt: found precision fp16-w8a8"):
        trace_tower(part, "fp16-w8a8")
