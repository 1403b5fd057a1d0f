"""`speceyes-compile check`: a bundle's engines beside the reference outputs in its accuracy packs."""

import importlib.metadata
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polygraphy.backend.base import BaseRunner
from polygraphy.comparator import Comparator, IterationResult, RunResults
from polygraphy.exception import PolygraphyException

from ...engines.bundle import Bundle
from ...engines.engine import Engine
from ...engines.errors import BundleError, EngineError
from ...engines.manifest import EngineEntry, ModelEntry, PackEntry
from ...engines.target import Target, choose_target
from ...runtime.decoder import Decoder
from ...runtime.threads import choose_threads
from .bounds import Judged, count_agreement, lowest, tolerance
from .figures import Figures, compare, within
from .pack import SESSION, Pack
from .quiet import quiet
from .runners import EngineRunner, SessionRunner

PACKAGES = ("speceyes", "polygraphy", "numpy", "onnxruntime")

Runs = list[dict[str, Figures]]


@dataclass(frozen=True)
class OutputReport:
    """One output over all runs of a pack; `cosine` is None for what is no vector, `atol` for token ids."""

    max_abs_error: float
    atol: float | None
    cosine: float | None
    passed: bool


@dataclass(frozen=True)
class PartReport:
    """One part: lowest cosine of a row, largest error of an element (in `worst_output`, where it is largest beside its
    tolerance), share of rows that choose the reference's token (None where none is chosen).

    `replay_error` of the session: largest difference between the logits of an answer with drafts and of a plain one, of
    which nothing is allowed. `fault`: why there are no figures.
    """

    precision: str
    passed: bool
    cosine: float | None = None
    cosine_bound: float | None = None
    max_abs_error: float | None = None
    worst_output: str | None = None
    agreement: float | None = None
    agreement_bound: float | None = None
    replay_error: float | None = None
    outputs: Mapping[str, OutputReport] | None = None
    fault: str | None = None


@dataclass(frozen=True)
class Report:
    """What `check_bundle` found."""

    bundle: str
    target: str
    passed: bool
    parts: dict[str, PartReport]
    environment: dict[str, str]


class Judge:
    """A comparison for Polygraphy's Comparator: each output of one run beside the reference's."""

    def __init__(self, entry: PackEntry) -> None:
        self._entry = entry

    def __call__(self, wanted: IterationResult, found: IterationResult) -> dict[str, Judged]:
        """Raises EngineError for an output that is missing, of another shape, or not finite."""
        judged = {}
        for name, reference in wanted.items():
            if name not in found:
                raise EngineError(f"{name}: the engine gives no such output")
            atol = tolerance(self._entry, name)
            inside = within(reference, found[name], atol, self._entry.rtol)
            judged[name] = Judged(compare(name, reference, found[name]), atol, inside, self._entry.cosine)
        return judged


def check_bundle(
    bundle: Bundle,
    target: str | None = None,
    *,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda part: None,
) -> Report:
    """Run every engine of a target, and the session, on the inputs of their packs.

    An engine that cannot be loaded or run is a part that has not passed. `progress` is called with each part's name.
    Raises BundleError when a pack is missing or unreadable, EngineError when no target runs here.
    """
    chosen, _ = choose_target(bundle, target)
    build = bundle.manifest.targets[chosen.name]
    if missing := [part for part in (*build.engines, SESSION) if part not in build.packs]:
        raise BundleError(
            f"targets.{chosen.name}.packs: there is no accuracy pack for {', '.join(missing)}; "
            "build the bundle again with `--set accuracy.enabled=true`"
        )
    parts: dict[str, PartReport] = {}
    for part, entry in build.engines.items():
        progress(part)
        parts[part] = _check_part(bundle, chosen, part, entry, build.packs[part], threads)
        if part == "decoder":
            progress(SESSION)
            parts[SESSION] = _check_part(bundle, chosen, SESSION, entry, build.packs[SESSION], threads)
    passed = all(part.passed for part in parts.values())
    return Report(bundle.path.name, chosen.name, passed, parts, describe_environment())


def run_pack(name: str, pack: Pack, engine: Engine, model: ModelEntry, entry: EngineEntry) -> list[RunResults]:
    """Results of the reference, then of the engine (for the session plainly, then with drafts), as Polygraphy has them.

    Raises BundleError for an unreadable pack, EngineError when the engine cannot run it.
    """
    runners: list[BaseRunner]
    if name == SESSION:
        decoder = Decoder(engine, model, entry.min_width, entry.seams)
        runners = [SessionRunner(decoder, way, speculate=way == "drafts") for way in ("plain", "drafts")]
    else:
        runners = [EngineRunner(engine, name)]
    feeds, reference = pack.feeds(), pack.results()
    try:
        with quiet():
            return [reference, *(Comparator.run([runner], data_loader=feeds) for runner in runners)]
    except PolygraphyException as fault:
        raise EngineError(f"{name}: Polygraphy could not run it: {fault}") from fault


def judge_runs(wanted: RunResults, found: RunResults, entry: PackEntry) -> list[dict[str, Judged]]:
    """Each run's outputs beside the reference's."""
    with quiet():
        results = Comparator.compare_accuracy([wanted, found], compare_func=Judge(entry))
    (judged,) = results[0].values()
    return list(judged)


def figures_of(judged: Sequence[Mapping[str, Judged]]) -> Runs:
    """The figures alone."""
    return [{name: output.figures for name, output in run.items()} for run in judged]


def describe_environment() -> dict[str, str]:
    """Versions, and the processor's kind: what figures in the last bits depend on."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {**versions, "python": platform.python_version(), "machine": platform.machine()}


def _check_part(
    bundle: Bundle, target: Target, name: str, entry: EngineEntry, bounds: PackEntry, threads: int | None
) -> PartReport:
    pack = Pack(bundle.path, bounds.path)
    engine: Engine | None = None
    try:
        engine = target.load(bundle.path / entry.path, choose_threads(name, entry, threads), entry)
        reference, *found = run_pack(name, pack, engine, bundle.manifest.model, entry)
        judged = judge_runs(reference, found[0], bounds)
        exact = PackEntry(bounds.path, {"*": 0.0}, 0.0, -1.0, 1.0)
        replayed = judge_runs(found[0], found[1], exact) if name == SESSION else []
    except EngineError as fault:
        return PartReport(entry.precision, passed=False, fault=str(fault))
    finally:
        if engine is not None:
            engine.close()
    return _report(entry.precision, judged, replayed, bounds)


def _report(
    precision: str, judged: Sequence[Mapping[str, Judged]], replayed: Sequence[Mapping[str, Judged]], bounds: PackEntry
) -> PartReport:
    outputs = {name: _summarise([run[name] for run in judged]) for name in judged[0]}
    tolerated = {name: output for name, output in outputs.items() if output.atol is not None}
    worst = max(tolerated, key=lambda name: tolerated[name].max_abs_error / ((tolerated[name].atol or 0) + 1e-30))
    agreed, rows = count_agreement(figures_of(judged))
    agreement = agreed / rows if rows else None
    replay_error = max((run["logits"].figures.max_abs_error for run in replayed), default=None)
    return PartReport(
        precision=precision,
        passed=all(output.passed for output in outputs.values())
        and (agreement is None or agreement >= bounds.agreement)
        and not replay_error,
        cosine=lowest(figures_of(judged)),
        cosine_bound=bounds.cosine,
        max_abs_error=tolerated[worst].max_abs_error,
        worst_output=worst,
        agreement=agreement,
        agreement_bound=bounds.agreement if rows else None,
        replay_error=replay_error,
        outputs=outputs,
    )


def _summarise(runs: Sequence[Judged]) -> OutputReport:
    cosines = [run.figures.cosine for run in runs if run.figures.cosine is not None]
    return OutputReport(
        max_abs_error=max(run.figures.max_abs_error for run in runs),
        atol=None if runs[0].figures.discrete else runs[0].atol,
        cosine=min(cosines, default=None),
        passed=all(map(bool, runs)),
    )
