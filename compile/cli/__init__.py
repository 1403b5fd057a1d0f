"""The command line `speceyes-compile`."""

import sys
from typing import NoReturn

from .guard import guard


def main() -> NoReturn:
    """Entry point: runs the command named by sys.argv and exits with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command. Gives 0, or 1 for a SpecEyesError, 2 for wrong usage, 130 after Ctrl-C."""
    from .commands import cli

    return guard(lambda: cli.main(arguments, prog_name="speceyes-compile", standalone_mode=False))
