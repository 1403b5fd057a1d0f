"""What a request does: streaming, stopping, cancelling, sampling, limits; on a tiny bundle."""

import threading

import numpy as np
import pytest
from speceyes.engines.errors import ContextLengthError, EngineError, ImageError, PromptError, RequestError
from speceyes.runtime.session import Request

from .bundles import ask, bundle, model, picture

QUESTION = "what is written in the picture?"


@pytest.fixture(scope="module")
def vlm():
    return model("idefics3")


@pytest.fixture(scope="module")
def answer(vlm):
    return vlm.generate(QUESTION, images=[picture("square")], max_new_tokens=40)


def test_result_is_complete(vlm, answer):
    assert answer.text == vlm.processor.tokenizer.decode(answer.token_ids)
    assert answer.stats.new_tokens == len(answer.token_ids)
    assert answer.stats.tiles == len(vlm.processor.prepare(QUESTION, images=[picture("square")]).tiles) > 1
    assert set(answer.stats.seconds) == {"process", "vision", "prefill", "decode"}
    assert all(seconds > 0 for seconds in answer.stats.seconds.values())
    assert answer.stats.first_token_seconds > 0 < answer.stats.tokens_per_second


def test_stream_gives_whole_characters_and_the_same_text(vlm, answer):
    stream = vlm.stream(QUESTION, images=[picture("square")], max_new_tokens=40)
    pieces = list(stream)
    assert "".join(pieces) == answer.text == stream.result.text
    assert len(pieces) > 5
    assert all(piece for piece in pieces)


@pytest.mark.parametrize("length", [1, 3, 6])
def test_stop_string_ends_the_text_before_it(vlm, answer, length):
    middle = len(answer.text) // 2
    stop = answer.text[middle : middle + length]
    stopped = vlm.generate(QUESTION, images=[picture("square")], max_new_tokens=40, stop=[stop])
    assert stopped.text == answer.text[: answer.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == answer.token_ids[: len(stopped.token_ids)]


def test_stop_strings_hold_text_back_in_a_stream(vlm, answer):
    stop = answer.text[10:16]
    pieces = list(vlm.stream(QUESTION, images=[picture("square")], max_new_tokens=40, stop=stop))
    assert "".join(pieces) == answer.text[: answer.text.index(stop)]


def test_closing_a_stream_cancels(vlm, answer):
    stream = vlm.stream(QUESTION, images=[picture("square")], max_new_tokens=40)
    taken = [next(stream) for _ in range(3)]
    stream.close()
    result = stream.result
    assert result.finish_reason == "cancelled"
    assert answer.text.startswith("".join(taken))
    assert 3 <= len(result.token_ids) < 40
    assert result.token_ids == answer.token_ids[: len(result.token_ids)]


def test_leaving_a_stream_cancels(vlm):
    with vlm.stream(QUESTION, max_new_tokens=40) as stream:
        next(stream)
    assert stream.result.finish_reason == "cancelled"


def test_length_is_a_finish_reason(vlm, answer):
    short = vlm.generate(QUESTION, images=[picture("square")], max_new_tokens=5)
    assert short.finish_reason == "length"
    assert short.token_ids == answer.token_ids[:5]


def test_seed_reproduces_sampled_text(vlm):
    options = {"temperature": 1.3, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.2, "max_new_tokens": 24}
    first = vlm.generate(QUESTION, images=[picture("square")], **options)
    again = vlm.generate(QUESTION, images=[picture("square")], **options, seed=first.seed)
    other = vlm.generate(QUESTION, images=[picture("square")], **options, seed=first.seed + 1)
    assert again.token_ids == first.token_ids != other.token_ids


def test_sampled_batch_equals_single_requests(vlm):
    options = [{"temperature": 1.0, "seed": seed, "max_new_tokens": 10 + 4 * seed} for seed in range(4)]
    requests = [
        Request(ask(QUESTION, seed % 3), images=[picture("square", n) for n in range(seed % 3)], options=each)
        for seed, each in enumerate(options)
    ]
    batch = vlm.generate_batch(requests)
    alone = [vlm.generate(r.messages, images=r.images, **r.options) for r in requests]
    assert [result.token_ids for result in batch] == [result.token_ids for result in alone]
    assert [result.text for result in batch] == [result.text for result in alone]


@pytest.mark.parametrize("chunk", [1, 7, 33, 64])
def test_chunked_prefill_gives_the_same_bits(vlm, chunk):
    decoder, generator = vlm._engines.decoder, np.random.default_rng(1)
    count = 131
    ids, positions = generator.integers(0, decoder.model.vocabulary, count), np.arange(count)
    index = np.full(count, -1)

    def prefill(size):
        cache = decoder.open(1, count)
        logits = cache.prefill(0, ids, positions, index, None, size).logits.copy()
        return logits, [layer.array[0, :, :count].copy() for layer in cache._layers.values()]

    expected, found = prefill(512), prefill(chunk)
    np.testing.assert_array_equal(found[0], expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_threads_share_a_model(vlm):
    expected = [vlm.generate(QUESTION, images=[picture("square", n)], max_new_tokens=16).text for n in range(4)]
    found: dict[int, str] = {}

    def work(n: int) -> None:
        found[n] = vlm.generate(QUESTION, images=[picture("square", n)], max_new_tokens=16).text

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(4)] == expected


def test_a_step_allocates_no_buffer(vlm):
    decoder = vlm._engines.decoder
    cache = decoder.open(1, 32)
    ids = np.array([[5]])
    cache.forward(ids, np.array([[0]]), np.array([1]))
    bound = cache._passes.copy()
    before = [buffer.array.ctypes.data for one in bound.values() for buffer in one.buffers.values()]
    for position in range(1, 20):
        cache.forward(ids, np.array([[position]]), np.array([1]))
    assert cache._passes == bound
    assert before == [buffer.array.ctypes.data for one in bound.values() for buffer in one.buffers.values()]


def test_rewind_then_forward_equals_a_fresh_cache(vlm):
    decoder, generator = vlm._engines.decoder, np.random.default_rng(0)
    tokens = generator.integers(0, decoder.model.vocabulary, 12)
    positions = np.arange(12)

    def step(cache, part):
        return cache.forward(
            tokens[None, part], positions[None, part], np.array([part.stop - part.start])
        ).logits.copy()

    fresh = decoder.open(1, 32)
    expected = [step(fresh, slice(0, 6)), step(fresh, slice(6, 9)), step(fresh, slice(9, 12))]
    cache = decoder.open(1, 32)
    found = [step(cache, slice(0, 6))]
    cache.forward(tokens[None, :4][:, ::-1], positions[None, 6:10], np.array([4]))
    cache.rewind(0, 6)
    found += [step(cache, slice(6, 9)), step(cache, slice(9, 12))]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(EngineError, match="row 0 holds 12"):
        cache.rewind(0, 13)


def test_too_long_a_prompt_is_refused_with_the_numbers(vlm):
    with pytest.raises(ContextLengthError, match=r"prompt: \d+ tokens .* exceed the context length of 512"):
        vlm.generate("the quick brown fox " * 200)
    with pytest.raises(ContextLengthError, match="max_new_tokens 600"):
        vlm.generate("hello", max_new_tokens=600)


@pytest.mark.parametrize(
    ("arguments", "kind", "named"),
    [
        ({"messages": [{"role": "wizard", "content": "hi"}]}, PromptError, "wizard"),
        ({"messages": ask("hi", 1)}, PromptError, "image"),
        ({"messages": "hi", "images": [b"no image at all"]}, ImageError, "images"),
        ({"messages": "hi", "tempurature": 1}, RequestError, "did you mean 'temperature'"),
        ({"messages": "hi", "prompt": "hi"}, PromptError, "exactly one"),
    ],
)
def test_wrong_requests_are_named_before_anything_runs(vlm, arguments, kind, named):
    with pytest.raises(kind, match=named):
        vlm.stream(**arguments)


def test_text_bundles_refuse_images():
    with pytest.raises(PromptError, match="text alone"):
        model("llama").generate(prompt="hi", images=[picture("square")])


def test_an_unknown_target_names_what_the_bundle_holds():
    import speceyes

    with pytest.raises(EngineError, match="the bundle holds onnxruntime-cpu"):
        speceyes.load(bundle("idefics3"), target="tensorrt")
