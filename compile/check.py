"""The built engines beside the fp32 model: image features and, token by token, logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from ..engines.engine import Engine
from ..engines.errors import AccuracyError, PromptError
from ..engines.manifest import ModelEntry
from ..runtime.decoder import PREFILL_CHUNK, Decoder
from ..runtime.processing.processor import Processor
from ..runtime.processing.prompt import Prompt, Tile
from ..runtime.vision import Vision
from .accuracy.figures import Floats, compare_logits, lowest_cosine
from .checkpoint import Checkpoint
from .recipe import DecoderBounds, VisionBounds

QUESTION = "Describe this in detail."
Figures = dict[str, float]


@dataclass(frozen=True)
class Reference:
    """What the fp32 model makes of the golden request.

    `features` float32 [features, hidden] or None; `tokens` int64 [steps], its greedy answer; `logits` float32
    [steps, vocabulary], those that chose each token.
    """

    prompt: Prompt
    features: Floats | None
    tokens: NDArray[np.int64]
    logits: Floats


def golden_prompt(processor: Processor, images: Sequence[Path]) -> Prompt:
    """The golden request, through the chat template where the tokenizer has one."""
    try:
        return processor.prepare(QUESTION, images=images)
    except PromptError:
        return processor.prepare(prompt=(processor.layout.token or "") * len(images) + QUESTION, images=images)


@torch.no_grad()
def make_reference(checkpoint: Checkpoint, prompt: Prompt, steps: int) -> Reference:
    """Run the fp32 model in torch with its own attention and cache, and decode `steps` tokens greedily."""
    features = encode_tiles(checkpoint, prompt.tiles)
    states = checkpoint.model.get_input_embeddings()(torch.from_numpy(prompt.token_ids)[None])
    if features is not None:
        index = torch.from_numpy(prompt.feature_index)
        states[0, index >= 0] = torch.from_numpy(features)[index[index >= 0]]
    tokens, logits = _decode(checkpoint, states, prompt, steps)
    return Reference(prompt, features, tokens, logits)


@torch.no_grad()
def encode_tiles(checkpoint: Checkpoint, tiles: Sequence[Tile]) -> Floats | None:
    """The fp32 model's features of the tiles, float32 [features, hidden]; None without tiles or a vision part."""
    vision = checkpoint.family.vision_part(checkpoint.model)
    if vision is None or not tiles:
        return None
    rows = [vision.module(**{k: torch.from_numpy(v) for k, v in tile.inputs.items()}) for tile in tiles]
    features: Floats = torch.cat(rows).numpy()
    return features


def check_vision(engine: Engine, model: ModelEntry, reference: Reference, bounds: VisionBounds) -> Figures:
    """Figures of the vision engine. Raises AccuracyError when one is out of bounds."""
    assert reference.features is not None
    found = Vision(engine, model.hidden).encode(reference.prompt.tiles).array
    return _judge("vision", {"cosine": lowest_cosine(reference.features, found)}, bounds)


def check_decoder(
    engine: Engine, model: ModelEntry, min_width: int, reference: Reference, bounds: DecoderBounds
) -> Figures:
    """Figures of the decoder engine over the reference's answer, given the reference's features.

    Raises AccuracyError when one is out of bounds.
    """
    prompt, steps = reference.prompt, len(reference.tokens)
    cache = Decoder(engine, model, min_width).open(1, len(prompt.token_ids) + steps)
    features = None
    if reference.features is not None:
        features = engine.allocate(reference.features.shape, np.float32)
        features.array[...] = reference.features
    found = np.empty_like(reference.logits)
    found[0] = cache.prefill(
        0, prompt.token_ids, prompt.position_ids, prompt.feature_index, features, chunk=PREFILL_CHUNK
    ).logits
    for step, token in enumerate(reference.tokens[:-1]):
        found[step + 1] = cache.advance([[token]], [prompt.next_position + step]).logits[0]
    return _judge("decoder", compare_logits(reference.logits, found), bounds)


def _decode(
    checkpoint: Checkpoint, states: torch.Tensor, prompt: Prompt, steps: int
) -> tuple[NDArray[np.int64], Floats]:
    model, config = checkpoint.model, checkpoint.text_config
    text_model, embed, head = (
        checkpoint.family.text_model(model),
        model.get_input_embeddings(),
        model.get_output_embeddings(),
    )
    softcap = getattr(config, "final_logit_softcapping", None)
    cache = DynamicCache(config=config)
    positions = torch.from_numpy(prompt.position_ids)[..., None, :]
    tokens, rows = [], []
    for step in range(steps):
        output = text_model(inputs_embeds=states, position_ids=positions, cache=cache, use_cache=True)
        logits = head(output.last_hidden_state[0, -1])
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        rows.append(logits.numpy())
        tokens.append(int(logits.argmax()))
        states = embed(torch.tensor([[tokens[-1]]]))
        positions = torch.from_numpy(_positions(prompt, step))
    return np.array(tokens), np.stack(rows)


def _positions(prompt: Prompt, step: int) -> NDArray[np.int64]:
    """Position of answer token `step` as the decoder takes it: [1, 1], or [3, 1, 1] for M-RoPE."""
    return np.full((*prompt.position_ids.shape[:-1], 1, 1), prompt.next_position + step, np.int64)


def _judge(part: str, figures: Figures, bounds: DecoderBounds | VisionBounds) -> Figures:
    """The figures with their bounds beside them; an AccuracyError names all of them when one is out of bounds."""
    judged: Figures = {}
    shown, within = [], True
    for name, value in figures.items():
        bound = getattr(bounds, name)
        highest = name == "divergence"
        judged |= {name: value, f"{name}_bound": bound}
        shown.append(f"{name} {value:.5f} ({'at most' if highest else 'at least'} {bound:g})")
        within = within and (value <= bound if highest else value >= bound)
    if not within:
        raise AccuracyError(
            f"{part}: {', '.join(shown)} beside the fp32 model; choose a higher precision, relax the bound with "
            f"--set check.{part}.PRECISION.FIGURE=VALUE, or build with --no-check"
        )
    return judged
