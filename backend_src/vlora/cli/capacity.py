"""`vlora capacity`: what fits into an amount of memory."""

from __future__ import annotations

from typing import Annotated

import typer

from vlora.cli.common import (
    AdaptersOption,
    ModelOption,
    console,
    load_checked_options,
    report_errors,
)
from vlora.config import load_adapter_names
from vlora.launcher.server import default_repository

app = typer.Typer(add_completion=False)


@app.command()
def capacity(
    model: ModelOption = None,
    adapters: AdaptersOption = None,
    memory: Annotated[float, typer.Option(min=0.0, help="Memory in GiB.")] = 8.0,
) -> None:
    """Show what fits into an amount of memory: weights, adapters and sequences.

    The exit status is 1 if the weights alone do not fit.
    """
    from vlora.capacity_cli import show

    with report_errors():
        names = load_adapter_names(default_repository() / "lmm" / "1" / "multi_lora.json")
        if not show(console, load_checked_options(model, adapters), names, memory):
            raise typer.Exit(1)
