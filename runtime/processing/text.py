"""Token ids from text and text from token ids, equal to transformers'."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from ...engines.errors import BundleError, PromptError
from .chat_template import ChatTemplate
from .config import TextConfig
from .decoders import build_decoder
from .stream import TextStream


class Tokenizer:
    """tokenizer.json and the chat template beside it.

    `special_ids` are the ids that `decode` leaves out; `special_tokens` the named ones (bos_token, eos_token, …).
    """

    def __init__(self, data: bytes, config: TextConfig, template: bytes | None = None) -> None:
        try:
            self._backend = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises plain Exception
            raise BundleError(f"tokenizer/tokenizer.json cannot be read: {error}; compile the bundle again") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = config.special_tokens
        self.chat_template = ChatTemplate(_decode(template)) if template is not None else None
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        decoder = self._backend.decoder
        self.decoder = build_decoder(json.loads(decoder.__getstate__()) if decoder is not None else None)

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of the whole text, never truncated. Raises PromptError for text that is not valid Unicode."""
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeError) as error:
            raise PromptError(f"the text cannot be encoded: {error}; lone surrogates are not text") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; an id that no token has gives none."""
        return str(self._backend.decode([int(id) for id in ids], skip_special_tokens=skip_special_tokens))

    def id_to_token(self, id: int) -> str | None:
        """The token as it stands in the vocabulary; None when no token has this id."""
        token: str | None = self._backend.id_to_token(id)
        return token

    def token_to_id(self, token: str) -> int | None:
        id: int | None = self._backend.token_to_id(token)
        return id

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A fresh incremental decoder."""
        return TextStream(self, skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation as the prompt's text. Raises PromptError without a template or when it refuses."""
        if self.chat_template is None:
            raise PromptError("this model has no chat template; pass the text as prompt= instead of messages")
        return self.chat_template.render(messages, self.special_tokens, add_generation_prompt)


def _decode(template: bytes) -> str:
    try:
        return template.decode()
    except UnicodeDecodeError as error:
        raise BundleError(f"tokenizer/chat_template.jinja is not UTF-8: {error}; compile the bundle again") from error
