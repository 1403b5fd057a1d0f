"""Before the work: which parts will be built, how large they will be, and whether memory and disk suffice."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import transformers

from ..engines.errors import ResourceError
from ..engines.tensorrt_library import FLAVOURS
from .checkpoint import Checkpoint
from .recipe import Recipe
from .tensorrt.parts import precision_of
from .tensorrt.preflight import Estimate, estimate

# Bytes per weight of a matrix, scales included.
_MATRIX_BYTES = {"fp32": 4.0, "int8": 1.01, "int4": 0.57, "fp16": 2.0, "bf16": 2.0, "w8a16": 1.05, "w8a8": 1.05}
# From measured peaks, see docs/cli.md: the libraries with a traced graph, what a tokenizer takes for each byte of its
# file, fp32 copies of the largest matrix while it is quantised, and a share that the allocator does not give back.
_LIBRARIES = 600_000_000
_TOKENIZER = 15
_COPIES = {"fp32": 0.0, "int8": 2.5, "int4": 2.5, "fp16": 0.5, "bf16": 0.5, "w8a16": 2.5, "w8a8": 2.5}
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
    """Parts in the order of building, and what the build needs at its peak, in bytes (estimates).

    Precisions and sizes are those of the first target; `tensorrt`: what each of the TensorRT targets adds.
    """

    parts: dict[str, PartPlan]
    memory: int
    disk: int
    tensorrt: dict[str, Estimate] = field(default_factory=dict)


def make_plan(checkpoint: Checkpoint, recipe: Recipe) -> Plan:
    """Count parameters on a model without storage and estimate sizes; nothing is loaded.

    The peak falls on one of two stages: lowering, where the largest matrix is copied beside the fp32 model, or running
    the engines beside it, whose weights are then in memory twice, as the file and in the order that kernels read.
    """
    parts = {}
    copies = 0.0
    for part, module_parameters in _parameters(checkpoint).items():
        precision = _precision(recipe, recipe.targets[0], part)
        matrices = sum(size for size, is_matrix in module_parameters if is_matrix)
        total = sum(size for size, _ in module_parameters)
        parts[part] = PartPlan(precision, total, _size_in(precision, matrices, total))
        largest = max((4 * size for size, is_matrix in module_parameters if is_matrix), default=0)
        copies = max(copies, largest * _COPIES[_weights(precision)])
    weights = sum(part.fp32_bytes for part in parts.values())
    engines = sum(part.engine_bytes for part in parts.values())
    graphs = weights if recipe.keep_graphs else 0
    if recipe.accuracy.enabled:
        graphs += max(part.fp32_bytes for part in parts.values())
    tensorrt = {name: _estimate(recipe, name, parts) for name in recipe.targets if name in FLAVOURS}
    running = engines + _TOKENIZER * _size(checkpoint.folder / "tokenizer.json")
    building = max((needed.memory for needed in tensorrt.values()), default=0)
    memory = int(_SLACK * (_LIBRARIES + weights + engines + max(running, copies, building)))
    disk = engines + graphs + 50_000_000 + sum(needed.disk for needed in tensorrt.values())
    return Plan(parts, memory=memory, disk=disk, tensorrt=tensorrt)


def _estimate(recipe: Recipe, target: str, parts: dict[str, PartPlan]) -> Estimate:
    """Parts are built one after the other; the largest one rules the memory."""
    sizes = [
        _size_in(_precision(recipe, target, name), part.parameters, part.parameters) for name, part in parts.items()
    ]
    needed = [estimate(size, recipe.tensorrt.build_twice) for size in sizes]
    return Estimate(
        memory=max(part.memory for part in needed),
        seconds=sum(part.seconds for part in needed),
        disk=sum(part.disk for part in needed),
    )


def _precision(recipe: Recipe, target: str, part: str) -> str:
    return precision_of(recipe.tensorrt, part) if target in FLAVOURS else str(getattr(recipe.precision, part))


def _weights(precision: str) -> str:
    """What the weights are stored in."""
    return precision.rpartition("-")[2]


def _size_in(precision: str, matrices: int, total: int) -> int:
    """Bytes of so many weights, of which so many are in matrices."""
    return int(matrices * _MATRIX_BYTES[_weights(precision)] + 4 * (total - matrices))


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
