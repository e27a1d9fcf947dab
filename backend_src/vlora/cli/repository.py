"""`vlora repository`: write a copy of the model repository that can be changed and mounted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlora.cli.common import Command, option, print_plain, report_errors

app = typer.Typer(add_completion=False)


Folder = Annotated[Path, typer.Argument(help="Folder to write; it must be new or empty.")]
Model = Annotated[
    Path | None,
    option("FOLDER", "Checkpoint folder for its model.json, as the server will see it."),
]
Adapters = Annotated[
    Path | None,
    option(
        "FOLDER",
        "Adapters folder for its model.json, as the server will see it."
        " Default: the demo's, or none if --model is set.",
    ),
]


@app.command(cls=Command)
def repository(folder: Folder, model: Model = None, adapters: Adapters = None) -> None:
    """Write a copy of the model repository that can be changed and mounted."""
    from vlora.launcher.repository import write_repository

    with report_errors():
        written = write_repository(folder, model, adapters)
    print_plain(
        f"The options are in {written}/lmm/1/model.json. To serve the repository, run:",
        f"  vlora serve --repository {written}",
        "or",
        f"  tritonserver --model-repository={written} --disable-auto-complete-config",
    )
