"""Render pictures and the questions about them as a folder of requests, the data of `speceyes-compile train-predictor`:

`python -m scripts.demo.requests --count 1000 --out build/requests`.
"""

import argparse
import json
import shutil
from pathlib import Path
from random import Random

from . import tasks
from .sample import Sample, Turn

MIXTURE = ("document", "scene", "document", "chart", "clip", "document", "lines")
QUESTIONS = 2


def _turns(task: str, sample: Sample, index: int) -> list[Turn]:
    """The first turn, which for documents and clips is the long answer, and one other at random."""
    first, *others = sample.turns
    return [first, *Random(f"requests:{task}:{index}").sample(others, min(QUESTIONS - 1, len(others)))]


def write(folder: Path, count: int, split: str) -> None:
    """Fill `folder` with PNG files and `requests.jsonl` of `count` samples, replacing what it held."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    lines = []
    for index in range(count):
        task = MIXTURE[index % len(MIXTURE)]
        sample = tasks.sample(task, split, index)
        names = [f"{task}-{index}-{part}.png" for part in range(len(sample.canvases))]
        for name, canvas in zip(names, sample.canvases, strict=True):
            canvas.image.save(temporary / name)
        lines += [json.dumps({"messages": turn.question, "images": names}) for turn in _turns(task, sample, index)]
    (temporary / "requests.jsonl").write_text("".join(f"{line}\n" for line in lines))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="samples, each of one to three pictures")
    parser.add_argument("--split", choices=tuple(tasks.SPLITS), default="training", help="which seeds to render")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    write(options.out, options.count, options.split)


if __name__ == "__main__":
    main()
