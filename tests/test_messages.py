"""Conversations that cannot be answered are refused with the field, the value and what is allowed."""

from typing import Any

import pytest
from speceyes.engines.errors import PromptError
from speceyes.runtime.processing import Processor
from speceyes.runtime.processing.messages import read_messages

from .processors import bundle, picture

IMAGE = {"type": "image"}
TEXT = {"type": "text", "text": "what?"}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is empty; at least one"),
        (7, "messages is a int; allowed: a str or a list"),
        (["hello"], r"messages\[0\] is a str; allowed: an object with role and content"),
        ([{"role": "usr", "content": "a"}], r"messages\[0\].role is 'usr'; did you mean 'user'"),
        ([{"role": "tool", "content": "a"}], r"messages\[0\].role is 'tool'; known: assistant, system, user"),
        ([{"role": "user"}], r"messages\[0\] lacks 'content'"),
        ([{"content": "a"}], r"messages\[0\] lacks 'role'"),
        ([{"role": "user", "contents": "a"}], r"unknown key 'contents'; did you mean 'content'"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is a NoneType; allowed: a str or a list"),
        ([{"role": "user", "content": []}], r"messages\[0\].content is empty"),
        (user("a"), r"messages\[0\].content\[0\] is a str; allowed: an object"),
        (user({"text": "a"}), r"content\[0\].type is None; known: image, text"),
        (user({"type": "image_url", "image_url": "a"}), r"content\[0\].type is 'image_url'; did you mean 'image'"),
        (user({"type": "text", "txt": "a"}), r"content\[0\] has the unknown key 'txt'; did you mean 'text'"),
        (user({"type": "text"}), r"content\[0\] lacks 'text'"),
        (user({"type": "text", "text": 3}), r"content\[0\].text is a int; allowed: a str"),
        (user({"type": "image", "url": "a"}), r"unknown key 'url'; known: image, type"),
        (user(TEXT, IMAGE), r"messages\[0\].content\[1\] is a placeholder without an image; images= holds 0"),
    ],
)
def test_refused(messages: Any, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        read_messages(messages, [], "any")


def test_image_without_a_placeholder() -> None:
    said = r"images\[1\] has no placeholder: the messages hold 1 and images= 2; add \{\"type\": \"image\"\}"
    with pytest.raises(PromptError, match=said):
        read_messages(user(IMAGE, TEXT), [b"a", b"b"], "any")


def test_images_are_taken_in_order_beside_inline_ones() -> None:
    messages = [*user(IMAGE, {"type": "image", "image": b"inline"}), *user(TEXT, IMAGE)]
    found = read_messages(messages, [b"first", b"second"], "any").images
    assert found == [
        ("images[0]", b"first"),
        ("messages[0].content[1].image", b"inline"),
        ("images[1]", b"second"),
    ]


def test_the_template_never_sees_a_source() -> None:
    shown = read_messages(user({"type": "image", "image": b"secret"}), [], "any").messages
    assert shown == [{"role": "user", "content": [{"type": "image", "image": "(image)"}]}]


def test_content_takes_the_form_that_the_template_renders() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [TEXT, {**TEXT, "text": "b"}]}]
    parts = [[{"type": "text", "text": "a"}], [TEXT, {**TEXT, "text": "b"}]]
    contents = {
        kind: [message["content"] for message in read_messages(messages, [], kind).messages]
        for kind in ("any", "parts", "string")
    }
    assert contents == {"any": ["a", parts[1]], "parts": parts, "string": ["a", "what?b"]}


def test_string_is_a_user_turn() -> None:
    assert read_messages("hi", [], "any").messages == [{"role": "user", "content": "hi"}]
    shown = read_messages("hi", [b"a", b"b"], "parts")
    assert shown.messages == [{"role": "user", "content": [IMAGE, IMAGE, {"type": "text", "text": "hi"}]}]
    assert [field for field, _ in shown.images] == ["images[0]", "images[1]"]


@pytest.mark.parametrize("messages", ["what?", user(IMAGE, TEXT)])
def test_image_for_a_text_only_model(messages: Any) -> None:
    with pytest.raises(PromptError, match=r"images\[0\] is an image, but this model's messages take text alone"):
        Processor.load(bundle("llama")).prepare(messages, images=[picture(8, 8)])


def test_inline_image_for_a_text_only_model() -> None:
    with pytest.raises(PromptError, match=r"messages\[0\].content holds an image.*text alone"):
        Processor.load(bundle("llama")).prepare(user({"type": "image", "image": picture(8, 8)}))


def test_image_beside_a_prompt_for_a_text_only_model() -> None:
    with pytest.raises(PromptError, match=r"images\[0\] is an image, but this model reads text alone"):
        Processor.load(bundle("gpt2")).prepare(prompt="a", images=[picture(8, 8)])


def test_placeholder_written_into_the_text() -> None:
    said = r"2 placeholders \(<image>\), but 1 images are given: a placeholder without an image"
    with pytest.raises(PromptError, match=said):
        Processor.load(bundle("idefics3")).prepare("is <image> a tag?", images=[picture(8, 8)])


@pytest.mark.parametrize(
    ("prompt", "count", "said"),
    [
        ("no placeholder", 1, "0 placeholders .* but 1 images are given: an image without a placeholder"),
        ("<image><image>", 1, "2 placeholders .* but 1 images are given: a placeholder without an image"),
        ("<image>", 0, "1 placeholders .* but 0 images are given"),
    ],
)
def test_prompt_whose_placeholders_do_not_match(prompt: str, count: int, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        Processor.load(bundle("idefics3")).prepare(prompt=prompt, images=[picture(8, 8)] * count)


def test_messages_and_prompt_exclude_each_other() -> None:
    ours = Processor.load(bundle("gpt2"))
    for arguments in ({}, {"messages": "a", "prompt": "b"}):
        with pytest.raises(PromptError, match="exactly one of messages and prompt"):
            ours.prepare(**arguments)


def test_empty_prompt() -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        Processor.load(bundle("gpt2")).prepare(prompt="")


def test_one_image_in_place_of_a_list() -> None:
    with pytest.raises(PromptError, match="images is a str; allowed: a list of images"):
        Processor.load(bundle("idefics3")).prepare("what?", images="photo.png")
    with pytest.raises(PromptError, match="images is a Image; allowed: a list of images"):
        Processor.load(bundle("idefics3")).prepare("what?", images=picture(8, 8))  # type: ignore[arg-type]


def test_messages_without_a_chat_template() -> None:
    with pytest.raises(PromptError, match="no chat template; pass the text as prompt="):
        Processor.load(bundle("gpt2")).prepare("hello")


def test_template_that_refuses_the_system_role() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    with pytest.raises(PromptError, match="refuses these messages: no system role"):
        Processor.load(bundle("llama")).prepare(messages)
