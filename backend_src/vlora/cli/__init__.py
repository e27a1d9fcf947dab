"""The command line: `vlora serve`, `probe`, `repository`, `adapters`, `capacity`,
`premerge`, `tile-search`.

Every command is one module, loaded when it is called: `vlora probe` runs every few seconds where
Kubernetes checks a server, and should not pay for the others' imports.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from vlora import paths

COMMANDS = {
    "serve": "vlora.cli.serve",
    "probe": "vlora.cli.probe",
    "repository": "vlora.cli.repository",
    "adapters": "vlora.cli.adapters",
    "capacity": "vlora.cli.capacity",
    "premerge": "vlora.cli.premerge",
}
"""Modules of the commands, in the order of `vlora --help`. Each has the command in `app`."""

TILE_SEARCH = "tile-search"
"""A command of the source tree: an installed package does not have it."""


class LazyGroup(TyperGroup):
    """A group that imports a command's module when the command is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        source_tree = (paths.SOURCE_TREE / "tools" / "tile_search").is_dir()
        return [*COMMANDS, TILE_SEARCH] if source_tree else [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = typer.main.get_command(_load(cmd_name))
        command.name = cmd_name
        return command


def _load(name: str) -> typer.Typer:
    """Return the Typer application of one command."""
    if name != TILE_SEARCH:
        application: typer.Typer = importlib.import_module(COMMANDS[name]).app
        return application
    if str(paths.SOURCE_TREE) not in sys.path:
        sys.path.append(str(paths.SOURCE_TREE))
    application = typer.Typer(add_completion=False)
    application.command()(importlib.import_module("tools.tile_search.command").tile_search)
    return application


app = typer.Typer(
    cls=LazyGroup,
    help="Serve one large multimodal model and many LoRA adapters with Triton.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def _root() -> None:
    """Serve one large multimodal model and many LoRA adapters with Triton."""


def main() -> None:
    """Run the command line."""
    app()
