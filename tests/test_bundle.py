"""A bundle on disk: every fault of a file has its own error, and writing is all or nothing."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from speceyes.engines.bundle import MANIFEST, Bundle, seal, write_bundle
from speceyes.engines.errors import BundleError, IntegrityError, ManifestError
from speceyes.engines.manifest import FileEntry, Manifest, ModelEntry, Provenance, dumps

HASH = "0123456789abcdef" * 4
FILES = {
    "engines/onnxruntime-cpu/decoder.onnx": b"graph",
    "engines/onnxruntime-cpu/decoder.onnx.data": bytes(range(256)) * 20,
    "tokenizer/tokenizer.json": b"{}",
    "processing.json": b"{ }",
    "accuracy/decoder.npz": b"PK",
    "recipe.yaml": b"target: onnxruntime-cpu\n",
}


def make_manifest(files: tuple[FileEntry, ...]) -> Manifest:
    model = ModelEntry(
        family="llama",
        architecture="LlamaForCausalLM",
        hidden=8,
        vocabulary=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=4,
        context_length=32,
        rope="default",
        eos_token_ids=(1,),
        parameters=100,
    )
    return Manifest(model, Provenance("tiny", HASH, {}), HASH, HASH, {}, files)


def fill(folder: Path, files: dict[str, bytes] = FILES) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "model.speceyes"
    with write_bundle(path) as folder:
        fill(folder)
        seal(folder, make_manifest)
    return path


def test_opens_what_was_written(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    assert opened.path == bundle
    assert {entry.path: entry.size for entry in opened.manifest.files} == {k: len(v) for k, v in FILES.items()}
    assert opened.size == sum(map(len, FILES.values()))
    assert [p.name for p in bundle.parent.iterdir()] == ["model.speceyes"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit(bundle: Path, name: str) -> None:
    data = bytearray(FILES[name])
    data[len(data) // 2] ^= 1
    (bundle / name).write_bytes(data)
    with pytest.raises(IntegrityError, match=rf"^{name}: SHA-256 .* altered"):
        Bundle.open(bundle)
    Bundle.open(bundle, verify=False)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file(bundle: Path, name: str, verify: bool) -> None:
    (bundle / name).write_bytes(FILES[name][:-1])
    with pytest.raises(IntegrityError, match=rf"^{name}: found {len(FILES[name]) - 1} bytes; the manifest says"):
        Bundle.open(bundle, verify=verify)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(bundle: Path, name: str, verify: bool) -> None:
    (bundle / name).unlink()
    with pytest.raises(IntegrityError, match=rf"^{name}: the file is missing"):
        Bundle.open(bundle, verify=verify)


@pytest.mark.parametrize("name", ["extra.bin", "engines/onnxruntime-cpu/payload.so", "tokenizer/.hidden"])
def test_a_surplus_file(bundle: Path, name: str) -> None:
    (bundle / name).write_bytes(b"x")
    with pytest.raises(IntegrityError, match=rf"{name}: surplus file"):
        Bundle.open(bundle, verify=False)


def test_a_folder_where_a_file_should_be(bundle: Path) -> None:
    (bundle / "processing.json").unlink()
    (bundle / "processing.json").mkdir()
    with pytest.raises(IntegrityError, match=r"^processing\.json: the file is missing"):
        Bundle.open(bundle)


@pytest.mark.parametrize("name", FILES)
def test_a_link_that_leaves_the_bundle(bundle: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(FILES[name])
    (bundle / name).unlink()
    (bundle / name).symlink_to(outside)
    with pytest.raises(IntegrityError, match=rf"^{name}: a link that leaves the bundle"):
        Bundle.open(bundle)


def test_a_linked_folder(bundle: Path, tmp_path: Path) -> None:
    (bundle / "tokenizer").rename(tmp_path / "tokenizer")
    (bundle / "tokenizer").symlink_to(tmp_path / "tokenizer")
    with pytest.raises(IntegrityError, match="tokenizer: a linked folder"):
        Bundle.open(bundle)


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../outside", "C:outside"])
def test_a_path_that_escapes(bundle: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "outside").write_bytes(b"x")
    text = (bundle / MANIFEST).read_text().replace("processing.json", path)
    (bundle / MANIFEST).write_text(text)
    with pytest.raises(ManifestError, match="a path inside the bundle is expected"):
        Bundle.open(bundle)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda p: None, "there is no such folder"),
        (lambda p: p.mkdir(), "it holds no manifest.json"),
        (lambda p: p.write_bytes(b"x"), "it holds no manifest.json"),
    ],
    ids=["absent", "empty folder", "a file"],
)
def test_not_a_bundle(tmp_path: Path, prepare: Callable[[Path], object], message: str) -> None:
    prepare(tmp_path / "x.speceyes")
    with pytest.raises(
        BundleError, match=rf"{message}; make one with `speceyes-compile build CHECKPOINT -o x\.speceyes`"
    ):
        Bundle.open(tmp_path / "x.speceyes")


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("old", [True, False], ids=["over a bundle", "new"])
def test_a_broken_write_changes_nothing(tmp_path: Path, fault: type[BaseException], old: bool) -> None:
    path = tmp_path / "model.speceyes"
    if old:
        with write_bundle(path) as folder:
            fill(folder)
            seal(folder, make_manifest)
    before = contents(tmp_path)
    with pytest.raises(fault), write_bundle(path) as folder:
        fill(folder, {"processing.json": b"other"})
        seal(folder, make_manifest)
        raise fault
    assert contents(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == (["model.speceyes"] if old else [])


def test_an_interrupt_between_the_renames_brings_the_old_bundle_back(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = contents(bundle.parent), os.rename

    def interrupted(source: Path, target: Path) -> None:
        if Path(source).name.endswith(".partial"):
            raise KeyboardInterrupt
        rename(source, target)

    with pytest.raises(KeyboardInterrupt), write_bundle(bundle) as folder:
        fill(folder, {"processing.json": b"other"})
        seal(folder, make_manifest)
        monkeypatch.setattr(os, "rename", interrupted)
    assert contents(bundle.parent) == before


def test_a_new_bundle_takes_the_place_of_the_old(bundle: Path) -> None:
    with write_bundle(bundle) as folder:
        fill(folder, {"processing.json": b"other"})
        seal(folder, make_manifest)
    assert [entry.path for entry in Bundle.open(bundle).manifest.files] == ["processing.json"]
    assert [p.name for p in bundle.parent.iterdir()] == ["model.speceyes"]


def test_what_is_no_bundle_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_bytes(b"words")
    with pytest.raises(BundleError, match="it exists and is not a bundle"), write_bundle(tmp_path / "thesis"):
        pass
    assert contents(tmp_path) == {"thesis/chapter": b"words"}


def test_a_bundle_without_a_manifest_is_not_put_in_place(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no manifest was written"), write_bundle(tmp_path / "m.speceyes") as folder:
        fill(folder)
    assert list(tmp_path.iterdir()) == []


def test_sealing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    fill(tmp_path)
    first = dumps(seal(tmp_path, make_manifest))
    assert dumps(seal(tmp_path, make_manifest)) == first == (tmp_path / MANIFEST).read_bytes()
