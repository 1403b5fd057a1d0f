"""Train the demonstration model from scratch: `python -m scripts.demo.train --hours 2 --out build/demo-training`.

The same command goes on from the last save. The schedule follows the wall clock: the vision tower first learns to name
characters, colours and figures; then all tasks are learned together, from short lines to whole pages.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import torch
from torch.nn import functional
from transformers import Idefics3ForConditionalGeneration, PreTrainedTokenizerFast

from . import documents, tasks, tokenizer
from .auxiliary import PatchHeads
from .batches import Batch, Encoder
from .guidance import Guide
from .model import create
from .muon import Muon
from .precision import ATTENTION, mixed
from .sample import Sample, Turn

ROWS = 24
TOKENS = 110
FIRST_SHARE = 0.4
GLYPH_SHARE = 0.03
SETTLE_SHARE = 0.02
DECAY_SHARE = 0.25
CONTINUED_RATE = 0.6
WARM_UP = 100
GUIDANCE = 0.3
MUON_RATE, ADAM_RATE = 0.02, 0.002
SAVE_EVERY, VALIDATE_EVERY, LOG_EVERY = 300.0, 400.0, 20


def mixture(progress: float) -> dict[str, float]:
    """Shares of the tasks at `progress` (0 to 1) through the joint training."""
    if progress < 0.08:
        return {"lines": 0.6, "document": 0.1, "scene": 0.2, "chart": 0.05, "clip": 0.05}
    if progress < 0.6:
        return {"lines": 0.08, "document": 0.38, "scene": 0.16, "chart": 0.19, "clip": 0.19}
    return {"lines": 0.03, "document": 0.24, "scene": 0.25, "chart": 0.32, "clip": 0.16}


class Trainer:
    """Model, optimisers and position of one training run, saved under `out`."""

    def __init__(self, out: Path, hours: float, start: Path | None = None) -> None:
        self.out, self.budget = out, hours * 3600
        self.continued = start is not None
        self.glyph_share, self.first_progress = (0.0, 0.6) if self.continued else (GLYPH_SHARE, 0.0)
        self.tokenizer = self._tokenizer(start)
        self.encoder = Encoder(self.tokenizer)
        torch.manual_seed(0)
        self.model = create(self.tokenizer)
        if start is not None:
            trained = Idefics3ForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
            self.model.load_state_dict(trained.state_dict())
        self.model.set_attn_implementation(ATTENTION)
        self.heads = PatchHeads(self.model.config)
        self.guide = Guide(self.model.config, self.model.model.text_model)
        matrices: list[torch.nn.Parameter] = []
        rest = list(self.heads.parameters())
        for name, parameter in self.model.named_parameters():
            hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if hidden else rest).append(parameter)
        rest += self.guide.parameters()
        self.muon = Muon(matrices, lr=MUON_RATE)
        self.adam = torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.01)
        self.seconds, self.step, self.drawn = 0.0, 0, 0
        if self._state_path.exists():
            self._load()

    def _tokenizer(self, start: Path | None) -> PreTrainedTokenizerFast:
        """The tokenizer of the run, learned once or taken from `start`."""
        folder = self.out / "tokenizer"
        if not (folder / "tokenizer.json").exists():
            source = PreTrainedTokenizerFast.from_pretrained(start) if start else tokenizer.train()
            source.save_pretrained(folder)
        return PreTrainedTokenizerFast.from_pretrained(folder)

    @property
    def _state_path(self) -> Path:
        return self.out / "state.pt"

    def _load(self) -> None:
        state = torch.load(self._state_path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.guide.load_state_dict(state["guide"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.seconds, self.step, self.drawn = state["seconds"], state["step"], state["drawn"]

    def save(self) -> None:
        """Write the whole state, replacing the last one at once."""
        state = {
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "guide": self.guide.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "seconds": self.seconds,
            "step": self.step,
            "drawn": self.drawn,
        }
        temporary = self._state_path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self._state_path)

    def log(self, **values: object) -> None:
        """Append one JSON line to `log.jsonl`."""
        with (self.out / "log.jsonl").open("a") as file:
            file.write(json.dumps({"seconds": round(self.seconds), "step": self.step, **values}) + "\n")

    def run(self) -> None:
        """Train until the budget is spent."""
        last_save = last_validation = self.seconds
        pending: list[Batch] = []
        sums: dict[str, float] = defaultdict(float)
        while self.seconds < self.budget:
            began = time.monotonic()
            share = self.seconds / self.budget
            self._set_rates(share)
            if share < self.glyph_share:
                losses = self._glyph_step()
            else:
                progress = (share - self.glyph_share) / (1 - self.glyph_share)
                progress = self.first_progress + (1 - self.first_progress) * progress
                pending = pending or self._draw(progress)
                losses = self._joint_step(pending.pop(), progress)
            self.step += 1
            self.seconds += time.monotonic() - began
            for name, value in losses.items():
                sums[name] += value / LOG_EVERY
            if self.step % LOG_EVERY == 0:
                self.log(drawn=self.drawn, **{name: round(value, 4) for name, value in sums.items()})
                sums.clear()
            if self.seconds - last_validation > VALIDATE_EVERY and share >= self.glyph_share:
                began = time.monotonic()
                self.log(validation=self.validate())
                self.seconds += time.monotonic() - began
                last_validation = self.seconds
            if self.seconds - last_save > SAVE_EVERY:
                self.save()
                last_save = self.seconds
        self.save()
        self.log(validation=self.validate(96), finished=True)

    def _set_rates(self, share: float) -> None:
        factor = min(1.0, (self.step + 1) / WARM_UP, (1 - share) / DECAY_SHARE)
        if self.continued:
            factor = CONTINUED_RATE * min((self.step + 1) / WARM_UP, 1 - share)
        for optimiser, rate in ((self.muon, MUON_RATE), (self.adam, ADAM_RATE)):
            for group in optimiser.param_groups:
                group["lr"] = rate * factor

    def _glyph_step(self) -> dict[str, float]:
        rng = Random(f"glyphs:{self.drawn}")
        canvases = [documents.noise(rng) for _ in range(ROWS // 2)]
        while len(canvases) < ROWS:
            task = rng.choice(("document", "scene", "chart"))
            canvases += tasks.sample(task, "training", rng.randrange(10**9)).canvases
        self.drawn += ROWS
        batch = self.encoder.batch([Sample((canvas,), ()) for canvas in canvases])
        _, loss, right = self._see(batch)
        self._update(loss)
        return {"auxiliary": loss.item(), "characters": right.item()}

    def _draw(self, progress: float) -> list[Batch]:
        """Four batches, sorted by length."""
        shares = mixture(progress)
        rng = Random(f"joint:{self.drawn}")
        rows = []
        for task in rng.choices(list(shares), list(shares.values()), k=4 * ROWS):
            drawn = tasks.sample(task, "training", rng.randrange(10**9))
            rows.append(self._trim(rng, drawn))
        self.drawn += len(rows)
        rows.sort(key=lambda row: (len(row.canvases), sum(len(turn.answer) for turn in row.turns)))
        batches = [self.encoder.batch(rows[i : i + ROWS]) for i in range(0, len(rows), ROWS)]
        rng.shuffle(batches)
        return batches

    def _trim(self, rng: Random, sample: Sample) -> Sample:
        """As many turns as `TOKENS` allow, the first one, a whole reading, with a share of its own."""
        first, *others = sample.turns
        turns = rng.sample(others, len(others))
        turns.insert(0 if rng.random() < FIRST_SHARE else len(turns), first)
        kept: list[Turn] = []
        tokens = 0
        for turn in turns:
            tokens += sum(map(len, self.encoder.turn(turn)))
            if kept and tokens > TOKENS:
                break
            kept.append(turn)
        return Sample(sample.canvases, tuple(kept))

    def _see(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen = self.model.model.get_image_features(batch.pixels[None], return_dict=True)
        features = seen.pooler_output[0]
        tokens = features.view(len(batch.pixels), -1, features.shape[-1])
        loss, right = self.heads(seen.last_hidden_state, tokens, batch.labels)
        return features, loss, right

    def _answers(self, batch: Batch, features: torch.Tensor) -> torch.Tensor:
        """Logits of the positions that have a target."""
        core = self.model.model
        embeddings = core.get_input_embeddings()(batch.ids)
        embeddings = core.inputs_merger(batch.ids, embeddings, features)
        hidden = core.text_model(
            inputs_embeds=embeddings, attention_mask=batch.mask(), position_ids=batch.positions, use_cache=False
        ).last_hidden_state
        logits: torch.Tensor = self.model.lm_head(hidden[batch.targets >= 0])
        return logits

    def _joint_step(self, batch: Batch, progress: float) -> dict[str, float]:
        """The decoder first settles on the tower as it is, then both learn from the answers."""
        with mixed():
            return self._learn(batch, progress)

    def _learn(self, batch: Batch, progress: float) -> dict[str, float]:
        features, auxiliary, right = self._see(batch)
        if progress < SETTLE_SHARE:
            features = features.detach()
        chosen = batch.targets >= 0
        targets, weights = batch.targets[chosen], batch.weights[chosen]
        logits = self._answers(batch, features)
        errors = functional.cross_entropy(logits, targets, reduction="none")
        loss = (errors * weights).sum() / weights.sum()
        guided = self.guide(batch)
        self._update(loss + (1 - 0.8 * progress) * auxiliary + GUIDANCE * sum(guided.values()))
        accuracy = (logits.argmax(-1) == targets).float().mean()
        return {
            **{name: value.item() for name, value in guided.items()},
            "loss": loss.item(),
            "accuracy": accuracy.item(),
            "auxiliary": auxiliary.item(),
            "characters": right.item(),
        }

    def _update(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(
            [*self.model.parameters(), *self.heads.parameters(), *self.guide.parameters()], 1.0
        )
        for optimiser in (self.muon, self.adam):
            optimiser.step()
            optimiser.zero_grad()

    @torch.no_grad()
    def validate(self, count: int = 24) -> dict[str, float]:
        """Share of turns whose greedy answer is exactly right, by kind, on `count` validation samples a task."""
        right: dict[str, list[bool]] = defaultdict(list)
        for task in tasks.TASKS:
            for start in range(0, count, 8):
                samples = [tasks.sample(task, "validation", start + i) for i in range(8)]
                batch = self.encoder.batch(samples)
                features, _, _ = self._see(batch)
                chosen = batch.targets >= 0
                hits = torch.ones_like(batch.targets, dtype=torch.bool)
                hits[chosen] = self._answers(batch, features).argmax(-1) == batch.targets[chosen]
                for row, sample in enumerate(samples):
                    for number, turn in enumerate(sample.turns, 1):
                        right[turn.kind].append(bool(hits[row][batch.turns[row] == number].all()))
        return {kind: round(sum(hits) / len(hits), 3) for kind, hits in sorted(right.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0, help="wall-clock budget, counted over all resumptions")
    parser.add_argument("--out", type=Path, default=Path("build/demo-training"), help="folder for state and log")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--start", type=Path, help="begin from the weights and tokenizer of this checkpoint")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    Trainer(options.out, options.hours, options.start).run()


if __name__ == "__main__":
    main()
