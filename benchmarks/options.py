"""What the commands of `vlora bench` share: options, their checks, the console."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ThreadsOption = Annotated[str, typer.Option(help="Thread counts, one run each.")]
TypesOption = Annotated[str, typer.Option(help="Storage types: fp32, bf16.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Within 50 s on two cores.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write meta, rows, summary here.")]

WIDE = 150
"""Columns of the table where the output is no terminal."""


def console() -> Console:
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDE)


def types(text: str) -> list[str]:
    from benchmarks.kernels.cells import DTYPES

    found = text.split(",")
    if not set(found) <= set(DTYPES):
        raise typer.BadParameter(f"--dtypes {text!r}: known are {', '.join(DTYPES)}")
    return found


def counts(text: str) -> list[int]:
    """Thread counts."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"--threads {text!r} is not a list such as 1,2")
    return found
