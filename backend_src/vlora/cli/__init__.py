"""The command line `vlora`.

Each command is a module that is imported when the command is called. Kubernetes may run `vlora
probe` every few seconds, so this command must not import the modules of the other commands.
"""

from __future__ import annotations

import importlib
from typing import Any

import typer

from vlora.cli.common import Group

# Module of each command, in the order of `vlora --help`. Its attribute `app` is the command.
COMMANDS = {
    "serve": "vlora.cli.serve",
    "gateway": "vlora.cli.gateway",
    "probe": "vlora.cli.probe",
    "repository": "vlora.cli.repository",
    "adapters": "vlora.cli.adapters",
    "capacity": "vlora.cli.capacity",
    "premerge": "vlora.cli.premerge",
    "tile-search": "vlora.cli.tile_search",
}


class LazyGroup(Group):
    """Group of commands that imports a command's module when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

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
    application: typer.Typer = importlib.import_module(COMMANDS[name]).app
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
