"""`vlora adapters convert`: make a plain LoRA from an adapter that cannot be served as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from vlora.cli.common import console, option, print_plain, report_errors
from vlora.file_names import printable

Source = Annotated[
    Path, typer.Argument(metavar="ADAPTER", help="Folder of the adapter, as PEFT saves it.")
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the plain LoRA.")]
Model = Annotated[Path, option("FOLDER", "Folder of the checkpoint that it was trained for.")]
Rank = Annotated[int, option("RANK", "Maximum rank if the conversion is not exact.", min=1)]
MaxError = Annotated[
    float, option("ERROR", "Maximum relative error of the change of a matrix.", min=0.0)
]


def convert(
    source: Source, out: Out, model: Model, rank: Rank = 64, max_error: MaxError = 0.05
) -> None:
    """Make a plain LoRA, in safetensors, from an adapter that cannot be served as it is.

    Pickles (.bin), PiSSA and OLoRA are converted exactly. If the folder contains
    copies of the base model's own weights, they are left out. DoRA, and other
    methods that change the weights of linear layers, are approximated with rank
    --rank at most. The error is printed. Nothing is written if the error of any
    matrix is above --max-error.
    """
    with report_errors():
        # Imported here because they import torch.
        from vlora.model.decoder_config import load_config
        from vlora.model.loader import adapter_shape
        from vlora.offline.base_weights import BaseWeights
        from vlora.offline.convert import ConversionLimits
        from vlora.offline.convert import convert as run

        config = load_config(model)
        shape, base = adapter_shape(model, config), BaseWeights(model, config)
        with console.status("reading") as status:
            limits = ConversionLimits(rank, max_error)
            result = run(
                source, out, shape, base, limits, lambda text: status.update(Text(printable(text)))
            )
    for key in result.dropped:
        print_plain(f"dropped '{key}', a copy of the base model's own weight")
    ranks = ", ".join(map(str, result.ranks))
    print_plain(f"{result.method} → LoRA of rank {ranks} in {out}")
    if result.errors:
        print_plain(
            f"approximation error: {result.error:.2e} of the adapter's change,"
            f" at most {result.worst:.2e} in a matrix"
        )
    else:
        print_plain("approximation error: none, except for rounding")
