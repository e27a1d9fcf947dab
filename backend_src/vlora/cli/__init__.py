"""The command line `vlora`.

Kubernetes may run `vlora probe` every few seconds, so no command imports the modules of others.
"""

from __future__ import annotations

import importlib
import io
import logging
import sys
from typing import Annotated, Any

import typer

from vlora import __version__, native
from vlora.cli.common import Group, option, report_errors
from vlora.file_names import printable

# Modules of this package, in the order of `vlora --help`.
COMMANDS = (
    *("serve", "gateway", "probe", "repository", "models", "adapters", "capacity", "premerge"),
    *("load", "watch", "tile-search", "envoy"),
)


class LazyGroup(Group):
    """Group of commands that imports a command's module when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # For an unknown command, typer suggests the nearest of these names.
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"vlora.cli.{cmd_name.replace('-', '_')}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vlora {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, option(None, "Print the version.", "--version", is_eager=True, callback=_print_version)
]


@app.callback()
def _root(version: Version = False) -> None:
    """Serve one large multimodal model and many LoRA adapters with Triton."""
    with report_errors():
        native.check_environment()


class _LogFormatter(logging.Formatter):
    """Escapes what a terminal would obey in messages, which contain names of files."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))


def main() -> None:
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_LogFormatter())
    if isinstance(sys.stdout, io.TextIOWrapper):  # Its encoding may lack characters of names.
        sys.stdout.reconfigure(errors="backslashreplace")
    app()
