"""A request in pieces answers as the same request made at once, in whatever order the pieces come."""

import asyncio
import io
import threading
import time

import numpy as np
import pytest
import speceyes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from speceyes.engines.errors import ContextLengthError, ImageError, RequestError
from speceyes.runtime.perception.arrival import PushedImage
from speceyes.runtime.perception.order import encoding_order
from speceyes.runtime.processing.prompt import PreparedImage, Tile
from speceyes.runtime.session import Model

from .bundles import SHAPES, VISION, bundle, model, picture

QUESTION = "what is written here?"
TOKENS = {"max_new_tokens": 8}
PICTURES = [(shape, seed) for shape in SHAPES for seed in range(2)]


def fresh(family: str, **memory) -> Model:
    return speceyes.load(bundle(family), settings={"memory": memory})


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def at_once(vlm: Model, text: str, images: list) -> tuple[int, ...]:
    return vlm.generate(text, images=images, **TOKENS).token_ids


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("image"), st.integers(0, len(PICTURES) - 1)),
        st.tuples(st.just("bytes"), st.integers(0, len(PICTURES) - 1)),
        st.tuples(st.just("retract"), st.integers(0, 5)),
        st.tuples(
            st.just("text"), st.sampled_from(["What ", "is", " the", " total", "?", " ", "Zürich 你好", "x" * 30])
        ),
        st.tuples(st.just("replace"), st.sampled_from(["", "Read it.", "What is", "What is the colour of the"])),
        st.tuples(st.just("wait"), st.integers(0, 2)),
        st.tuples(st.just("settle"), st.just(0)),
        st.tuples(st.just("cancel"), st.just(0)),
    ),
    max_size=9,
)


@pytest.mark.parametrize("family", VISION)
@given(events=EVENTS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_order_of_pieces_gives_the_tokens_of_the_whole(family, events):
    vlm, plain = fresh(family), model(family)
    session, images, text = vlm.session(), [], ""
    for kind, value in events:
        if kind == "image":
            source = picture(*PICTURES[value])
            images.append((session.push_image(source), source))
        elif kind == "bytes":
            source = png(picture(*PICTURES[value]))
            pushed = session.open_image()
            for start in range(0, len(source), 97):
                pushed.push(source[start : start + 97])
            pushed.close()
            images.append((pushed, source))
        elif kind == "retract" and images:
            session.retract_image(images.pop(value % len(images))[0])
        elif kind == "text":
            text += value
            session.push_text(value)
        elif kind == "replace":
            text = value
            session.replace_text(value)
        elif kind == "wait":
            time.sleep(value / 200)
        elif kind == "settle":
            session.settle()
        elif kind == "cancel":
            session.cancel()
            images, text = [], ""
    for pushed, _ in images[3:]:
        session.retract_image(pushed)
    images = images[:3]
    text += "end"
    session.push_text("end")
    result = session.commit(**TOKENS)
    assert result.token_ids == at_once(plain, text, [source for _, source in images])
    assert vlm.audit().live == {}


def test_after_settling_nothing_but_the_end_is_left_to_do():
    vlm = fresh("idefics3")
    session = vlm.session()
    session.push_image(picture("landscape"))
    session.push_text(QUESTION)
    session.settle()
    result = session.commit(**TOKENS)
    stats = result.stats
    assert stats.reused_tiles == stats.tiles > 1
    assert stats.prompt_tokens - stats.reused_tokens < 24
    assert stats.hidden_seconds > 0
    assert 0 < stats.first_tile_seconds < 60
    assert result.token_ids == at_once(model("idefics3"), QUESTION, [picture("landscape")])


def test_what_was_retracted_counts_as_wasted():
    vlm = fresh("idefics3")
    session = vlm.session()
    wrong = session.push_image(picture("square", 7))
    session.settle()
    session.retract_image(wrong)
    session.push_image(picture("square", 8))
    session.push_text(QUESTION)
    result = session.commit(**TOKENS)
    assert result.stats.wasted_seconds > 0
    assert result.token_ids == at_once(model("idefics3"), QUESTION, [picture("square", 8)])
    with pytest.raises(RequestError, match=r"images\[0\]: it is not in the session"):
        session.retract_image(wrong)


def test_turns_follow_each_other():
    vlm, plain = fresh("idefics3"), model("idefics3")
    session = vlm.session()
    session.push_image(picture("square"))
    session.push_text(QUESTION)
    first = session.commit(**TOKENS)
    session.push_text("and now?")
    second = session.commit(**TOKENS)
    told = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "and now?"},
    ]
    assert second.token_ids == plain.generate(told, images=[picture("square")], **TOKENS).token_ids
    assert second.stats.reused_tiles == second.stats.tiles
    began = vlm.session(told[:2], images=[picture("square")])
    began.push_text("and now?")
    assert began.commit(**TOKENS).token_ids == second.token_ids


def test_cancelling_ends_with_the_tile_at_hand():
    vlm = fresh("idefics3")
    vision, ran = vlm.engines.vision, []
    begun, go_on = threading.Event(), threading.Event()
    encode = vision.encode_ahead

    def slowly(tile):
        begun.set()
        assert go_on.wait(30)
        ran.append(tile)
        return encode(tile)

    vision.encode_ahead = slowly
    session = vlm.session()
    session.push_image(picture("landscape"))
    session.push_text(QUESTION)
    assert begun.wait(30)
    cancelling = threading.Thread(target=session.cancel)
    cancelling.start()
    time.sleep(0.05)
    go_on.set()
    cancelling.join(30)
    assert len(ran) == 1
    vision.encode_ahead = encode
    session.push_text("and now?")
    assert session.commit(**TOKENS).token_ids == at_once(model("idefics3"), "and now?", [])


def test_errors_are_those_of_the_whole_request():
    vlm = fresh("idefics3")
    session = vlm.session()
    session.push_image(b"no image at all")
    session.push_text(QUESTION)
    session.settle()
    with pytest.raises(ImageError, match=r"images\[0\] .* is not an image"):
        session.commit(**TOKENS)
    session.cancel()
    opened = session.open_image()
    opened.push(png(picture("square"))[:40])
    session.push_text(QUESTION)
    with pytest.raises(ImageError, match=r"images\[0\]: 40 bytes and no end; close it, or retract it"):
        session.commit(**TOKENS)
    session.retract_image(opened)
    session.push_text("x" * 5000)
    session.settle()
    with pytest.raises(ContextLengthError):
        session.commit(**TOKENS)
    session.replace_text(QUESTION)
    with pytest.raises(RequestError, match="max_new_tokenz"):
        session.commit(max_new_tokenz=3)
    assert session.commit(**TOKENS).token_ids == at_once(model("idefics3"), QUESTION, [])


def test_bytes_are_refused_as_soon_as_they_tell():
    vlm = fresh("idefics3")
    opened = vlm.session().open_image()
    with pytest.raises(ImageError, match="is not an image"):
        for _ in range(100):
            opened.push(b"\0" * 1000)
    huge = io.BytesIO()
    Image.new("RGB", (1, 1)).save(huge, "BMP")
    header = bytearray(huge.getvalue())
    header[18:26] = (60_000).to_bytes(4, "little") * 2
    opened = vlm.session().open_image()
    with pytest.raises(ImageError, match="larger than Pillow allows"):
        opened.push(bytes(header))
    with pytest.raises(ImageError, match="= 4096 pixels; at most 1000 are allowed"):
        PushedImage("images[0]", None, 1000).push(png(picture("square")))
    small = png(picture("square"))
    opened = vlm.session().open_image()
    opened.push(small)
    assert opened.size == SHAPES["square"]
    with pytest.raises(ImageError, match="no format needs so many"):
        opened.push(b"\0" * 200_000)


def test_without_a_budget_nothing_is_done_ahead():
    vlm = fresh("idefics3", cache_size=0)
    session = vlm.session()
    session.push_image(picture("square"))
    session.push_text(QUESTION)
    session.settle()
    result = session.commit(**TOKENS)
    assert (result.stats.hidden_seconds, result.stats.reused_tokens) == (0, 0)
    assert result.token_ids == at_once(model("idefics3"), QUESTION, [picture("square")])


def test_sessions_of_one_model_at_once():
    vlm, plain = fresh("idefics3"), model("idefics3")
    expected = [at_once(plain, QUESTION, [picture("square", n % 4)]) for n in range(12)]
    found: dict[int, tuple[int, ...]] = {}

    def run(number: int) -> None:
        session = vlm.session()
        session.push_image(picture("square", number % 4))
        for letter in QUESTION:
            session.push_text(letter)
        found[number] = session.commit(**TOKENS).token_ids

    threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found[number] for number in range(12)] == expected
    assert vlm.audit().live == {}


def test_the_asyncio_session_answers_the_same_and_can_be_cancelled():
    vlm, plain = fresh("idefics3"), model("idefics3")

    async def scene() -> None:
        async with vlm.async_session() as session:
            session.push_image(picture("square"))
            session.push_text(QUESTION)
            result = await session.commit(**TOKENS)
            assert result.token_ids == at_once(plain, QUESTION, [picture("square")])
            session.push_text("go on")
            stream = session.stream(max_new_tokens=60)
            with pytest.raises(RuntimeError, match="not there yet"):
                _ = stream.result

            async def read() -> None:
                async for _ in stream:
                    pass

            task = asyncio.create_task(read())
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert vlm.audit().live == {}

    asyncio.run(scene())


def test_the_whole_comes_first_then_the_centre():
    tile = Tile({"pixel_values": np.zeros((1, 3, 2, 2), np.float32)}, 1)
    image = PreparedImage("", (tile,) * 10, cut=(3, 3))
    order = encoding_order(image)
    assert order[:2] == [9, 4]
    assert sorted(order[2:6]) == [1, 3, 5, 7]
    assert sorted(order[6:]) == [0, 2, 6, 8]
    assert encoding_order(PreparedImage("", (tile,))) == [0]
