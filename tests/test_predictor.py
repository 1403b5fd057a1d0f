"""From requests to a bundle with a predictor, and everything that is refused on the way."""

import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import speceyes
import torch
from safetensors.numpy import load_file
from speceyes.compile.checkpoint import open_checkpoint
from speceyes.compile.cli import run
from speceyes.compile.predictor.artifact import check_artifact_output, read_artifact
from speceyes.compile.predictor.requests import hash_requests, read_requests
from speceyes.compile.predictor.traces import BEST, Tracer, describe_traces, find_copies, load_traces, record_traces
from speceyes.engines import manifest as manifests
from speceyes.engines.bundle import Bundle
from speceyes.engines.errors import ConfigError, ManifestError, PredictorError
from speceyes.engines.target import choose_target
from speceyes.runtime.processing.processor import Processor
from speceyes.runtime.speculation.predictor import PredictorDrafter

from .bundles import ask, bundle, expected_tokens, model, picture
from .checkpoints import checkpoint, session_folder

Capture = pytest.CaptureFixture[str]
LIMIT = 8
OPTIONS = ("--epochs", "2", "--state", "32", "--window", "3", "--threads", "1", "--max-new-tokens", str(LIMIT))


@cache
def data() -> Path:
    """A folder of 36 requests, a third of them about a picture."""
    folder = session_folder() / "requests"
    folder.mkdir()
    lines = []
    for number in range(36):
        images = []
        if number % 3 == 0:
            images = [f"{number}.png"]
            picture("square", number).save(folder / images[0])
        lines.append({"messages": f"what is item {number}?", "images": images})
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@cache
def trained() -> Path:
    """A predictor of the tiny Idefics3, trained by the command."""
    out = session_folder() / "tiny.predictor"
    arguments = ["train-predictor", bundle("idefics3"), "--checkpoint", checkpoint("idefics3"), "--data", data()]
    assert run([str(argument) for argument in (*arguments, "-o", out, *OPTIONS, "--json")]) == 0
    return out


@cache
def built() -> Path:
    """The same checkpoint compiled with it."""
    out = session_folder() / "with-predictor.speceyes"
    fast = {"widths": [2], "past": 8, "repeats": 1, "tile_repeats": 1}
    precision = {"decoder": "fp32", "vision": "fp32"}
    speceyes.compile(
        checkpoint("idefics3"),
        out,
        precision=precision,
        predictor=str(trained()),
        check={"enabled": False},
        measure=fast,
    )
    return out


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the predictor that a test may break."""
    return Path(shutil.copytree(trained(), tmp_path / "copy.predictor"))


def rewrite(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["predictor"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def test_traces_are_the_models_own_answers(tmp_path: Path) -> None:
    requests = read_requests(data())
    tracer = Tracer(Bundle.open(bundle("idefics3")), threads=1)
    for request in (requests[0], requests[1]):
        found = tracer.record(request, LIMIT)
        images = [picture("square", 0)] if request.images else []
        tokens = expected_tokens("idefics3", request.entry.messages, images, LIMIT)
        assert found["tokens"].tolist() == tokens
        assert found["best"].shape == found["logits"].shape == (len(tokens), BEST)
        assert found["best"][:, 0].tolist() == tokens
        assert (np.diff(found["logits"].astype(np.float32), axis=1) <= 0).all()
        assert found["hidden"].shape == (len(tokens), 64) and found["hidden"].dtype == np.float16
        assert len(found["features"]) == (
            4 * len(tracer.processor.prepare(request.entry.messages, images=images).tiles)
        )
        assert found["visual"].any() == bool(images)


def test_hidden_states_choose_the_tokens() -> None:
    """The head of the checkpoint turns a trace's hidden states into its best tokens."""
    requests = read_requests(data())
    found = Tracer(Bundle.open(bundle("idefics3")), threads=1).record(requests[2], LIMIT)
    head = open_checkpoint(checkpoint("idefics3")).model.get_output_embeddings().weight.detach()
    logits = torch.from_numpy(found["hidden"]).float() @ head.T
    assert logits.argmax(-1).tolist() == found["tokens"].tolist()
    best = logits.gather(1, torch.from_numpy(found["best"]).long()).numpy()
    np.testing.assert_allclose(best, found["logits"].astype(np.float32), atol=0.05)


def test_copies_follow_the_last_occurrence() -> None:
    assert find_copies(np.array([1, 2, 3, 1]), [2, 3, 1, 5, 1, 5]).tolist() == [True, True, True, False, False, True]
    assert find_copies(np.array([], np.int64), [4, 4]).tolist() == [False, False]


def test_recording_goes_on_and_belongs_to_one_target(tmp_path: Path) -> None:
    opened, requests = Bundle.open(bundle("idefics3")), read_requests(data())
    info = record_traces(opened, requests, tmp_path, max_new_tokens=LIMIT, threads=1)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 2 and not list(tmp_path.glob(".*"))
    before = [load_file(shard) for shard in shards]
    shards[1].unlink()
    done: list[int] = []
    record_traces(opened, requests, tmp_path, max_new_tokens=LIMIT, threads=1, advance=done.append)
    assert done[0] == 32 and done[-1] == 36
    for arrays, shard in zip(before, shards, strict=True):
        again = load_file(shard)
        assert arrays.keys() == again.keys() and all(np.array_equal(arrays[name], again[name]) for name in arrays)
    traces = load_traces(tmp_path, info)
    assert traces.requests == 36 and len(traces.tokens) == traces.ends[-1]
    assert sum(len(traces.of(split)) for split in ("training", "calibration", "test")) <= 36
    with pytest.raises(PredictorError, match="max_new_tokens is 8, 9 is wanted"):
        record_traces(opened, requests, tmp_path, max_new_tokens=9)
    with pytest.raises(PredictorError, match="data_sha256 is "):
        load_traces(tmp_path, describe_traces(opened, requests[1:], LIMIT))


def test_requests_of_one_picture_fall_on_one_side(tmp_path: Path) -> None:
    lines = []
    for number in range(40):
        picture("square", number).save(tmp_path / f"{number}.png")
        lines += [{"messages": text, "images": [f"{number}.png"]} for text in ("what?", "where?")]
    (tmp_path / "requests.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    requests = read_requests(tmp_path)
    assert all(a.split == b.split and a.sha256 != b.sha256 for a, b in zip(requests[::2], requests[1::2], strict=True))
    assert {request.split for request in requests} == {"training", "calibration", "test"}
    assert hash_requests(requests) != hash_requests(requests[::-1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not valid JSON"),
        ("[]", "line 1: found []; a mapping is expected"),
        ("{}", "line 1: messages, prompt: exactly one of them is needed"),
        ('{"messages": "a", "prompt": "b"}', "exactly one of them"),
        ('{"mesages": "a"}', "line 1.mesages: unknown key; did you mean 'messages'?"),
        ('{"messages": "a", "images": ["no.png"]}', "line 1: image 'no.png' is not in the folder"),
        ('{"messages": "a", "images": ["../requests.jsonl"]}', "is not in the folder"),
        ('{"messages": "a", "max_new_tokens": 0}', "max_new_tokens: found 0; allowed: 1 or more"),
        ('{"messages": "a"}', "falls to the"),
    ],
)
def test_bad_requests_are_named(tmp_path: Path, line: str, message: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "requests.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_requests(folder)
    assert message in str(caught.value)


def test_the_command_writes_a_predictor(capsys: Capture) -> None:
    artifact = read_artifact(trained())
    entry, opened = artifact.entry, Bundle.open(bundle("idefics3")).manifest
    assert entry.target_sha256 == opened.provenance.checkpoint_sha256
    assert entry.tokenizer_sha256 == opened.tokenizer_sha256
    assert (entry.window, artifact.shape.state, artifact.images) == (3, 32, True)
    assert len(entry.acceptance) == 3 and all(0 <= share <= 1 for share in entry.acceptance)
    assert entry.provenance["data_sha256"] == hash_requests(read_requests(data()))
    assert json.loads(entry.provenance["options"])["epochs"] == 2
    own = sum(tensor.numel() for name, tensor in artifact.weights.items() if tensor.dtype == torch.float16)
    assert own == entry.own_parameters <= 5_000_000
    assert not [path.name for path in trained().parent.iterdir() if path.name.startswith(".tiny")]


def test_the_command_prints_what_it_found(capsys: Capture) -> None:
    trained()
    arguments = ["train-predictor", bundle("idefics3"), "--checkpoint", checkpoint("idefics3"), "--data", data()]
    capsys.readouterr()
    assert run([str(argument) for argument in (*arguments, "-o", trained(), *OPTIONS)]) == 0
    out, error = capsys.readouterr()
    assert "acceptance by position" in out and "expected calibration error" in out and "work plan" in out
    assert "shared with the target" in out and "Traceback" not in error


def test_the_bundle_holds_it_and_drafts(tmp_path: Path) -> None:
    opened = Bundle.open(built())
    entry = opened.manifest.predictor
    assert entry == read_artifact(trained()).entry
    target, _ = choose_target(opened)
    parts = opened.manifest.targets[target.name].engines
    assert set(parts) == {"decoder", "vision", "predictor", "predictor_image"}
    assert set(parts["predictor"].cost_ms) == {"1", "2", "4"}
    engines = {
        part: target.load(opened.path / parts[part].path, 1, parts[part]) for part in ("predictor", "predictor_image")
    }
    drafter = PredictorDrafter(engines["predictor"], engines["predictor_image"], opened.manifest.model.hidden)
    prompt = Processor.load(opened.path).prepare(ask("what is item 3?", 1), images=[picture("square", 3)])
    state = drafter.open(prompt, np.ones((8, 64), np.float32))
    state.commit([5], np.ones((1, 64), np.float32))
    (draft,) = drafter.propose([state], [3], 0.0)
    assert 1 <= len(draft.tokens) <= 3 and all(0 <= token < opened.manifest.model.vocabulary for token in draft.tokens)
    with speceyes.load(built(), threads=1) as loaded:
        wanted = model("idefics3").generate("what is item 4?", max_new_tokens=LIMIT)
        assert loaded.generate("what is item 4?", max_new_tokens=LIMIT).text == wanted.text


def test_inspect_tells_of_it(capsys: Capture) -> None:
    built()
    capsys.readouterr()
    assert run(["inspect", str(built())]) == 0
    assert "predictor: 0.0 M parameters of its own" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["target_sha256", "tokenizer_sha256"])
def test_a_predictor_of_another_target_is_not_compiled(copy: Path, tmp_path: Path, name: str) -> None:
    rewrite(copy, **{name: "a" * 64})
    found = getattr(read_artifact(trained()).entry, name)
    with pytest.raises(PredictorError) as caught:
        speceyes.compile(checkpoint("idefics3"), tmp_path / "x.speceyes", predictor=str(copy))
    message = str(caught.value)
    assert "a" * 64 in message and found in message and "speceyes-compile train-predictor" in message
    assert [path.name for path in tmp_path.iterdir()] == ["copy.predictor"]


@pytest.mark.parametrize("name", ["target_sha256", "tokenizer_sha256"])
def test_a_predictor_of_another_target_is_not_loaded(name: str) -> None:
    document = json.loads((built() / "manifest.json").read_text())
    found = document["predictor"][name]
    document["predictor"][name] = "b" * 64
    with pytest.raises(ManifestError) as caught:
        manifests.loads(json.dumps(document).encode())
    message = str(caught.value)
    assert found in message and "b" * 64 in message and "speceyes-compile train-predictor" in message


def test_an_engine_without_its_entry_is_not_loaded() -> None:
    document = json.loads((built() / "manifest.json").read_text())
    document["predictor"] = None
    with pytest.raises(ManifestError, match="there is no entry `predictor` to describe it"):
        manifests.loads(json.dumps(document).encode())


def test_a_bundle_needs_its_own_checkpoint(capsys: Capture, tmp_path: Path) -> None:
    arguments = ["train-predictor", str(bundle("idefics3")), "--data", str(data()), "-o", str(tmp_path / "p.predictor")]
    capsys.readouterr()
    assert run(arguments) == 1
    assert "name the checkpoint that it was built from with --checkpoint" in capsys.readouterr().err
    assert run([*arguments, "--checkpoint", str(checkpoint("llama"))]) == 1
    error = capsys.readouterr().err
    assert (
        "the bundle was built from" in error
        and Bundle.open(bundle("idefics3")).manifest.provenance.checkpoint_sha256 in error
    )
    assert not (tmp_path / "p.predictor").exists()


def test_broken_folders_are_named(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match="it cannot be read"):
        read_artifact(tmp_path / "nothing")
    (copy / "predictor.safetensors").write_bytes(b"12345678")
    with pytest.raises(PredictorError, match="it cannot be read"):
        read_artifact(copy)
    other = tmp_path / "folder"
    other.mkdir()
    with pytest.raises(PredictorError, match="it exists and is not a predictor"):
        check_artifact_output(other)


def test_weights_of_another_shape_are_named(copy: Path) -> None:
    artifact = read_artifact(copy)
    wider = dataclasses.replace(artifact, shape=dataclasses.replace(artifact.shape, state=40))
    with pytest.raises(PredictorError, match=r"predictor\.safetensors does not fit config\.json"):
        wider.restore(open_checkpoint(checkpoint("idefics3")))


def test_the_demo_renders_such_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from speceyes.scripts.demo.requests import write

    write(tmp_path / "one", 28, "test")
    write(tmp_path / "again", 28, "test")
    requests = read_requests(tmp_path / "one")
    assert 28 < len(requests) <= 56
    assert {len(request.images) for request in requests} == {1, 3}
    assert hash_requests(requests) == hash_requests(read_requests(tmp_path / "again"))
    write(tmp_path / "one", 28, "training")
    assert hash_requests(read_requests(tmp_path / "one")) != hash_requests(requests)
