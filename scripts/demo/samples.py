"""Write pictures and clips of the test seeds with their questions and answers: `python -m scripts.demo.samples`."""

import argparse
import json
import shutil
from pathlib import Path
from random import Random

from . import documents, tasks
from .sample import Sample

FIRST = 10_000


def _samples() -> dict[str, Sample]:
    """Two documents of every layout and six samples of each other task, named."""
    found = {}
    for layout in documents.LAYOUTS:
        for number in (1, 2):
            rng = Random(f"{layout}:{tasks.SPLITS['test'][FIRST + number]}")
            found[f"{layout}-{number}"] = documents.document(rng, layout=layout)
    for task, prefix in (("chart", "chart"), ("scene", "shapes"), ("clip", "clip"), ("lines", "lines")):
        for number in range(1, 7):
            found[f"{prefix}-{number}"] = tasks.sample(task, "test", FIRST + number)
    return found


def write(folder: Path) -> None:
    """Fill `folder` with PNG files and `samples.json`, replacing what it held."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    entries = []
    for name, sample in _samples().items():
        several = len(sample.canvases) > 1
        files = [f"{name}-{i + 1}.png" if several else f"{name}.png" for i in range(len(sample.canvases))]
        for file, canvas in zip(files, sample.canvases, strict=True):
            canvas.image.save(temporary / file, optimize=True)
        entries += [
            {"images": files, "kind": turn.kind, "question": turn.question, "answer": turn.answer}
            for turn in sample.turns[:3]
        ]
    (temporary / "samples.json").write_text(json.dumps(entries, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("scripts/demo/samples"), help="folder to write")
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
