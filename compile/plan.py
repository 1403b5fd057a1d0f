"""Before the work: which parts will be built, how large they will be, and whether memory and disk suffice."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import transformers

from ..engines.errors import ResourceError
from .checkpoint import Checkpoint
from .recipe import Recipe

# Bytes per weight of a matrix, scales included.
_MATRIX_BYTES = {"fp32": 4.0, "int8": 1.01, "int4": 0.57}
# From measured peaks, see docs/cli.md: the libraries with a traced graph, what a tokenizer takes for each byte of its
# file, fp32 copies of the largest matrix while it is quantised, and a share that the allocator does not give back.
_LIBRARIES = 600_000_000
_TOKENIZER = 15
_COPIES = {"fp32": 0.0, "int8": 2.5, "int4": 2.5}
_SLACK = 1.2
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class PartPlan:
    """One part: its precision, its parameters, the estimated bytes of its engine's weights."""

    precision: str
    parameters: int
    engine_bytes: int

    @property
    def fp32_bytes(self) -> int:
        return 4 * self.parameters


@dataclass(frozen=True)
class Plan:
    """Parts in the order of building, and what the build needs at its peak, in bytes (estimates)."""

    parts: dict[str, PartPlan]
    memory: int
    disk: int


def make_plan(checkpoint: Checkpoint, recipe: Recipe) -> Plan:
    """Count parameters on a model without storage and estimate sizes; nothing is loaded.

    The peak falls on one of two stages: lowering, where the largest matrix is copied beside the fp32 model, or running
    the engines beside it, whose weights are then in memory twice, as the file and in the order that kernels read.
    """
    parts = {}
    copies = 0.0
    for part, module_parameters in _parameters(checkpoint).items():
        precision = getattr(recipe.precision, part)
        matrices = sum(size for size, is_matrix in module_parameters if is_matrix)
        total = sum(size for size, _ in module_parameters)
        parts[part] = PartPlan(precision, total, int(matrices * _MATRIX_BYTES[precision] + 4 * (total - matrices)))
        largest = max((4 * size for size, is_matrix in module_parameters if is_matrix), default=0)
        copies = max(copies, largest * _COPIES[precision])
    weights = sum(part.fp32_bytes for part in parts.values())
    engines = sum(part.engine_bytes for part in parts.values())
    graphs = weights if recipe.keep_graphs else 0
    if recipe.accuracy.enabled:
        graphs += max(part.fp32_bytes for part in parts.values())
    running = engines + _TOKENIZER * _size(checkpoint.folder / "tokenizer.json")
    memory = int(_SLACK * (_LIBRARIES + weights + engines + max(running, copies)))
    return Plan(parts, memory=memory, disk=engines + graphs + 50_000_000)


def check_plan(plan: Plan, out: Path) -> None:
    """Raise ResourceError when the machine has less memory or the output's disk less room than the plan needs."""
    if plan.memory > (have := available_memory()):
        raise ResourceError(
            f"memory: the build needs about {plan.memory / 1e9:.1f} GB, {have / 1e9:.1f} GB are available; "
            "close other programs or build on a machine with more memory"
        )
    folder = out.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if plan.disk > (free := shutil.disk_usage(folder).free):
        raise ResourceError(
            f"disk: the build needs about {plan.disk / 1e9:.1f} GB, {free / 1e9:.1f} GB are free in {folder}; "
            "free some room or choose another output with -o"
        )


def available_memory() -> int:
    """Bytes that this process may still take: of the machine, or of its control group where that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            used = int((_CGROUP / "memory.current").read_text()) - int(statistics["inactive_file"])
            available = min(available, int(limit) - used)
    except (OSError, ValueError, KeyError):
        pass
    return available


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _parameters(checkpoint: Checkpoint) -> dict[str, list[tuple[int, bool]]]:
    """By part: size of each parameter and whether it is a matrix. A tensor that two modules share counts once."""
    auto = (
        transformers.AutoModelForImageTextToText if checkpoint.family.has_vision else transformers.AutoModelForCausalLM
    )
    with torch.device("meta"):
        model = auto.from_config(checkpoint.config)
    modules = (model.get_input_embeddings(), model.get_decoder(), model.get_output_embeddings())
    decoder = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    parts = {"decoder": list(decoder.values())}
    if checkpoint.family.has_vision:
        parts["vision"] = [parameter for parameter in model.parameters() if id(parameter) not in decoder]
    return {part: [(p.numel(), p.dim() > 1) for p in parameters] for part, parameters in parts.items()}
