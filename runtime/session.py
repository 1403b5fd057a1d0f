"""A loaded bundle: `load`, then `generate`, `generate_batch` or `stream`."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..engines.bundle import Bundle
from ..engines.engine import GraphCounts
from ..engines.errors import BundleError, ConfigError, ContextLengthError, RequestError
from ..engines.manifest import EngineEntry, Manifest
from ..engines.target import Target, choose_target
from .cache import Logits
from .clock import time_passes
from .decoder import Decoder
from .generation import Engines, generate, score
from .memory.pool import Audit, Pool
from .options import Options
from .perception.asynchronous import AsyncSession
from .perception.features import FeatureStore
from .perception.session import Session
from .processing import ImageSource, Processor
from .processing.prompt import Prompt
from .rehearsal import Rehearsal, rehearse
from .requests import Messages, Stream
from .requests import Request as Request
from .results import Result
from .row import Row
from .speculation.costs import refresh
from .speculation.drafter import Drafter
from .speculation.journal import Journal
from .speculation.lookup import NAME as LOOKUP
from .speculation.lookup import History, LookupDrafter
from .speculation.predictor import NAME as PREDICTOR
from .speculation.predictor import PredictorDrafter
from .speculation.settings import FILE as SETTINGS_FILE
from .speculation.settings import Memory, Settings, read_settings
from .speculation.speculator import Speculator
from .speculation.statistics import SpeculationStatistics
from .threads import choose_threads
from .vision import Vision

# Tokens in the cache, passes of a width, and seconds, for measuring the costs of passes again at load.
_PAST, _REPEATS, _BUDGET = 256, 20, 0.05


class Model:
    """The engines of a bundle, ready to answer. Several threads may use one model."""

    def __init__(
        self, bundle: Bundle, target: Target, threads: int | None, passed_over: dict[str, str], settings: Settings
    ) -> None:
        self.manifest: Manifest = bundle.manifest
        self.target = target.name
        self.passed_over = passed_over
        self.processor = Processor.load(bundle.path)
        entries = self.manifest.targets[target.name].engines
        if "decoder" not in entries:
            raise BundleError(f"targets.{target.name}.engines: found {', '.join(entries)}; a decoder is needed")
        self._loaded = {
            part: target.load(bundle.path / entry.path, choose_threads(part, entry, threads), entry)
            for part, entry in entries.items()
        }
        self._decoder = decoder = entries["decoder"]
        vision = self._loaded.get("vision")
        model = self.manifest.model
        self.pool = Pool(settings.memory.cache_size, settings.memory.release_delay)
        engine = Decoder(self._loaded["decoder"], model, decoder.min_width, decoder.seams, self.pool, decoder.max_width)
        self._costs = _measure_again(engine, decoder.cost_ms)
        self._engines = Engines(
            engine,
            Vision(vision, model.hidden, self._make_store(entries["vision"], settings.memory)) if vision else None,
            self.make_speculator(settings),
        )

    def generate(
        self,
        messages: Messages | None = None,
        *,
        prompt: str | None = None,
        images: Sequence[ImageSource] = (),
        **options: Any,
    ) -> Result:
        """Answer a conversation.

        `messages`: a list of `{"role", "content"}`, or a text that stands for one user turn with `images` before it.
        `prompt`: raw text instead, without the chat template. `images`: paths, bytes, PIL images or uint8 arrays for
        the image placeholders, in order. Options are the fields of `Options`. Raises RequestError or one of its kinds.
        """
        return self.stream(messages, prompt=prompt, images=images, **options).result

    def stream(
        self,
        messages: Messages | None = None,
        *,
        prompt: str | None = None,
        images: Sequence[ImageSource] = (),
        **options: Any,
    ) -> Stream:
        """As `generate`, giving the text piece by piece. What is wrong with the request is raised here, not later."""
        row = self._row(Request(messages, prompt, images, options))
        return Stream(row, (piece for _, piece in generate(self._engines, [row]) if piece))

    def generate_batch(self, requests: Sequence[Request], journal: Journal | None = None) -> list[Result]:
        """Answer several requests in shared decoding steps; each answer equals the one it would get alone.

        `journal`: takes down what every round did.
        """
        if not requests:
            return []
        rows = [self._row(request) for request in requests]
        for _ in generate(self._engines, rows, journal):
            pass
        return [row.result() for row in rows]

    def audit(self) -> Audit:
        """What the pool holds now. Between requests nothing is `live`."""
        return self.pool.audit()

    def graphs(self) -> dict[str, GraphCounts]:
        """By engine what became of captured steps; empty on a target without graphs."""
        return {part: engine.graphs for part, engine in self._loaded.items() if engine.graphs is not None}

    def rehearse(
        self, batches: Sequence[int] = (1,), tokens: int = 1024, progress: Callable[[int, int], None] | None = None
    ) -> Rehearsal:
        """Run every shape of pass that requests of up to `tokens` tokens can come to, `batches` of them at once.

        What the backend captures is captured then, and no request waits for it. `progress`: called with the shapes
        done and their number.
        """
        settings = self.speculator.settings
        branches, window = (settings.max_parallel, settings.window_size) if settings.enabled else (1, 0)
        tokens = min(tokens, self.manifest.model.context_length - window)
        return rehearse(
            self._engines.decoder, batches, branches, window, tokens, progress or (lambda done, total: None)
        )

    @property
    def device(self) -> str:
        """What the decoder runs on, in words."""
        return self._engines.decoder.engine.device

    def session(self, history: Sequence[dict[str, Any]] = (), images: Sequence[ImageSource] = ()) -> Session:
        """A request that arrives piece by piece: work on it begins with the first piece.

        `history`: earlier messages, with `images` for their placeholders.
        """
        return Session(self, history, images)

    def async_session(self, history: Sequence[dict[str, Any]] = (), images: Sequence[ImageSource] = ()) -> AsyncSession:
        """As `session`, for asyncio."""
        return AsyncSession(Session(self, history, images))

    @property
    def engines(self) -> Engines:
        """What answers are made with."""
        return self._engines

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return self._engines.vision is not None

    @property
    def min_width(self) -> int:
        """The fewest tokens of a pass: narrower ones are padded."""
        return self._engines.decoder.min_width

    def score(self, request: Request, answer: Sequence[int]) -> Logits:
        """Logits float32 [vocabulary] of the token after `answer`, from a plain prefill of prompt and answer."""
        return score(self._engines, self._row(request), answer)

    @property
    def speculator(self) -> Speculator:
        """Drafters, settings and what was learned of costs and acceptance; setting it concerns later requests."""
        return self._engines.speculator

    @speculator.setter
    def speculator(self, speculator: Speculator) -> None:
        self._engines = replace(self._engines, speculator=speculator)

    def make_speculator(self, settings: Settings) -> Speculator:
        """A speculator with the drafters that the bundle has and `settings` name, which has learned nothing yet."""
        speculation = settings.speculation
        history = History(speculation.past_outputs)
        drafters: list[Drafter] = []
        if PREDICTOR in speculation.drafters and PREDICTOR in self._loaded:
            image = self._loaded.get(f"{PREDICTOR}_image")
            drafters.append(
                PredictorDrafter(
                    self._loaded[PREDICTOR], image, self.manifest.model.hidden, self.pool if self.pool.budget else None
                )
            )
        if LOOKUP in speculation.drafters:
            drafters.append(LookupDrafter(history))
        return Speculator(speculation, drafters, self._costs, self._decoder.min_width, history)

    @property
    def statistics(self) -> SpeculationStatistics:
        """What speculation did for all requests that have ended."""
        return self.speculator.totals

    def configure(self, **changes: Any) -> None:
        """Change fields of the `speculation` settings for the rounds to come: `window_size=2`, `mode="approximate"`.

        `max_parallel` and a larger `window_size` concern requests that begin later. Raises ConfigError for an unknown
        field or a value out of range.
        """
        self.speculator.configure(**changes)

    def disable_speculation(self) -> None:
        """Decode plainly from the next round on, running requests included; the tokens stay the same."""
        self.configure(enabled=False)

    def enable_speculation(self) -> None:
        """Speculate again."""
        self.configure(enabled=True)

    def close(self) -> None:
        """Free the engines; the model cannot answer afterwards."""
        for engine in self._loaded.values():
            engine.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _make_store(self, vision: EngineEntry, memory: Memory) -> FeatureStore | None:
        """Features are kept under the hashes of all that makes them: the tile's pixels, the processor, the engine."""
        if not self.pool.budget:
            return None
        hashes = {entry.path: entry.sha256 for entry in self.manifest.files}
        if memory.features == "int8" and self.manifest.model.hidden % memory.quant_groups:
            raise ConfigError(
                f"memory.quant_groups: found {memory.quant_groups}; a divisor of the {self.manifest.model.hidden} "
                "channels of a feature is needed"
            )
        groups = memory.quant_groups if memory.features == "int8" else None
        return FeatureStore(self.pool, f"{self.processor.hash} {hashes[vision.path]}", groups)

    def _row(self, request: Request) -> Row:
        began = time.perf_counter()
        options = Options.make(request.options)
        prompt = self.processor.prepare(request.messages, prompt=request.prompt, images=request.images)
        row = self.begin(prompt, options)
        row.stats.add("process", time.perf_counter() - began)
        return row

    def begin(self, prompt: Prompt, options: Options) -> Row:
        """A request on its way. Raises RequestError when the model cannot take it."""
        if prompt.tiles and self._engines.vision is None:
            raise RequestError("images: this bundle answers text only")
        length, room = len(prompt.token_ids), self._engines.decoder.room
        limit = f"the context length of {room}"
        if room < self.manifest.model.context_length:
            room -= self.speculator.settings.window_size
            limit = f"the {room} tokens that the engine's cache takes"
        if length + options.max_new_tokens > room:
            raise ContextLengthError(
                f"prompt: {length} tokens ({int((prompt.feature_index >= 0).sum())} of images) and "
                f"max_new_tokens {options.max_new_tokens} exceed {limit}; "
                "shorten the prompt, send fewer or smaller images, or lower max_new_tokens"
            )
        return Row(
            prompt,
            options,
            self.processor.tokenizer,
            self.manifest.model.vocabulary,
            frozenset(self.manifest.model.eos_token_ids),
        )


def _measure_again(decoder: Decoder, table: Mapping[str, float]) -> dict[str, float]:
    """The build's table of costs as this machine is now, from its first width and its last."""
    widths = sorted({int(width) for width in table})
    if not widths or widths[-1] > decoder.model.context_length:
        return dict(table)
    past = min(_PAST, decoder.model.context_length - widths[-1])
    return refresh(table, time_passes(decoder, (widths[0], widths[-1]), past, _REPEATS, _BUDGET))


def load(
    bundle: str | os.PathLike[str],
    *,
    target: str | None = None,
    threads: int | None = None,
    verify: bool = True,
    settings: str | os.PathLike[str] | Mapping[str, Any] | Settings | None = None,
) -> Model:
    """Load a bundle for answering.

    `target`: one of the bundle's targets, the best that runs here when None. `threads`: cores to use; all when None,
    but one for a decoder whose steps are too short to be shared.
    `verify`: hash every file first. `settings`: a YAML file, or a mapping, with the sections `speculation` and `memory`
    (docs/speculation.md); what it leaves out is as the bundle's own settings say.
    Raises BundleError for a bad bundle, EngineError when no target runs here, ConfigError for bad settings.
    """
    opened = Bundle.open(bundle, verify=verify)
    chosen, passed_over = choose_target(opened, target)
    own = opened.path / SETTINGS_FILE
    base = read_settings(own) if own.exists() else None
    return Model(opened, chosen, threads, passed_over, read_settings(settings, base))
