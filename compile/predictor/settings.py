"""Options of a predictor and of its training, each with its default."""

from dataclasses import dataclass
from typing import Literal

from ...engines.errors import ConfigError

MAX_PARAMETERS = 5_000_000

Form = Literal["recurrent", "document"]


@dataclass(frozen=True)
class Shape:
    """What a predictor looks like.

    `form`: "recurrent", or "document", the form of the source document, which sees the prompt's first token and the
    mean of the image features and says the same at every step (for comparison alone).
    `state`: width of the cell. `heads` of `head_width`: attention to the image features. `slice`: tokens of the head,
    the most frequent in the target's answers. `window`: drafted tokens that training unrolls.
    """

    form: Form = "recurrent"
    state: int = 256
    heads: int = 2
    head_width: int = 64
    slice: int = 4096
    window: int = 5

    def __post_init__(self) -> None:
        _check_range("state", self.state, 8, 4096)
        _check_range("heads", self.heads, 1, 64)
        _check_range("head_width", self.head_width, 4, 512)
        _check_range("slice", self.slice, 2, 1 << 20)
        _check_range("window", self.window, 1, 16)


@dataclass(frozen=True)
class Training:
    """How it is trained.

    `epochs`: passes over the traces. `batch`: answers per step. `learning_rate`: the highest, after a warm-up of a
    twentieth of all steps; it falls to zero along a cosine. `dropout`: of the fused input. `hidden_weight`: of the
    squared error of the foreseen hidden state beside the losses of the token. `astray`: share of the places whose draft
    went wrong that are trained further. `max_new_tokens`: longest answer traced.
    `gradient_checkpointing`: hold one step's activations of the window at a time and compute the others again.
    """

    epochs: int = 10
    batch: int = 16
    learning_rate: float = 2e-3
    dropout: float = 0.05
    hidden_weight: float = 0.5
    astray: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        _check_range("epochs", self.epochs, 1, 10_000)
        _check_range("batch", self.batch, 1, 65_536)
        _check_range("learning_rate", self.learning_rate, 1e-9, 1)
        _check_range("dropout", self.dropout, 0, 0.9)
        _check_range("hidden_weight", self.hidden_weight, 0, 1000)
        _check_range("astray", self.astray, 0, 1)
        _check_range("max_new_tokens", self.max_new_tokens, 2, 1 << 20)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}: found {value}; {low} to {high} is allowed")
