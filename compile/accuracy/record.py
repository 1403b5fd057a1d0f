"""The reference side of a pack: inputs made from the sample, outputs of the canonical fp32 graph for them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...engines.engine import Array
from .graph import Outputs, ReferenceGraph, opened
from .pack import SESSION, Pack, pack_path
from .sample import PREFILL, SPARE, WINDOW, Feed, Sample, decoder_feed, drawn_feed, step_sample

SEEDS = (1, 2)


@dataclass(frozen=True)
class Recorder:
    """Writes the packs of a bundle that is being built; `steps` tokens are decoded in the session."""

    folder: Path
    sample: Sample
    steps: int

    def record(self, part: str, graph: ir.Model) -> None:
        """Run a part's canonical graph and keep inputs and outputs in the part's pack, the decoder's session too."""
        with opened(graph, self.folder) as reference:
            if part == "decoder":
                self._save(part, *record_steps(reference, self.sample))
                self._save(SESSION, *record_session(reference, self.sample, self.steps))
            elif part == "vision":
                assert self.sample.tile is not None
                feeds = [self.sample.tile.inputs]
                self._save(part, feeds, [reference.run(feed) for feed in feeds])
            else:
                feeds = [drawn_feed(reference.inputs, seed) for seed in SEEDS]
                self._save(part, feeds, [reference.run(feed) for feed in feeds])

    def _save(self, name: str, feeds: list[Feed], outputs: list[Outputs]) -> None:
        Pack(self.folder, pack_path(name)).write(feeds, outputs)


def record_steps(graph: ReferenceGraph, sample: Sample) -> tuple[list[Feed], list[Outputs]]:
    """Two steps of the decoder: a prefill of an empty cache, and a window behind it."""
    steps = step_sample(sample)
    tokens = len(steps.prompt.token_ids)
    past = min(PREFILL, tokens - WINDOW)
    feeds = [decoder_feed(steps, 0, past, past + SPARE, graph.empty_cache(past + SPARE))]
    outputs = [graph.run(feeds[0])]
    capacity = tokens + SPARE
    cache = graph.empty_cache(capacity)
    for name, slots in cache.items():
        slots[:, :, :past] = outputs[0][name.replace("cache", "present")][:, :, :past]
    feeds.append(decoder_feed(steps, past, tokens, capacity, cache))
    return feeds, [outputs[0], graph.run(feeds[1])]


def record_session(graph: ReferenceGraph, sample: Sample, steps: int) -> tuple[list[Feed], list[Outputs]]:
    """The sample's prompt and the graph's own greedy answer of `steps` tokens, with the logits that chose each."""
    prompt = sample.prompt
    length = len(prompt.token_ids)
    capacity = length + steps
    feed = decoder_feed(sample, 0, length, capacity, graph.empty_cache(capacity))
    tokens: list[int] = []
    rows: list[Array] = []
    for step in range(steps):
        feed["logit_index"] = np.array([feed["input_ids"].shape[1] - 1] * 2, np.int64)
        made = graph.run(feed)
        rows.append(made["logits"][0])
        tokens.append(int(rows[-1].argmax()))
        written = length + step
        feed |= {name.replace("present", "cache"): made[name] for name in made if name.startswith("present_")}
        feed |= {
            "input_ids": np.array([[tokens[-1]]], np.int64),
            "position_ids": np.full((*prompt.position_ids.shape[:-1], 1, 1), prompt.next_position + step, np.int64),
            "write_index": np.array([written], np.int64),
            "kv_length": np.array([written + 1], np.int64),
            "mask": (np.arange(capacity) <= written)[None, None, None],
        }
        if "feature_index" in feed:
            feed["feature_index"] = np.full((1, 1), -1, np.int64)
    request: Feed = {
        "token_ids": prompt.token_ids,
        "position_ids": prompt.position_ids,
        "feature_index": prompt.feature_index,
        "next_position": np.array([prompt.next_position], np.int64),
        "answer_ids": np.array(tokens, np.int64),
    }
    if sample.features is not None:
        request["image_features"] = sample.features
    answer = {"tokens": request["answer_ids"], "logits": np.stack(rows)}
    return [{name: np.ascontiguousarray(array) for name, array in request.items()}], [answer]
