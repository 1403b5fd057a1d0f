"""What a request gives back."""

from dataclasses import dataclass, field
from typing import Literal

from .speculation.statistics import SpeculationStatistics

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass
class Statistics:
    """Counts and seconds of one request. In a batch the rounds of decoding are shared, so `decode` is the batch's.

    `hidden_seconds`: work that was done before the request was complete; `wasted_seconds`: such work that was of no
    use to it; `first_tile_seconds`: from the first piece of a session to the first tile encoded, None where none was.
    `reused_tokens`: of the prompt, those that a cache still held; `reused_tiles`: those whose features were kept, or
    not needed. `speculation` is None where the request decoded plainly.
    """

    prompt_tokens: int = 0
    image_tokens: int = 0
    tiles: int = 0
    reused_tokens: int = 0
    reused_tiles: int = 0
    new_tokens: int = 0
    cache_bytes: int = 0
    hidden_seconds: float = 0.0
    wasted_seconds: float = 0.0
    first_tile_seconds: float | None = None
    speculation: SpeculationStatistics | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, stage: str, seconds: float) -> None:
        """Stages: `process` (text and pixels), `vision` (all tiles), `prefill` (up to the first token), `decode`."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @property
    def first_token_seconds(self) -> float:
        """From the request to its first token, without waiting for other rows of a batch."""
        return sum(self.seconds.get(stage, 0.0) for stage in ("process", "vision", "prefill"))

    @property
    def tokens_per_second(self) -> float:
        """Rate of the tokens after the first; 0 where there are none."""
        decode = self.seconds.get("decode", 0.0)
        return (self.new_tokens - 1) / decode if decode and self.new_tokens > 1 else 0.0


@dataclass(frozen=True)
class Result:
    """Text and tokens of an answer.

    `token_ids` hold every token chosen, an end-of-sequence token included; `text` ends before that or a stop string.
    `finish_reason`: `stop` (end of sequence or a stop string), `length` (`max_new_tokens`), `cancelled`.
    `seed` reproduces the answer when it was sampled.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    stats: Statistics
