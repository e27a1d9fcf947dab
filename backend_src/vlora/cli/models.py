"""`vlora models`: check and quantize checkpoints without a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from vlora.atomic_file import check_absent
from vlora.cli import common
from vlora.config import Options
from vlora.errors import InvalidArgument
from vlora.kernels.formats import GROUPS
from vlora.model.folder_checks import check_device, check_folder, read_object
from vlora.model.weight_files import weight_files

app = typer.Typer(cls=common.Group, help="Check and quantize checkpoints.", add_completion=False)

Folder = Annotated[Path, typer.Argument(help="Folder of the checkpoint.")]
Out = Annotated[Path, typer.Argument(help="New folder for the quantized checkpoint.")]
Type = Literal["int4", "int8", "int4-dynamic", "int8-dynamic"]
Quantization = Annotated[Type, common.option(None, "Type of the decoder's linear layers.")]
GroupSize = Annotated[
    int, common.option("INPUTS", "Inputs of an output that share a scale in int4: 32, 64 or 128.")
]
ServedAs = Annotated[
    Type | None, common.option(None, "Type that it is to be served as, as in model.json.")
]
Device = Annotated[str, common.option("DEVICE", "Device that it is to run on, as in model.json.")]


@app.command("check", cls=common.Command)
def check(folder: Folder, device: Device = Options.device, quantization: ServedAs = None) -> None:
    """Check a checkpoint's files, as `vlora serve` does before it starts a server."""
    with common.report_errors():
        common.check_checkpoint(folder)
        check_folder(folder, Options(quantization=quantization))
        check_device(device)
        kind, files = read_object(folder / "config.json")["model_type"], weight_files(folder)
    common.print_plain(f"ok  {folder}: {kind}, {common.counted(len(files), 'weight file')}")


@app.command("quantize", cls=common.Command)
def quantize(
    folder: Folder,
    out: Out,
    quantization: Quantization = "int4",
    group_size: GroupSize = Options.quantization_group_size,
) -> None:
    """Write a copy of a float checkpoint with quantized linear layers of the decoder.

    A server starts faster with it than with the option `quantization`. The
    layout is that of compressed-tensors, which vLLM and transformers read, too.
    Embeddings, LM head, norms and vision tower keep their types. All other files
    are copied, except pickled weights.
    """
    with common.report_errors():
        common.check_checkpoint(folder)
        check_folder(folder)
        if group_size not in GROUPS:
            raise InvalidArgument(f"--group-size {group_size} must be 32, 64 or 128")
        if quantization.startswith("int8") and group_size != GROUPS[0]:
            raise InvalidArgument(f"--group-size {group_size} is for int4 alone; leave it out")
        check_absent(out)
        # Imported here because they import torch, which takes seconds.
        from vlora.model.decoder_config import format_of, load_config
        from vlora.offline.quantize import quantize_folder

        form = format_of(quantization, group_size)
        if form.dynamic:
            form = replace(form, zeros=False)
        with common.progress() as progress:
            before, after = quantize_folder(folder, out, load_config(folder), form, progress)
    sizes = f"weights of {before / 1e9:.3g} GB became {after / 1e9:.3g} GB"
    common.print_plain(f"ok  {out}: {form.name}, {sizes}")
