"""Run by tests/test_cuda_on_host.py in a process whose CUDA driver is driver.c."""

import gc
from pathlib import Path

import numpy as np
import pytest
from speceyes.engines.bundle import Bundle
from speceyes.engines.cuda import open_device, refusal
from speceyes.engines.device_buffer import DeviceBuffer
from speceyes.engines.device_engine import DeviceEngine
from speceyes.engines.engine import GraphCounts
from speceyes.engines.errors import EngineError
from speceyes.engines.graphs import EagerStep, GraphStep
from speceyes.engines.manifest import EngineEntry
from speceyes.engines.target import Target
from speceyes.runtime.session import Model, Request
from speceyes.runtime.speculation.settings import Settings
from speceyes.tests.bundles import bundle, picture
from speceyes.tests.cuda_on_host.compiled import Faulty, HostCompiled
from speceyes.tests.drafters import Scripted, speculating

PROMPTS = ("the quick brown fox", "one two three one two three", "what is written here?")


@pytest.fixture
def device():
    assert refusal() is None
    return open_device()


def buffer_of(device, values: np.ndarray) -> DeviceBuffer:
    made = DeviceBuffer.allocate(device, values.shape, values.dtype, resident=False)
    made.array[...] = values
    with device.lock:
        made.upload()
        device.synchronize()
    return made


def read(device, buffer: DeviceBuffer) -> np.ndarray:
    with device.lock:
        buffer.download()
        device.synchronize()
    return buffer.array.copy()


def test_the_device_is_named(device):
    assert (device.name, device.compute_capability, device.driver_version) == ("host", 90, 13000)


def test_new_memory_is_zero_and_a_result_is_there_after_waiting_alone(device):
    buffer = DeviceBuffer.allocate(device, (3, 5), np.float32, resident=False)
    buffer.array[...] = np.float32(1)
    with device.lock:
        buffer.download()
        assert (buffer.array == 1).all()
        device.synchronize()
    assert (buffer.array == 0).all()


def test_rows_are_the_same_memory(device):
    values = np.arange(24, dtype=np.int64).reshape(4, 3, 2)
    buffer = buffer_of(device, values)
    part = buffer.row(1, 3)
    part.array[...] = -values[1:3]
    with device.lock:
        part.upload()
    values[1:3] *= -1
    np.testing.assert_array_equal(read(device, buffer), values)


@pytest.mark.parametrize("shape", [(3, 2, 8, 4), (3, 2, 8)])
def test_tokens_are_copied_from_row_to_row(device, shape):
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    buffer = buffer_of(device, values)
    buffer.copy_tokens(0, 2, 3, 6)
    values[2, :, 3:6] = values[0, :, 3:6]
    np.testing.assert_array_equal(read(device, buffer), values)
    rows = buffer.row(1, 3)
    rows.copy_tokens(1, 0, 0, 8)
    values[1] = values[2]
    np.testing.assert_array_equal(read(device, buffer), values)


def test_what_leaves_its_memory_is_an_error(device):
    buffer = DeviceBuffer.allocate(device, (1, 1, 4), np.float32, resident=True)
    buffer.copy_tokens(0, 0, 2, 6)
    with device.lock, pytest.raises(EngineError, match="cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"):
        device.synchronize()
    with pytest.raises(EngineError, match="stays on the device"):
        _ = buffer.array


def test_memory_is_freed_with_its_last_reference(device):
    buffer = DeviceBuffer.allocate(device, (4,), np.float32, resident=False)
    address, mirror = buffer.address, buffer.array
    del buffer
    gc.collect()
    other = DeviceBuffer.allocate(device, (64,), np.float32, resident=False)
    with device.lock, pytest.raises(EngineError, match="ILLEGAL_ADDRESS"):
        device.copy(other.address, address, 16)
        device.synchronize()
    with device.lock:
        device.download(mirror.ctypes.data, other.address, 16)
        device.synchronize()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("works", None),
        ("allocates", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        ("waits", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        ("changes", "the first replay differs from the eager run"),
    ],
)
def test_a_step_is_captured_at_its_second_run_or_refused_with_the_reason(device, kind, reason):
    out, counts = DeviceBuffer.allocate(device, (8,), np.uint8, resident=False), GraphCounts()

    def step(kind: str) -> EagerStep:
        return EagerStep(device, Faulty(kind, device, out), [], [out], counts)

    graphed = GraphStep(device, step("works"), lambda: step(kind), counts, "out 8")
    for _ in range(5):
        out.array[...] = np.uint8(0)
        graphed.run()
        assert (out.array == 7).all()
    if reason is None:
        assert (counts.captured, counts.replays, counts.misses, counts.refused) == (1, 3, 2, {})
    else:
        assert (counts.captured, counts.replays, counts.misses) == (0, 0, 6)
        assert list(counts.refused) == ["out 8"]
        assert reason in counts.refused["out 8"]


def load(name: str, device) -> Model:
    def open_engine(path: Path, threads: int | None, entry: EngineEntry) -> DeviceEngine:
        return DeviceEngine(device, HostCompiled(device, path, entry.options))

    target = Target("onnxruntime-cpu", lambda build: None, open_engine)
    return Model(Bundle.open(bundle(name)), target, 1, {}, Settings())


@pytest.mark.parametrize("name", ["llama", "idefics3"])
def test_answers_are_those_of_the_cpu_with_graphs_branches_and_batches(device, name):
    """The decode loop on device buffers: a copy left out, misplaced or too early would change the tokens."""
    model, plain = load(name, device), load_plain(name)
    options = {"max_new_tokens": 24}
    if name == "llama":
        requests = [Request(prompt=prompt, options=options) for prompt in PROMPTS]
    else:
        requests = [Request(prompt, images=[picture("square")], options=options) for prompt in PROMPTS]
    expected = [result.token_ids for result in plain.generate_batch(requests)]
    for kinds in ((), ("mixed",), ("right", "wrong"), ("random", "mixed")):
        for start, count in ((0, 3), (1, 1)):
            wanted = expected[start : start + count]
            drafters = [Scripted(kind, wanted, model.manifest.model.vocabulary) for kind in kinds]
            with speculating(model, drafters, window_size=4, max_parallel=2):
                found = model.generate_batch(requests[start : start + count])
            assert [result.token_ids for result in found] == wanted
    counts = model.graphs()["decoder"]
    assert counts.captured > 4
    assert counts.replays > 40
    assert counts.refused == {}


def load_plain(name: str) -> Model:
    import speceyes

    return speceyes.load(bundle(name))


def test_a_foreign_buffer_is_refused(device):
    model = load("llama", device)
    engine, other = model._engines.decoder.engine, load_plain("llama")._engines.decoder.engine
    buffers = {name: other.allocate([2] * len(spec.shape), spec.dtype) for name, spec in engine.inputs.items()}
    with pytest.raises(EngineError, match=r"HostBuffer; the engine's own `allocate`|found"):
        engine.bind(buffers)


def test_a_rehearsal_captures_every_shape_and_requests_replay(device):
    model = load("llama", device)
    found = model.rehearse((2,), 100)
    assert (found.captured, found.refused, found.differing) == (len(found.shapes), {}, ())
    assert len(found.shapes) == 4 * 9
    counts = model.graphs()["decoder"]
    before = counts.captured, counts.misses
    results = model.generate_batch([Request(prompt=p, options={"max_new_tokens": 20}) for p in PROMPTS[:2]])
    assert all(len(result.token_ids) == 20 for result in results)
    prefills = counts.misses - before[1]
    assert (counts.captured, prefills) == (before[0], 2)
    assert model.device == "host, compute capability 9.0, CUDA 13.0"
