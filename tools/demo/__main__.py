"""Make the demo checkpoint and its adapters. Users need not do this: the result is committed."""

from pathlib import Path
from typing import Annotated

import typer

from vlora.cli.common import Command, Group

HERE = Path(__file__).parent
CHECKPOINT = HERE / "checkpoint"
ADAPTERS = HERE / "adapters"

app = typer.Typer(cls=Group, help=__doc__, no_args_is_help=True, add_completion=False)
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Output folder.")]
Base = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the base checkpoint.")]
Quick = Annotated[bool, typer.Option("--quick", help="Run only a few steps, as a test.")]
Threads = Annotated[int, typer.Option(help="CPU threads; rendering uses one more process.")]


@app.command(cls=Command)
def train(out: Out = CHECKPOINT, quick: Quick = False, threads: Threads = 1) -> None:
    """Train the base model in about 55 minutes on one core."""
    import torch

    from tools.demo.train import train_base

    torch.set_num_threads(threads)
    train_base(out, quick)


@app.command(cls=Command)
def adapters(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="ADAPTER", help="Names; by default all.")
    ] = None,
    checkpoint: Base = CHECKPOINT,
    out: Out = ADAPTERS,
    quick: Quick = False,
    threads: Threads = 1,
) -> None:
    """Train the adapters on the trained base, one to five minutes each."""
    import torch

    from tools.demo.recipes import RECIPES
    from tools.demo.train import train_adapter

    torch.set_num_threads(threads)
    for name in names or list(RECIPES):
        if name not in RECIPES:
            raise typer.BadParameter(f"unknown adapter '{name}'; known: {', '.join(RECIPES)}")
        train_adapter(name, checkpoint, out / name, 0.01 if quick else 1)


@app.command(cls=Command)
def evaluate(
    checkpoint: Base = CHECKPOINT,
    adapters: Annotated[Path, typer.Option(metavar="FOLDER", help="Their folder.")] = ADAPTERS,
) -> None:
    """Measure base and adapters on the held-out set, and print the rows of the model card."""
    from tools.demo.accuracy import evaluate as measure

    measure(checkpoint, adapters)


if __name__ == "__main__":
    app()
