"""`vlora capacity`: show how many adapters and sequences fit into a given memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from vlora.cli.common import (
    AdaptersOption,
    ConfiguredCommand,
    ModelOption,
    OptionsFileOption,
    RepositoryOption,
    console,
    load_configuration,
    option,
    report_errors,
)

if TYPE_CHECKING:
    from vlora.engine.capacity import Capacity

MIB = 1 << 20
GIB = 1 << 30
app = typer.Typer(add_completion=False)


Memory = Annotated[float, option("GIB", "Available memory in GiB.", min=0.0)]


@app.command(cls=ConfiguredCommand)
def capacity(
    model: ModelOption = None,
    adapters: AdaptersOption = None,
    repository: RepositoryOption = None,
    options_file: OptionsFileOption = None,
    memory: Memory = 8.0,
) -> None:
    """Show the memory of weights and adapters, and the number of sequences that fit.

    The exit status is 1 if no memory is left for KV-cache pages.
    """
    # Imported here because they import torch.
    from vlora.engine.capacity import plan, process_bytes
    from vlora.model.checkpoint import check_files

    with report_errors():
        configured = load_configuration(model, adapters, repository, options_file)
        options = configured.options
        check_files(options.model)
        process = process_bytes(options)
        result = plan(options, configured.names, int(memory * GIB), process)
        console.print(_parts_table(result))
        if not result.pages:
            raise typer.Exit(1)
        console.print(_adapters_table(result))


def _parts_table(result: Capacity) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"{result.memory_bytes / GIB:g} GiB")
    table.add_column("part")
    table.add_column("MiB", justify="right")
    table.add_column("contents")
    pool = result.pages * result.page_bytes
    adapters = result.adapter_pages * result.page_bytes
    rows = [
        ("process", result.process_bytes, "interpreter, libraries and tokenizer"),
        ("base weights", result.weights_bytes, "the decoder's weights"),
        ("merged weights", result.merged_bytes, "merged copy of adapted matrices"),
        ("host copies", result.host_bytes, "adapters in float32"),
        ("steps", result.step_bytes, "intermediate results of the largest step"),
        (
            "page pool",
            pool,
            f"{result.pages} pages of {result.page_bytes} bytes, {result.block_tokens} tokens",
        ),
        (
            "- known adapters",
            adapters,
            f"{len(result.adapters)} adapters, {result.adapter_pages} pages",
        ),
        (
            "- keys and values",
            pool - adapters,
            f"{result.token_bytes:.0f} bytes per token;"
            f" {result.sequences(result.adapter_pages)} sequences of"
            f" {result.context_tokens} tokens",
        ),
    ]
    for name, size, contents in rows:
        table.add_row(name, f"{size / MIB:.1f}", contents)
    table.caption = f"with the configured pool: {result.configured_bytes / MIB:.1f} MiB"
    if not result.pages:
        least = math.ceil(100 * (result.fixed_bytes + result.page_bytes) / GIB) / 100
        table.caption += f"; nothing is left for pages: --memory must be at least {least:g}"
    return table


def _adapters_table(result: Capacity) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("adapter")
    for heading in ("packed MiB", "pages", "host MiB", "replaces tokens", "sequences beside 64"):
        table.add_column(heading, justify="right")
    for cost in (*result.examples, *result.adapters):
        table.add_row(
            cost.name,
            f"{cost.packed_bytes / MIB:.2f}",
            str(cost.pages),
            f"{cost.host_bytes / MIB:.2f}",
            str(cost.pages * result.block_tokens),
            str(result.sequences_beside(64, cost)),
        )
    return table
