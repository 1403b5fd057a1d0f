"""The manifest is untrusted: whatever the bytes, reading gives a Manifest or raises ManifestError, nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speceyes.engines import manifest as manifests
from speceyes.engines.engine import TensorSpec
from speceyes.engines.errors import BundleError, ManifestError, SpecEyesError
from speceyes.engines.manifest import (
    EngineEntry,
    FileEntry,
    Manifest,
    ModelEntry,
    PackEntry,
    PredictorEntry,
    Provenance,
    RehearsalEntry,
    TargetEntry,
    TensorRtEntry,
    check_path,
)

HASH = "0123456789abcdef" * 4

SAMPLE = Manifest(
    model=ModelEntry(
        family="idefics3",
        architecture="Idefics3ForConditionalGeneration",
        hidden=64,
        vocabulary=400,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        context_length=512,
        rope="default",
        eos_token_ids=(1, 2),
        parameters=123_456,
        image_token_id=7,
    ),
    provenance=Provenance("tiny", HASH, {"torch": "2.13.0"}),
    processing_sha256=HASH,
    tokenizer_sha256=HASH,
    targets={
        "onnxruntime-cpu": TargetEntry(
            versions={"onnxruntime": "1.32.0"},
            engines={
                "decoder": EngineEntry(
                    path="engines/onnxruntime-cpu/decoder.onnx",
                    precision="int8",
                    inputs=(TensorSpec("input_ids", "int64", ("batch", "width")),),
                    outputs=(TensorSpec("logits", "float32", ("rows", 400)),),
                    parameters=900,
                    weight_bytes=1000,
                    min_width=2,
                    cost_ms={"1": 1.5, "2": 1.6},
                    accuracy={"cosine": 0.999},
                )
            },
            packs={"decoder": PackEntry("accuracy/decoder", {"*": 0.1, "logits": 0.5}, 1e-5, 0.99, 0.9)},
            rehearsal=RehearsalEntry("a device", 3, 2, {"2×4": "no memory"}, ("1×1",)),
            tensorrt=TensorRtEntry(
                "tensorrt-rtx", "1.7.1.116", (89,), {"decoder": HASH}, {"decoder": False}, {"decoder": 2}, "13", HASH
            ),
        )
    },
    files=(
        FileEntry("engines/onnxruntime-cpu/decoder.onnx", 10, HASH),
        FileEntry("processing.json", 3, HASH),
        FileEntry("accuracy/decoder/inputs.json", 5, HASH),
    ),
    predictor=PredictorEntry(3, 40, 5000, 900, HASH, HASH, (0.5, 0.4, 0.3), 0.02, {}, {}),
)


def plain() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(manifests.dumps(SAMPLE))
    return value


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a JSON document stands."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += paths(item, (*at, key))
    return found


def parent(document: Any, at: tuple[Any, ...]) -> Any:
    for key in at[:-1]:
        document = document[key]
    return document


def read(value: Any) -> Manifest:
    return manifests.loads(json.dumps(value).encode())


def survives(data: bytes) -> None:
    """`data` gives a manifest that writes and reads back the same, or a ManifestError of bounded length."""
    try:
        found = manifests.loads(data)
    except ManifestError as fault:
        assert isinstance(fault, BundleError) and isinstance(fault, SpecEyesError)
        assert 0 < len(str(fault)) < 10_000
    else:
        assert manifests.loads(manifests.dumps(found)) == found


ODD_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**64, -1, 0])
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=20)
    | st.sampled_from(["../x", "/etc/passwd", "a//b", "\ud800", "x" * 5000, "a\x00b", HASH]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def test_writes_and_reads_back() -> None:
    data = manifests.dumps(SAMPLE)
    assert manifests.loads(data) == SAMPLE
    assert manifests.dumps(manifests.loads(data)) == data
    assert data.endswith(b"}\n")


@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    survives(data)


@given(st.data())
@settings(max_examples=200)
def test_damaged_bytes(data: st.DataObject) -> None:
    raw = bytearray(manifests.dumps(SAMPLE))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw) // 2]))]))


@given(st.sampled_from(paths(plain())), ODD_VALUES)
@settings(max_examples=400)
def test_a_replaced_value(at: tuple[Any, ...], value: Any) -> None:
    document = plain()
    parent(document, at)[at[-1]] = value
    survives(json.dumps(document).encode())


OPTIONAL = {
    "max_width",
    "min_width",
    "seams",
    "options",
    "cost_ms",
    "accuracy",
    "format",
    "version",
    "hidden_taps",
    "packs",
    "rehearsal",
}
OPTIONAL |= {"rehearsal", "refused", "differing", "image_token_id", "bos_token_id", "pad_token_id", "predictor"}
OPTIONAL |= {"tensorrt", "driver", "timing_cache_sha256", "deterministic", "lifted"}
NAMED_BY_USER = (
    "versions",
    "cost_ms",
    "accuracy",
    "options",
    "atol",
    "refused",
    "engines_sha256",
    "deterministic",
    "lifted",
)


@pytest.mark.parametrize(
    "at", [p for p in paths(plain()) if isinstance(p[-1], str)], ids=lambda p: ".".join(map(str, p))
)
def test_a_missing_key(at: tuple[Any, ...]) -> None:
    document = plain()
    del parent(document, at)[at[-1]]
    free = (
        at[-1] in OPTIONAL or any(name in at[:-1] for name in NAMED_BY_USER) or at[-1] in ("onnxruntime-cpu", "decoder")
    )
    if free and at[-2:] != ("tensorrt", "version"):
        read(document)
    else:
        with pytest.raises(ManifestError, match=rf"{at[-1]}: the key is missing"):
            read(document)


def test_an_unknown_key_names_the_nearest() -> None:
    document = plain()
    document["model"]["vocabluary"] = 3
    with pytest.raises(ManifestError, match=r"manifest\.model\.vocabluary: unknown key; did you mean 'vocabulary'\?"):
        read(document)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (("model", "hidden"), "64", "manifest.model.hidden: found '64'; int is expected"),
        (("model", "hidden"), True, "manifest.model.hidden: found True; int is expected"),
        (("model", "layers"), 0, "layers: found 0; at least 1"),
        (("model", "rope"), "spiral", "manifest.model.rope: found 'spiral'; allowed: default, mrope, learned"),
        (("format",), "other", "format: found 'other'"),
        (("version",), 1, "build the bundle again with `speceyes-compile build`"),
        (("files", 0, "size"), -1, "it cannot be negative"),
        (("files", 0, "sha256"), HASH.upper(), "64 hexadecimal digits"),
        (("files", 0, "path"), "processing.json", "a path is listed twice"),
        (("files", 0, "path"), "engines/other.onnx", "is not in files"),
        (("targets", "onnxruntime-cpu", "engines", "decoder", "min_width"), 0, "min_width: found 0"),
        (("targets", "onnxruntime-cpu", "engines", "decoder", "parameters"), 0, "parameters: found 0; at least 1"),
        (("targets", "onnxruntime-cpu", "engines", "decoder", "weight_bytes"), -1, "weight_bytes: found -1"),
        (("targets", "onnxruntime-cpu", "engines", "decoder", "cost_ms", "1"), "fast", "float is expected"),
        (("targets", "onnxruntime-cpu", "engines", "decoder", "cost_ms", "1"), 10**400, "float is expected"),
        (("targets", "onnxruntime-cpu", "packs", "decoder", "path"), "accuracy/none", "no file of 'accuracy/none'"),
        (("targets", "onnxruntime-cpu", "packs", "decoder", "path"), "../accuracy", "a path inside the bundle"),
        (("targets", "onnxruntime-cpu", "packs", "decoder", "atol", "logits"), -0.1, "atol.logits: found -0.1"),
        (("targets",), [], "a mapping is expected"),
    ],
)
def test_a_wrong_value_is_named(at: tuple[Any, ...], value: Any, message: str) -> None:
    document = plain()
    parent(document, at)[at[-1]] = value
    with pytest.raises(ManifestError) as caught:
        read(document)
    assert message in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_are_finite(number: str) -> None:
    text = manifests.dumps(SAMPLE).decode().replace("0.999", number)
    with pytest.raises(ManifestError, match="numbers are finite"):
        manifests.loads(text.encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe{}",
        b"1" * 5000,
        b'{"format": "speceyes-bundle", "format": "speceyes-bundle"}',
        b" " * (manifests.MAX_BYTES + 1),
    ],
    ids=["empty", "null", "deep lists", "deep mappings", "not UTF-8", "long number", "key twice", "too large"],
)
def test_not_a_manifest(data: bytes) -> None:
    with pytest.raises(ManifestError):
        manifests.loads(data)


@pytest.mark.parametrize(
    "path",
    [
        "", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", "./a", "C:\\x", "c:x", "a\\b", "a\x00b", "a\nb",
        "manifest.json", "\ud800", "~", "x" * 201, "a b", "é",
    ],
)  # fmt: skip
def test_paths_stay_inside(path: str) -> None:
    with pytest.raises(ManifestError):
        check_path(path)


@given(st.text(max_size=30))
def test_an_accepted_path_is_plain(path: str) -> None:
    try:
        check_path(path)
    except ManifestError:
        return
    assert path.isascii() and not path.startswith("/") and all(part not in ("", ".", "..") for part in path.split("/"))
