"""Streaming text, stop strings, chat templates: beside `tokenizers` and transformers."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speceyes.engines.errors import BundleError, PromptError, RequestError
from speceyes.runtime.processing import StopMatcher, Tokenizer
from speceyes.runtime.processing.chat_template import ChatTemplate
from speceyes.runtime.processing.config import TextConfig
from speceyes.runtime.processing.decoders import build_decoder
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from .checkpoints import IDEFICS3_TEMPLATE
from .processors import (
    LLAVA_TEMPLATE,
    QWEN_TEMPLATE,
    TEXT_TEMPLATE,
    llama_tokenizer,
    qwen_tokenizer,
    unigram_tokenizer,
)

KINDS = {
    "byte_level": qwen_tokenizer,
    "llama": lambda: llama_tokenizer([]),
    "gemma": lambda: llama_tokenizer([], strip=False),
    "unigram": unigram_tokenizer,
}
TEXT = TextConfig(special_tokens={}, content="string")


@cache
def load(kind: str) -> tuple[Tokenizer, Backend]:
    data = KINDS[kind]().backend_tokenizer.to_str().encode()
    return Tokenizer(data, TEXT), Backend.from_buffer(data)


def stream(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    text = tokenizer.stream(skip_special_tokens)
    return [text.push(id) for id in ids] + [text.finish()]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stream_equals_decode_of_random_ids(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer, backend = load(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocabulary_size + 3), max_size=24))
    assert "".join(stream(tokenizer, ids, skip)) == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stream_equals_decode_of_random_bytes(kind: str, data: st.DataObject) -> None:
    tokenizer, backend = load(kind)
    names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    if kind == "byte_level":
        from tokenizers.pre_tokenizers import ByteLevel

        names = dict(enumerate(sorted(ByteLevel.alphabet())))
    pieces = st.one_of(st.text(max_size=3).map(str.encode), st.binary(max_size=3))
    raw = b"".join(data.draw(st.lists(pieces, max_size=8)))
    ids = [id for byte in raw if (id := tokenizer.token_to_id(names[byte])) is not None]
    assert "".join(stream(tokenizer, ids)) == backend.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_stream_equals_decode_of_text(kind: str, text: str) -> None:
    tokenizer, backend = load(kind)
    ids = tokenizer.encode(text)
    assert ids == backend.encode(text).ids
    assert "".join(stream(tokenizer, ids)) == backend.decode(ids) == tokenizer.decode(ids)


def test_characters_come_whole() -> None:
    tokenizer, _ = load("byte_level")
    text = "Café 東京 🗼 done"
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)
    assert {"é", "東", "京", "🗼"} <= set("".join(pieces)) and not pieces[-1]


def test_unfinished_character_is_given_at_the_end() -> None:
    tokenizer, backend = load("byte_level")
    ids = tokenizer.encode("🗼")[:-1]
    pieces = stream(tokenizer, ids)
    assert pieces[:-1] == [""] * len(ids)
    assert pieces[-1] == backend.decode(ids) == "�"


def test_words_come_with_their_spaces() -> None:
    tokenizer, _ = load("llama")
    pieces = stream(tokenizer, tokenizer.encode("the lazy dog"))
    assert "".join(pieces) == "the lazy dog"
    assert pieces[1].startswith("the") or "the".startswith(pieces[1])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stream_rewinds(kind: str, data: st.DataObject) -> None:
    tokenizer, backend = load(kind)
    ids = st.lists(st.integers(0, tokenizer.vocabulary_size - 1), max_size=10)
    kept, dropped, followed = data.draw(ids), data.draw(ids), data.draw(ids)
    text = tokenizer.stream()
    given_text = "".join(text.push(id) for id in kept)
    copy, state = text.copy(), text.state
    for id in dropped:
        text.push(id)
    text.state = state
    expected = backend.decode(kept + followed)
    for branch in (text, copy):
        rest = "".join([branch.push(id) for id in followed] + [branch.finish()])
        assert given_text + rest == expected


def test_decoder_that_cannot_be_streamed_is_refused() -> None:
    wordpiece = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(BundleError, match=r"WordPiece.*cannot be streamed"):
        build_decoder(wordpiece)
    with pytest.raises(BundleError, match="no decoder"):
        build_decoder(None)


def test_strip_without_fuse_strips_every_token() -> None:
    backend = Backend.from_buffer(KINDS["llama"]().backend_tokenizer.to_str().encode())
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 2, 0)])
    tokenizer = Tokenizer(backend.to_str().encode(), TEXT)
    ids = backend.encode("the lazy  dog").ids
    assert "".join(stream(tokenizer, ids)) == backend.decode(ids) == "thelazydog"


def cut(text: str, at: list[int]) -> list[str]:
    bounds = [0, *sorted(i % (len(text) + 1) for i in at), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def match(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher, out = StopMatcher(stops), ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        out += text
        if stopped:
            return out, True
    return out + matcher.finish(), False


def test_stop_string_ends_the_text_before_it() -> None:
    assert match(["\n\n", "User:"], ["It is red", ".\n", "Us", "er: go", " on"]) == ("It is red.\n", True)
    assert match(["END"], ["an EN", "tity EN"]) == ("an ENtity EN", False)


def test_text_is_held_back_no_longer_than_needed() -> None:
    matcher = StopMatcher(["</answer>"])
    assert matcher.push("42 </ans") == ("42 ", False)
    assert matcher.push("wers and") == ("</answers and", False)
    assert matcher.push(" more <") == (" more ", False)
    assert (matcher.held, matcher.finish(), matcher.held) == ("<", "<", "")


def test_stop_string_complete_first_wins_and_the_longest_of_those() -> None:
    assert match(["abc", "b"], ["xabc"]) == ("xa", True)
    assert match(["b", "ab"], ["xab"]) == ("x", True)


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    text=st.text("abc", max_size=20),
    at=st.lists(st.integers(0, 100), max_size=6),
)
def test_stop_does_not_depend_on_the_pieces(stops: list[str], text: str, at: list[int]) -> None:
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text, False
    if ends:
        longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        expected = text[: ends[0] - longest], True
    assert match(stops, cut(text, at)) == match(stops, [text]) == expected


@settings(max_examples=200, deadline=None)
@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1), text=st.text("abc", max_size=20))
def test_held_text_begins_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    for char in text:
        if matcher.push(char)[1]:
            return
        assert not matcher.held or any(stop.startswith(matcher.held) for stop in stops)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match=r"stop: found \['', 'a'\]"):
        StopMatcher(["", "a"])


def test_matcher_copies_are_independent() -> None:
    matcher = StopMatcher(["stop"])
    matcher.push("a st")
    copy = matcher.copy()
    assert copy.push("op") == ("", True)
    assert matcher.push("ill") == ("still", False)


CONVERSATION = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What <b>is</b> “this”?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A dog.\n"}]},
    {"role": "user", "content": [{"type": "text", "text": " And that? "}]},
]
PLAIN = [{"role": "user", "content": " a & b "}, {"role": "assistant", "content": "c"}]
CALLS = (
    "{%- set ns = namespace(n=0) -%}\n{%- for m in messages -%}\n  {%- if loop.index > 2 %}{% break %}{% endif %}\n"
    "  {%- set ns.n = ns.n + 1 %}\n{{ ns.n }}: {{ m | tojson(indent=1) }} {{ {'ö': '<é>'} | tojson }}\n"
    "  {{- dict(a=1) }} {{ tools is none }} {{ documents is none }}\n{%- endfor %}{{ strftime_now('%Y') | length }}"
)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (IDEFICS3_TEMPLATE, CONVERSATION),
        (LLAVA_TEMPLATE, CONVERSATION),
        (QWEN_TEMPLATE, CONVERSATION),
        (QWEN_TEMPLATE, PLAIN),
        (TEXT_TEMPLATE, PLAIN),
        (CALLS, CONVERSATION),
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_template_renders_as_transformers(template: str, messages: list, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(template).render(messages, tokens, add_generation_prompt)
    rendered, _ = render_jinja_template(
        conversations=[messages], chat_template=template, add_generation_prompt=add_generation_prompt, **tokens
    )
    assert ours == rendered[0]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "fails on these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ namespace(_x=1) }}", "_x"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(99999999) %}{% endfor %}", "Range too big"),
    ],
)
def test_template_that_refuses_or_misbehaves(template: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        ChatTemplate(template).render(PLAIN, {})


def test_broken_template_is_a_bundle_error() -> None:
    with pytest.raises(BundleError, match=r"chat_template\.jinja is not a template.*endfor"):
        ChatTemplate("{% for m in messages %}")


def test_tokenizer_never_truncates_or_pads(tmp_path: Path) -> None:
    backend = KINDS["llama"]().backend_tokenizer
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer(backend.to_str().encode(), TEXT)
    text = "the quick brown fox jumps over the lazy dog"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(PromptError, match="cannot be encoded"):
        load("llama")[0].encode("a\ud800b")


def test_tokenizer_file_that_is_none_is_refused() -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(b"{}", TEXT)


def test_special_ids_and_tokens() -> None:
    tokenizer, _ = load("llama")
    bos = tokenizer.token_to_id("<s>")
    assert bos in tokenizer.special_ids and tokenizer.id_to_token(bos) == "<s>"
    assert tokenizer.id_to_token(10**6) is None and tokenizer.token_to_id("no such token") is None
    assert tokenizer.encode("the", add_special_tokens=False) == tokenizer.encode("the")[1:]
