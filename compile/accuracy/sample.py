"""What the packs' inputs are made of: a short request out of the golden one, and the feeds of each part."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...engines.engine import Array
from ...runtime.processing.prompt import Prompt, Tile, count_positions

Feed = dict[str, Array]

TOKENS = 48
"""Most prompt tokens of the session."""

PREFILL, WINDOW = 8, 4
"""Tokens of the two steps that the decoder's pack holds; their caches are as short as that."""

SPARE = 1
"""Slots that a step leaves free: one written too far is seen, and does not reach beyond the buffer."""


@dataclass(frozen=True)
class Sample:
    """A request of at most TOKENS tokens: the end of the golden one, and the image features that it names.

    `features` float32 [features, hidden], or None for text; `tile` is the picture's last one.
    """

    prompt: Prompt
    features: Array | None
    tile: Tile | None


def cut_prompt(prompt: Prompt) -> Prompt:
    """The last tokens of a prompt, not reaching beyond its last tile, whose features are then numbered from 0.

    A text of fewer tokens than the decoder's steps take is repeated.
    """
    if not prompt.tiles and len(prompt.token_ids) < PREFILL + WINDOW:
        prompt = _repeat(prompt, PREFILL + WINDOW)
    length = len(prompt.token_ids)
    start = max(0, length - TOKENS)
    tiles = prompt.tiles[-1:]
    index = prompt.feature_index
    if tiles:
        before = sum(tile.features for tile in prompt.tiles[:-1])
        earlier = np.flatnonzero((index >= 0) & (index < before))
        start = max(start, int(earlier[-1]) + 1 if len(earlier) else 0)
        index = np.where(index >= before, index - before, -1)
    return replace(
        prompt,
        token_ids=prompt.token_ids[start:],
        feature_index=index[start:],
        position_ids=prompt.position_ids[..., start:],
        tiles=tiles,
        images=len(tiles),
    )


def decoder_feed(sample: Sample, start: int, stop: int, capacity: int, cache: Mapping[str, Array]) -> Feed:
    """Inputs of the canonical decoder for tokens `start` to `stop`, all logits wanted, behind those in `cache`.

    `cache`: cache_k.N and cache_v.N float32 [1, kv_heads, capacity, head_dim]. One row, which has `start` tokens.
    """
    prompt, width = sample.prompt, stop - start
    feed: Feed = {
        "input_ids": prompt.token_ids[None, start:stop],
        "position_ids": prompt.position_ids[..., None, start:stop],
        "write_index": np.array([start], np.int64),
        "kv_length": np.array([stop], np.int64),
        "mask": (np.arange(capacity) <= np.arange(start, stop)[:, None])[None, None],
        "logit_index": np.arange(width, dtype=np.int64),
    }
    if sample.features is not None:
        feed |= {"image_features": sample.features, "feature_index": prompt.feature_index[None, start:stop]}
    return {name: np.ascontiguousarray(array) for name, array in feed.items()} | dict(cache)


def _repeat(prompt: Prompt, length: int) -> Prompt:
    places, _ = count_positions(np.zeros(length, np.bool_))
    return replace(
        prompt,
        token_ids=np.resize(prompt.token_ids, length),
        feature_index=np.full(length, -1, np.int64),
        position_ids=np.broadcast_to(places, (*prompt.position_ids.shape[:-1], length)).copy(),
        next_position=length,
    )


def step_sample(sample: Sample) -> Sample:
    """The tokens of the decoder's two steps: around the end of the picture, where image and text meet."""
    prompt = sample.prompt
    length = PREFILL + WINDOW
    seen = np.flatnonzero(prompt.feature_index >= 0)
    start = max(0, int(seen[-1]) - PREFILL // 2 if len(seen) else 0)
    start = max(0, min(start, len(prompt.token_ids) - length))
    part = slice(start, start + length)
    cut = replace(
        prompt,
        token_ids=prompt.token_ids[part],
        feature_index=prompt.feature_index[part],
        position_ids=prompt.position_ids[..., part],
    )
    return replace(sample, prompt=cut)


def drawn_feed(inputs: Mapping[str, tuple[str, tuple[int | str, ...]]], seed: int) -> Feed:
    """Drawn inputs for a graph of the predictor: two rows, three image features, a draft of two tokens."""
    generator = np.random.default_rng(seed)
    sizes = {"rows": 2, "features": 3}
    integers = {"window": 2, "lengths": sizes["features"]}
    feed: Feed = {}
    for name, (dtype, dimensions) in inputs.items():
        shape = [size if isinstance(size, int) else sizes[size] for size in dimensions]
        if dtype == "int64":
            feed[name] = np.full(shape, integers.get(name, seed), np.int64)
        elif shape:
            feed[name] = generator.standard_normal(shape, np.float32)
        else:
            feed[name] = np.zeros(shape, np.float32)
    return feed
