"""Answers of fp32 bundles have the very tokens of transformers' greedy `generate`."""

import pytest
from speceyes.runtime.session import Request

from .bundles import SHAPES, TEXT, VISION, ask, expected_tokens, model, picture

COUNT = 48
QUESTION = "what is written in the picture?"


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_image(family, shape):
    image = picture(shape)
    found = model(family).generate(QUESTION, images=[image], max_new_tokens=COUNT)
    assert list(found.token_ids) == expected_tokens(family, QUESTION, [image], COUNT)


@pytest.mark.parametrize("family", VISION)
def test_two_images(family):
    images = [picture("portrait", 1), picture("landscape", 2)]
    found = model(family).generate(QUESTION, images=images, max_new_tokens=COUNT)
    assert list(found.token_ids) == expected_tokens(family, QUESTION, images, COUNT)


@pytest.mark.parametrize("family", VISION)
def test_text_alone_in_a_vision_family(family):
    found = model(family).generate(QUESTION, max_new_tokens=COUNT)
    assert list(found.token_ids) == expected_tokens(family, QUESTION, [], COUNT)


@pytest.mark.parametrize("family", VISION)
def test_several_turns(family):
    images = [picture("square", 3), picture("portrait", 4)]
    turns = [
        *ask("what is the total?", 1),
        {"role": "assistant", "content": [{"type": "text", "text": "12.50"}]},
        *ask("and the tax in this one?", 1),
    ]
    found = model(family).generate(turns, images=images, max_new_tokens=COUNT)
    assert list(found.token_ids) == expected_tokens(family, "", images, COUNT, turns)


@pytest.mark.parametrize("family", TEXT)
@pytest.mark.parametrize("text", ["the quick brown fox", "total 12.50 tax 1.25 paid in cash at the corner shop: " * 3])
def test_completion(family, text):
    found = model(family).generate(prompt=text, max_new_tokens=COUNT)
    assert list(found.token_ids) == expected_tokens(family, text, [], COUNT)


@pytest.mark.parametrize("family", VISION)
def test_ragged_batch_of_vision(family):
    asked = [
        ("what is the total?", [picture("portrait", 5)], COUNT),
        ("describe the image.", [], 9),
        ("which one is a house by the sea?", [picture("landscape", 6), picture("square", 7)], COUNT),
        ("the date and the name in the table", [picture("square", 8)], 23),
    ]
    requests = [Request(text, images=images, options={"max_new_tokens": count}) for text, images, count in asked]
    found = [list(result.token_ids) for result in model(family).generate_batch(requests)]
    assert found == [expected_tokens(family, *each) for each in asked]
    assert sum(len(tokens) for tokens in found) > COUNT


@pytest.mark.parametrize("family", TEXT)
def test_ragged_batch_of_text(family):
    asked = [
        ("a blue circle", COUNT),
        ("the", 7),
        ("0123456789 items, prices, dates and names", COUNT),
        ("tax 1.25", 30),
    ]
    requests = [Request(prompt=text, options={"max_new_tokens": count}) for text, count in asked]
    found = [list(result.token_ids) for result in model(family).generate_batch(requests)]
    assert found == [expected_tokens(family, text, [], count) for text, count in asked]


def test_answers_reach_the_wanted_length():
    lengths = [
        len(model(family).generate(QUESTION, images=[picture("square")], max_new_tokens=COUNT).token_ids)
        for family in VISION
    ]
    assert max(lengths) == COUNT, f"every answer ended early ({lengths}): the comparison above proves little"
