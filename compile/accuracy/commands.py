"""The `polygraphy run` commands of a bundle, to be pasted into a shell."""

import shlex
from pathlib import Path

from ...engines.manifest import PackEntry, TargetEntry
from .bounds import REST
from .caches import SCALE
from .pack import INPUTS, LOADER, OUTPUTS, SESSION

ONNXRUNTIME = "onnxruntime-cpu"


def list_commands(name: str, build: TargetEntry, bundle: Path) -> dict[str, str]:
    """The command of each part of a target, with paths that begin with `bundle`; {} where ONNX Runtime is not it.

    The session, and a decoder over an int8 cache, need SpecEyes's own runners and have no command.
    """
    if name != ONNXRUNTIME:
        return {}
    return {
        part: make_command(bundle / build.engines[part].path, bundle / pack.path, pack)
        for part, pack in build.packs.items()
        if part != SESSION and not any(SCALE in spec.name for spec in build.engines[part].inputs)
    }


def make_command(engine: Path, folder: Path, pack: PackEntry) -> str:
    """One line; it fails when an output is off by more than the pack's tolerances."""
    named = [f"{name}:{value:g}" for name, value in sorted(pack.atol.items()) if name != REST]
    return shlex.join(
        [
            *("polygraphy", "run", str(engine), "--onnxrt"),
            *("--load-inputs", str(folder / INPUTS), "--load-outputs", str(folder / OUTPUTS)),
            *("--atol", f"{pack.atol.get(REST, 0.0):g}", *named, "--rtol", f"{pack.rtol:g}"),
        ]
    )


def make_readme(name: str, build: TargetEntry) -> str:
    """What stands in the packs' folder: the commands, from the bundle's folder."""
    blocks = "\n".join(
        f"{part}:\n\n```bash\n{command}\n```\n" for part, command in list_commands(name, build, Path()).items()
    )
    return (
        "# Accuracy packs\n\n"
        f"Inputs of each engine (`{INPUTS}`) and what the fp32 graph gave for them (`{OUTPUTS}`), as Polygraphy reads\n"
        f"and writes them; `{LOADER}` loads the inputs for `--data-loader-script`. All packs, and the session, which\n"
        "needs the decode loop, are checked by `speceyes-compile check BUNDLE`. From the bundle's folder:\n\n"
        f"{blocks}"
    )
