"""Options, output and error reports that several commands share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from vlora.config import ADAPTERS_VARIABLE, MODEL_VARIABLE, Options, load_options
from vlora.errors import VLoraError
from vlora.launcher.assembly import ServerError
from vlora.launcher.options import default_repository

console = Console(highlight=False)
error_console = Console(stderr=True, highlight=False)

ModelOption = Annotated[
    Path | None,
    typer.Option("--model", help="Folder of the checkpoint. Default: the one in model.json."),
]
AdaptersOption = Annotated[
    Path | None,
    typer.Option("--adapters", help="Folder of the adapters. Default: the one in model.json."),
]


def print_plain(text: str) -> None:
    """Print text as it is, without markup or line breaks of ours."""
    console.print(text, soft_wrap=True, markup=False)


@contextmanager
def report_errors() -> Iterator[None]:
    """Report an error that the user can correct as a sentence, without a traceback; exit with 1."""
    try:
        yield
    except (ServerError, VLoraError) as error:
        error_console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None


def load_checked_options(
    model: Path | None,
    adapters: Path | None,
    repository: Path | None = None,
    replacing: Mapping[str, Any] | None = None,
) -> Options:
    """Return the options of the repository with these overrides; their folders exist.

    replacing: keys that replace those of `model.json`.
    """
    file = (repository or default_repository()) / "lmm" / "1" / "model.json"
    overrides = {MODEL_VARIABLE: model, ADAPTERS_VARIABLE: adapters}
    environment = {name: str(path) for name, path in overrides.items() if path is not None}
    options = load_options(file, environment, replacing)
    if not (options.model / "config.json").is_file():
        raise ServerError(f"no checkpoint at {options.model}; set its folder with --model DIR")
    if options.adapters is not None and not options.adapters.is_dir():
        raise ServerError(f"no adapters folder at {options.adapters}; set it with --adapters DIR")
    return options
