"""The commands by name; a command's module is imported when it is needed."""

from importlib import import_module

import click

from ... import __version__

COMMANDS = ("build", "inspect", "check", "ask", "train-predictor", "verify-lossless", "rehearse")


class _Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f".{name.replace('-', '_')}", __package__).command
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", message="speceyes %(version)s")
def cli() -> None:
    """Compile a vision-language model into a bundle of engines, look into it, ask it."""
