"""`vlora models`: check checkpoints without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlora.cli import common
from vlora.config import Options
from vlora.model.folder_checks import check_device, check_folder, read_object
from vlora.model.weight_files import weight_files

app = typer.Typer(cls=common.Group, help="Check checkpoints.", add_completion=False)

Folder = Annotated[Path, typer.Argument(help="Folder of the checkpoint.")]
Device = Annotated[str, common.option("DEVICE", "Device that it is to run on, as in model.json.")]


@app.callback()
def _group() -> None:  # Without it, typer would make the only command the group.
    pass


@app.command("check", cls=common.Command)
def check(folder: Folder, device: Device = Options.device) -> None:
    """Check a checkpoint's files, as `vlora serve` does before it starts a server."""
    with common.report_errors():
        common.check_checkpoint(folder)
        check_folder(folder)
        check_device(device)
        kind, files = read_object(folder / "config.json")["model_type"], weight_files(folder)
    common.print_plain(f"ok  {folder}: {kind}, {common.counted(len(files), 'weight file')}")
