"""The command line `vlora`.

Each command is a module that is imported when the command is called. Kubernetes may run `vlora
probe` every few seconds, so this command must not import the modules of the other commands.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer

from vlora import paths
from vlora.cli.help import Command, Group

COMMANDS = {
    "serve": "vlora.cli.serve",
    "gateway": "vlora.cli.gateway",
    "probe": "vlora.cli.probe",
    "repository": "vlora.cli.repository",
    "adapters": "vlora.cli.adapters",
    "capacity": "vlora.cli.capacity",
    "premerge": "vlora.cli.premerge",
}
"""Module of each command, in the order of `vlora --help`. Its attribute `app` is the command."""

TILE_SEARCH = "tile-search"
"""Command that only a source tree has. An installed package does not contain its module."""


class LazyGroup(Group):
    """Group of commands that imports a command's module when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        source_tree = (paths.SOURCE_TREE / "tools" / "tile_search").is_dir()
        return [*COMMANDS, TILE_SEARCH] if source_tree else [*COMMANDS]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # For an unknown command, typer suggests the nearest of these names.
        self.commands = dict.fromkeys(self.list_commands(ctx))  # type: ignore[assignment]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = typer.main.get_command(_load(cmd_name))
        command.name = cmd_name
        return command


def _load(name: str) -> typer.Typer:
    if name != TILE_SEARCH:
        application: typer.Typer = importlib.import_module(COMMANDS[name]).app
        return application
    if str(paths.SOURCE_TREE) not in sys.path:
        sys.path.append(str(paths.SOURCE_TREE))
    application = typer.Typer(add_completion=False)
    application.command(cls=Command)(
        importlib.import_module("tools.tile_search.command").tile_search
    )
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
    app()
