"""One request on its way: what was asked, what was chosen so far, and the text that may leave."""

import secrets
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .cache import Hidden
from .options import Options
from .prefix import Content
from .processing.prompt import Prompt
from .processing.stream import StopMatcher, TextStream
from .processing.text import Tokenizer
from .results import FinishReason, Result, Statistics
from .speculation.acceptance import Chooser
from .speculation.speculator import RequestSpeculation


class Committed(NamedTuple):
    """Tokens that were taken, and the text that they settle."""

    tokens: Sequence[int]
    text: str


class Row:
    """A request. Only committed tokens reach it, so its text, stop strings and penalties never roll back."""

    def __init__(
        self, prompt: Prompt, options: Options, tokenizer: Tokenizer, vocabulary: int, eos: frozenset[int]
    ) -> None:
        self.prompt, self.options, self._eos = prompt, options, eos
        self.number = 0
        self.seed = secrets.randbits(63) if options.seed is None else options.seed
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.finish: FinishReason | None = None
        self.speculation: RequestSpeculation | None = None
        self.stats = Statistics(len(prompt.token_ids), int((prompt.feature_index >= 0).sum()), len(prompt.tiles))
        self._text = TextStream(tokenizer)
        self._stop = StopMatcher(options.stop)
        self._seen = np.zeros(vocabulary, np.bool_)
        self._seen[prompt.token_ids] = True

    def follow(self, speculation: RequestSpeculation) -> None:
        """Speculate, if any drafter follows the request."""
        if speculation.states:
            self.speculation = speculation
            self.stats.speculation = speculation.statistics

    @cached_property
    def content(self) -> Content:
        """What the prompt puts into the cache."""
        return Content.of(self.prompt)

    def content_in(self, length: int) -> Content:
        """What the first `length` tokens in the cache are: the prompt's and the answer's."""
        answered = self.tokens[: max(length - len(self.content), 0)]
        return self.content.followed_by(answered, self.prompt.next_position).cut(length)

    @property
    def position(self) -> int:
        """Position of the last committed token, which the next pass appends."""
        return self.prompt.next_position + len(self.tokens) - 1

    @property
    def room(self) -> int:
        """Tokens that the answer may still have."""
        return self.options.max_new_tokens - len(self.tokens)

    def chooser(self) -> Chooser:
        """What decides the next tokens beside their logits."""
        return Chooser(self.options, self._seen, self.seed, len(self.tokens))

    def commit(self, tokens: Sequence[int], hidden: Hidden) -> Committed:
        """Take `tokens` up to the one that ends the answer; `hidden` [at least len(tokens), hidden] chose them."""
        text = ""
        for count, token in enumerate(tokens, 1):
            text += self._push(token)
            if self.finish is not None:
                tokens = tokens[:count]
                break
        self.pieces.append(text)
        if self.speculation is not None:
            self.speculation.commit(tokens, hidden[: len(tokens)])
        return Committed(tokens, text)

    def end(self, reason: FinishReason) -> None:
        """Close the row with the text that was held back."""
        self.pieces.append(self._release(reason))

    def result(self) -> Result:
        return Result("".join(self.pieces), tuple(self.tokens), self.finish or "cancelled", self.seed, self.stats)

    def _push(self, token: int) -> str:
        self.tokens.append(token)
        self._seen[token] = True
        self.stats.new_tokens += 1
        if token in self._eos:
            return self._release("stop")
        piece, stopped = self._stop.push(self._text.push(token))
        if stopped:
            self.finish = "stop"
        elif not self.room:
            return piece + self._release("length")
        return piece

    def _release(self, reason: FinishReason) -> str:
        piece, stopped = self._stop.push(self._text.finish())
        self.finish = reason
        return piece if stopped else piece + self._stop.finish()
