"""The decode loop and the predictor over graphs as TensorRT has them, with caches and drafts of a fixed length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from speceyes.compile.checkpoint import open_checkpoint
from speceyes.compile.export import save_graph
from speceyes.compile.lowering.tensorrt import lower_for_tensorrt
from speceyes.compile.predictor.artifact import read_artifact
from speceyes.compile.predictor.export import compile_predictor
from speceyes.engines.errors import EngineError
from speceyes.engines.onnxruntime import OnnxRuntimeEngine
from speceyes.runtime.decoder import Decoder
from speceyes.runtime.processing.processor import Processor
from speceyes.runtime.speculation.predictor import PredictorDrafter

from .bundles import bundle
from .checkpoints import checkpoint, exported
from .test_predictor import trained
from .test_tensorrt_build import model_of

CAPACITY = 256
"""Slots of the cache; half of what the tiny checkpoint's context would fill."""


def decoder(folder: Path) -> Decoder:
    """The tiny Llama's decoder in fp16, run by ONNX Runtime."""
    graph = lower_for_tensorrt(exported("llama").parts["decoder"].clone(), "decoder", "fp16", capacity=CAPACITY)
    engine = OnnxRuntimeEngine(save_graph(graph, folder / "decoder.onnx"), threads=1)
    return Decoder(engine, model_of("llama"), min_width=4)


def test_a_cache_has_the_length_that_the_engine_was_built_for(tmp_path: Path) -> None:
    made = decoder(tmp_path)
    cache = made.open(2, 10)
    assert cache.capacity == CAPACITY
    assert cache.nbytes == 2 * 2 * exported("llama").checkpoint.layers * 2 * CAPACITY * 16 * 2
    with pytest.raises(
        EngineError, match=r"cache: 264 slots are needed .* built for 256; .*--set tensorrt.capacity=264"
    ):
        made.open(1, 260)


def test_windows_of_one_width_give_the_logits_of_single_steps(tmp_path: Path) -> None:
    made = decoder(tmp_path)
    ids = np.random.default_rng(0).integers(0, 300, 12)
    places = np.arange(12)
    nothing = np.full(12, -1)
    plain, together = made.open(1, 40), made.open(1, 40)
    for cache in (plain, together):
        cache.prefill(0, ids, places, nothing, None, 128)
    tokens = [5, 9, 2, 7]
    singles = [plain.advance([[token]], [12 + place]).logits[0].copy() for place, token in enumerate(tokens)]
    window = together.advance([tokens], [12], every=True).logits[0].copy()
    for single, row in zip(singles, window, strict=True):
        np.testing.assert_allclose(row, single, rtol=0, atol=1e-2 * float(np.abs(single).max()))
    together.rewind(0, 13)
    again = together.advance([tokens[1:]], [13], every=True).logits[0]
    np.testing.assert_allclose(again[:3], window[1:4], rtol=0, atol=1e-2 * float(np.abs(window).max()))


def test_a_predictor_without_window_and_threshold_drafts_as_the_other(tmp_path: Path) -> None:
    parts = compile_predictor(read_artifact(trained()), open_checkpoint(checkpoint("idefics3")))
    drafts = []
    for number, lowers in enumerate((False, True)):
        engines = {}
        for part, graph, _ in parts:
            made = lower_for_tensorrt(graph.clone(), part, "fp16", turns=3) if lowers else graph
            engines[part] = OnnxRuntimeEngine(save_graph(made, tmp_path / str(number) / f"{part}.onnx"), threads=1)
        drafter = PredictorDrafter(engines["predictor"], engines["predictor_image"], 64)
        state = drafter.open(Processor.load(bundle("idefics3")).prepare(prompt="what is it"), None)
        state.commit([5], np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32))
        drafts += [drafter.propose([state], [window], 0.0)[0] for window in (1, 2, 3)]
    for loop, turns in zip(drafts[:3], drafts[3:], strict=True):
        assert turns.tokens == loop.tokens
        np.testing.assert_allclose(turns.confidences, loop.confidences, rtol=0.01)
