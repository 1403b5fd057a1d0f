"""Frames of a video: spread over its time, repeated ones encoded once."""

import pytest
import speceyes
from hypothesis import given
from hypothesis import strategies as st
from speceyes.engines.errors import RequestError
from speceyes.runtime.perception.video import Frame, make_clip, sample_frames

from .bundles import bundle, picture


def frames_at(*seconds: float) -> list[Frame]:
    return [Frame(second, f"{second:g}.png") for second in seconds]


def test_frames_are_spread_over_the_time_not_over_their_number() -> None:
    frames = frames_at(*(n / 10 for n in range(50)), 10, 20, 30, 40)
    assert [frame.seconds for frame in sample_frames(frames, 4)] == [4.9, 10, 20, 30]
    assert [frame.seconds for frame in sample_frames(frames_at(0, 1, 2, 3, 4, 5, 6, 7), 4)] == [1, 3, 4, 6]
    assert sample_frames(frames[:3], 4) == frames[:3]


@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=60), st.integers(1, 70))
def test_a_sample_keeps_the_order_and_the_budget(seconds: set[int], budget: int) -> None:
    frames = frames_at(*sorted(seconds))
    chosen = [frame.seconds for frame in sample_frames(frames, budget)]
    assert len(chosen) == min(budget, len(frames))
    assert chosen == sorted(set(chosen))


@pytest.mark.parametrize(
    ("seconds", "budget", "message"),
    [
        ((), 3, "frames: found none"),
        ((0, 1), 0, "budget: found 0"),
        ((0, 2, 2), 3, r"frames\[2\].seconds: found 2 behind 2; times have to rise"),
    ],
)
def test_what_is_no_video_is_refused(seconds: tuple[float, ...], budget: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        sample_frames(frames_at(*seconds), budget)


def test_a_frame_that_is_shown_again_is_encoded_once() -> None:
    vlm, alone = (speceyes.load(bundle("idefics3"), settings={"memory": {"cache_size": c}}) for c in ("4MB", 0))
    frames = [Frame(float(n), picture("square", n // 2)) for n in range(4)]
    clip = make_clip(frames, "what moves?")
    assert [part["text"] for part in clip.messages[0]["content"][::2]] == [
        *(f"Frame from 00:0{n}:" for n in range(4)),
        "what moves?",
    ]
    result = vlm.generate(clip.messages, images=clip.images, max_new_tokens=10)
    assert result.stats.reused_tiles == result.stats.tiles // 2
    assert result.token_ids == alone.generate(clip.messages, images=clip.images, max_new_tokens=10).token_ids
    plain = make_clip(frames, "what moves?", 2, times=False)
    assert [part["type"] for part in plain.messages[0]["content"]] == ["image", "image", "text"]
