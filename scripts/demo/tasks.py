"""The mixture of tasks and the seeds of training, validation and test."""

from random import Random

from . import clips, documents, pictures
from .sample import Sample

SPLITS = {
    "training": range(10**9),
    "validation": range(10**9, 2 * 10**9),
    "test": range(2 * 10**9, 3 * 10**9),
}
TASKS = {
    "lines": documents.lines,
    "document": documents.document,
    "scene": pictures.scene,
    "chart": pictures.chart,
    "clip": clips.clip,
}


def sample(task: str, split: str, index: int) -> Sample:
    """The sample number `index` of a split: always the same for the same arguments."""
    return TASKS[task](Random(f"{task}:{SPLITS[split][index]}"))
