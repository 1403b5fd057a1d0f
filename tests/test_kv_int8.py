"""The decoder over an int8 cache: near the fp32 one, the same bits at every width, the memory as allocated."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import speceyes
from speceyes.compile.cli import run
from speceyes.engines.errors import LoweringError
from speceyes.plugins.int8_attention.operator import CHUNK
from speceyes.runtime.decoder import CAPACITY_STEP
from speceyes.runtime.session import Request

from .bundles import picture
from .checkpoints import MAKERS, checkpoint, exported, session_folder
from .drafters import Scripted, speculating
from .lowered import logits, lowered

FAMILIES = list(MAKERS)
LENGTHS = (21, 9, 14)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_int8_cache_costs_less_than_int8_weights(family: str) -> None:
    exact = np.concatenate(logits(family, "fp32", LENGTHS, [4, 2, 8]))
    cache, weights = (
        np.linalg.norm(np.concatenate(logits(family, precision, LENGTHS, [4, 2, 8], kv=kv)) - exact)
        for precision, kv in (("fp32", "int8"), ("int8", "fp32"))
    )
    assert 0 < cache < 0.75 * weights


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_width_gives_the_same_bits(family: str, precision: str, threads: int) -> None:
    (alone,) = logits(family, precision, LENGTHS[:1], [LENGTHS[0]], seed=6, kv="int8")
    for seed, widths in enumerate([[2], [3, 5], [4], [8, 2, 16], [32]]):
        together = logits(family, precision, LENGTHS, widths, seed=seed, threads=threads, kv="int8")
        np.testing.assert_array_equal(together[0], alone)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2_sliding", "gemma3_text"])
def test_long_texts_keep_their_bits_across_chunks(family: str, threads: int) -> None:
    """Steps that reach from one chunk of slots into the next, with one or several heads of keys for the threads."""
    (narrow,) = logits(family, "int8", (3 * CHUNK - 20,), [2], seed=5, kv="int8")
    for widths in ([34], [7], [CHUNK]):
        wide = logits(family, "int8", (3 * CHUNK - 20, 30), widths, threads=threads, kv="int8")
        np.testing.assert_array_equal(wide[0], narrow)


@pytest.mark.parametrize("family", ["idefics3", "gemma3_text"])
def test_caches_are_int8_with_a_scale_for_each_token_and_head(family: str) -> None:
    model = lowered(family, "decoder", "int8", "int8")
    layers, kv_heads = exported(family).checkpoint.layers, None
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    assert not {"mask", "kv_length"} & set(inputs)
    for kind in "kv":
        for layer in range(layers):
            for held, name in ((inputs, f"cache_{kind}"), (outputs, f"present_{kind}")):
                codes, scales = held[f"{name}.{layer}"], held[f"{name}_scale.{layer}"]
                assert codes.dtype == ir.DataType.INT8 and scales.dtype == ir.DataType.FLOAT
                assert list(scales.shape[:3]) == list(codes.shape[:3]) and scales.shape[3] == 1
                kv_heads = codes.shape[1]
    assert isinstance(kv_heads, int)
    found = {node.op_type for node in model.graph}
    assert "MatMulIntegerToFloat" in found and "GroupQueryAttention" not in found


def test_another_cache_is_refused() -> None:
    with pytest.raises(LoweringError, match="kv: found 'int4'; allowed are fp32, int8"):
        lowered("llama", "decoder", "int8", "int4")


@cache
def built(family: str) -> Path:
    out = session_folder() / f"{family}-kv-int8.speceyes"
    speceyes.compile(checkpoint(family), out, kv="int8", check={"enabled": False}, measure={"enabled": False})
    return out


@pytest.mark.parametrize("family", ["llama", "idefics3", "qwen2_vl", "gemma3_text"])
def test_speculation_over_an_int8_cache_gives_plain_decodings_tokens(family: str) -> None:
    vlm = speceyes.load(built(family), threads=1)
    prompts = ("the quick brown fox", "one two three one two three", "what is written here?")
    options = {"max_new_tokens": 24}
    if vlm.sees:
        requests = [Request(text, images=[picture("square", n)], options=options) for n, text in enumerate(prompts)]
    else:
        requests = [Request(prompt=text, options=options) for text in prompts]
    vlm.disable_speculation()
    expected = [vlm.generate_batch([request])[0].token_ids for request in requests]
    vlm.enable_speculation()
    for kinds in (("mixed",), ("right", "wrong"), ("random", "mixed")):
        drafters = [Scripted(kind, expected, vlm.manifest.model.vocabulary) for kind in kinds]
        with speculating(vlm, drafters, window_size=5, max_parallel=2):
            assert [result.token_ids for result in vlm.generate_batch(requests)] == expected


def test_the_cache_takes_the_bytes_of_its_codes_and_scales() -> None:
    """At 64 channels a head 68 bytes stand for 256 of fp32 (73 % less) and 128 of fp16 (47 % less)."""
    vlm = speceyes.load(built("llama"))
    entry = vlm.manifest.model
    assert CAPACITY_STEP % CHUNK == 0
    cache = vlm.engines.decoder.open(3, 100)
    slots = 3 * entry.kv_heads * cache.capacity * 2 * entry.layers
    assert cache.nbytes == slots * (entry.head_dim + 4)
    for dtype_bytes, saved in ((4, 0.70), (2, 0.44)):
        assert 1 - (64 + 4) / (64 * dtype_bytes) >= saved


def test_a_bundle_with_an_int8_cache_is_checked_and_a_second_turn_reuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(built("idefics3"))]) == 0
    assert "passed" in capsys.readouterr().out
    vlm, alone = (speceyes.load(built("idefics3"), settings={"memory": {"cache_size": size}}) for size in ("1MB", 0))
    for question in ("what is written here?", "which colours are there?"):
        found, fresh = (m.generate(question, images=[picture("square")], max_new_tokens=12) for m in (vlm, alone))
        assert found.token_ids == fresh.token_ids
    assert found.stats.reused_tokens > found.stats.image_tokens > 0
