"""`vlora capacity`: show how many adapters and sequences fit into a given memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vlora.cli import common
from vlora.cli.common import console, option

if TYPE_CHECKING:
    from vlora.engine.capacity import Capacity

MIB = 1 << 20
GIB = 1 << 30
app = typer.Typer(add_completion=False)


Memory = Annotated[float, option("GIB", "Available memory in GiB.", min=0.0)]


@app.command(cls=common.ConfiguredCommand)
def capacity(
    model: common.ModelOption = None,
    adapters: common.AdaptersOption = None,
    repository: common.RepositoryOption = None,
    options_file: common.OptionsFileOption = None,
    memory: Memory = 8.0,
) -> None:
    """Show the memory of weights and adapters, and the number of sequences that fit.

    The exit status is 1 if no memory is left for KV-cache pages.
    """
    # Imported here because they import torch.
    from vlora.engine.capacity import others_bytes, plan, private_bytes, process_bytes
    from vlora.model.weight_files import check_files

    with common.report_errors():
        configured = common.load_configuration(model, adapters, repository, options_file)
        options = configured.options
        check_files(options.model)
        own, available = process_bytes(options), int(memory * GIB)
        others = others_bytes(options, private_bytes())
        result = plan(options, configured.names, available, own, others_bytes=others)
        console.print(_parts_table(result))
        if not result.pages:
            raise typer.Exit(1)
        console.print(_adapters_table(result))


def _parts_table(result: Capacity) -> Table:
    title = f"what fits into {result.memory_bytes / GIB:g} GiB (--memory)"
    table = common.make_table(("part", "MiB", "contents"), ("MiB",), title)
    pool = result.pages * result.page_bytes
    adapters = result.adapter_pages * result.page_bytes
    pages, used = f"{result.pages} pages", result.adapter_pages
    token = f"{result.token_bytes:.0f} bytes per token"
    sequences = f"{result.sequences(used)} sequences of {result.context_tokens} tokens"
    rows = [
        ("process", result.process_bytes, "interpreter, libraries and tokenizer"),
        ("other processes", result.others_bytes, "encoder with its cache, Triton, gateway"),
        ("base weights", result.weights_bytes, "the decoder's weights"),
        ("merged weights", result.merged_bytes, "merged copy of adapted matrices"),
        ("host copies", result.host_bytes, "adapters in float32"),
        ("steps", result.step_bytes, "intermediate results of the largest step"),
        ("page pool", pool, f"{pages} of {result.page_bytes} bytes, {result.block_tokens} tokens"),
        ("- known adapters", adapters, f"{len(result.adapters)} adapters, {used} pages"),
        ("- keys and values", max(0, pool - adapters), f"{token}; {sequences}"),
    ]
    for name, size, contents in rows:
        table.add_row(name, f"{size / MIB:.1f}", contents)
    configured = f"{result.configured_bytes / MIB:.1f} MiB"
    table.caption = f"a server with the page pool of its options needs {configured}"
    if not result.pages:
        least = math.ceil(100 * (result.fixed_bytes + result.page_bytes) / GIB) / 100
        needed = f"nothing is left for pages: --memory must be at least {least:g}"
        table.caption = f"{needed}; {table.caption}"
    return table


def _adapters_table(result: Capacity) -> Table:
    sequences = "sequences beside 64 such adapters"
    right = ("packed MiB", "pages", "host MiB", "replaces tokens", sequences)
    table = common.make_table(("adapter", *right), right)
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
