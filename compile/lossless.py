"""Whether speculation changes a token: requests answered plainly and speculatively, alone and in batches."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..engines.errors import ConfigError
from ..runtime.processing.golden import IMAGE_FILE
from ..runtime.processing.prompt import Prompt
from ..runtime.session import Model, Request, load
from ..runtime.speculation.drafter import Draft, DraftState, Floats
from ..runtime.speculation.journal import Journal, ReplayState
from ..runtime.speculation.lookup import History
from ..runtime.speculation.prefix import agreement
from ..runtime.speculation.settings import read_settings
from ..runtime.speculation.speculator import Speculator
from .predictor.requests import read_file

BATCH = 4
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1}
TEXTS = ("What is in the picture?", "Describe it in detail.", "Read all text.", "one two three one two three one two")


@dataclass(frozen=True)
class Divergence:
    """The first token that differs: its request, what way of answering, its position in the answer.

    `margin`: by how much the plain run's token leads the other one in the logits of a plain pass.
    """

    request: int
    way: str
    position: int
    plain_token: int | None
    speculative_token: int | None
    margin: float
    journal: str


@dataclass(frozen=True)
class Lossless:
    """`answers` compared, `tokens` in them, `drafted` and `accepted` tokens on the way, and the first divergence."""

    requests: int
    answers: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    divergence: Divergence | None = None


@dataclass
class ForcedDrafter:
    """Drafts the known answers up to a random length, then wrong tokens: every kind of acceptance and rollback."""

    answers: Sequence[Sequence[int]]
    vocabulary: int
    name: str = "forced"
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    opened: int = 0

    def open(self, prompt: Prompt, features: Floats | None) -> ReplayState:
        self.opened += 1
        return ReplayState(self.opened - 1)

    def propose(self, states: Sequence[DraftState], windows: Sequence[int], confidence: float) -> list[Draft]:
        drafts = []
        for state, window in zip(states, windows, strict=True):
            assert isinstance(state, ReplayState)
            tokens = list(self.answers[state.request][state.at : state.at + window])
            for index in range(int(self.generator.integers(0, window + 1)), len(tokens)):
                tokens[index] = (tokens[index] + 1) % self.vocabulary
            drafts.append(Draft(self.name, tuple(tokens), (1.0,) * len(tokens)))
        return drafts


def verify_lossless(
    bundle: str | os.PathLike[str],
    prompts: str | os.PathLike[str] | None = None,
    *,
    threads: int | None = None,
    max_new_tokens: int = 48,
    settings: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Lossless:
    """Answer requests with and without speculation, greedily and sampled, alone and in batches of four.

    Speculation runs with the bundle's own drafters and policy, and with drafts forced to be right for a random length.
    `prompts`: a file of requests as in docs/predictor.md; the bundle's golden picture with a few questions when None.
    Stops at the first divergence.
    """
    chosen = read_settings(settings)
    if chosen.speculation.mode != "exact":
        raise ConfigError(
            f"mode: found {chosen.speculation.mode!r}; only 'exact' promises the tokens of plain decoding"
        )
    with load(bundle, threads=threads, settings=chosen) as model:
        requests = _requests(model, Path(bundle), prompts, max_new_tokens)
        return _Replay(model, requests).run(progress)


class _Replay:
    """All ways of answering some requests with one model."""

    def __init__(self, model: Model, requests: Sequence[Request]) -> None:
        self.model, self.requests = model, requests
        self.report = Lossless(len(requests))

    def run(self, progress: Callable[[int, int], None]) -> Lossless:
        total, done = 2 * len(self.requests), 0
        for sampling in ({}, SAMPLED):
            asked = [
                replace(request, options={**request.options, **sampling, "seed": number})
                for number, request in enumerate(self.requests)
            ]
            plain = []
            for request in asked:
                options = {**request.options, "speculate": False}
                plain.append(self.model.generate_batch([replace(request, options=options)])[0].token_ids)
                done += 1
                progress(done, total)
            way = "sampled" if sampling else "greedy"
            own = self.model.speculator
            for size in (1, BATCH):
                for start in range(0, len(asked), size):
                    part = slice(start, start + size)
                    forced = self._forced(plain[part])
                    for name, speculator in ((f"{way}, batch {size}", own), (f"{way}, batch {size}, forced", forced)):
                        self.model.speculator = speculator
                        self._compare(name, start, asked[part], plain[part])
                        self.model.speculator = own
                        if self.report.divergence is not None:
                            return self.report
        return self.report

    def _forced(self, answers: Sequence[Sequence[int]]) -> Speculator:
        own, entry = self.model.speculator, self.model.manifest.model
        settings = replace(own.settings, adaptive=False, confidence_thresh=0.0, warmup_steps=0, enabled=True)
        drafters = [ForcedDrafter(answers, entry.vocabulary)]
        return Speculator(settings, drafters, {}, self.model.min_width, History(0))

    def _compare(self, way: str, first: int, asked: Sequence[Request], plain: Sequence[tuple[int, ...]]) -> None:
        journal = Journal()
        results = self.model.generate_batch(asked, journal)
        for number, (result, wanted) in enumerate(zip(results, plain, strict=True)):
            stats = result.stats.speculation
            self.report = replace(
                self.report,
                answers=self.report.answers + 1,
                tokens=self.report.tokens + len(wanted),
                drafted=self.report.drafted + (stats.drafted if stats else 0),
                accepted=self.report.accepted + (stats.accepted if stats else 0),
            )
            if result.token_ids != wanted and self.report.divergence is None:
                found = self._divergence(first + number, way, asked[number], wanted, result.token_ids, journal)
                self.report = replace(self.report, divergence=found)

    def _divergence(
        self,
        number: int,
        way: str,
        request: Request,
        plain: Sequence[int],
        speculative: Sequence[int],
        journal: Journal,
    ) -> Divergence:
        position = agreement(plain, speculative)
        expected = plain[position] if position < len(plain) else None
        found = speculative[position] if position < len(speculative) else None
        margin = 0.0
        if expected is not None and found is not None:
            logits = self.model.score(request, plain[:position])
            margin = float(logits[expected] - logits[found])
        return Divergence(number, way, position, expected, found, margin, journal.dumps())


def _requests(model: Model, bundle: Path, prompts: str | os.PathLike[str] | None, max_new_tokens: int) -> list[Request]:
    options = {"max_new_tokens": max_new_tokens}
    if prompts is not None:
        return [
            Request(
                r.entry.messages, r.entry.prompt, r.images, {"max_new_tokens": r.entry.max_new_tokens or max_new_tokens}
            )
            for r in read_file(Path(prompts))
        ]
    if not model.sees:
        return [Request(prompt=text, options=options) for text in TEXTS]
    return [Request(messages=text, images=[bundle / IMAGE_FILE], options=options) for text in TEXTS]
