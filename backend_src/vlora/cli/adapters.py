"""`vlora adapters`: list, check, generate and convert adapters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from vlora.cli.common import (
    AdaptersOption,
    Command,
    Configuration,
    ConfiguredCommand,
    Group,
    ModelOption,
    OptionsFileOption,
    RepositoryOption,
    console,
    load_configuration,
    print_plain,
    report_errors,
)
from vlora.cli.convert import convert
from vlora.cli.generate import generate

if TYPE_CHECKING:
    from vlora.adapters.files import AdapterInfo
    from vlora.errors import InvalidArgument

app = typer.Typer(
    cls=Group,
    help="List and check the adapters that a server would load; generate and convert adapters.",
    add_completion=False,
)


app.command("generate", cls=Command)(generate)
app.command("convert", cls=Command)(convert)


@app.command("list", cls=ConfiguredCommand)
def list_adapters(
    model: ModelOption = None,
    adapters: AdaptersOption = None,
    repository: RepositoryOption = None,
    options_file: OptionsFileOption = None,
) -> None:
    """List all adapters with their ranks, targets, tasks, labels and digests."""
    with report_errors():
        configured = load_configuration(model, adapters, repository, options_file)
        found, broken = _read_all(configured)
    if found:
        console.print(table_of(found))
    elif not broken:
        print_plain(_no_adapters(configured))
    for name in broken:
        print_plain(f"{name} failed to load; `vlora adapters check` with the same options says why")


@app.command("check", cls=ConfiguredCommand)
def check_adapters(
    model: ModelOption = None,
    adapters: AdaptersOption = None,
    repository: RepositoryOption = None,
    options_file: OptionsFileOption = None,
) -> None:
    """Load all adapters and print why any of them fails. The exit status is 1 if one fails."""
    with report_errors():
        configured = load_configuration(model, adapters, repository, options_file)
        found, broken = _read_all(configured)
    if not found and not broken:
        print_plain(_no_adapters(configured))
    for info in found:
        console.print(f"[green]ok[/]      {escape(info.name)}")
    for error in broken.values():
        console.print(f"[red]broken[/]  {escape(str(error))}", soft_wrap=True)
    if broken:
        raise typer.Exit(1)


def _no_adapters(configured: Configuration) -> str:
    root = configured.options.adapters
    if root is None:
        return "no adapters: no adapter folder is set; name one with --adapters FOLDER"
    return f"no adapters in {root}: it has no subfolders"


def table_of(adapters: Iterable[AdapterInfo]) -> Table:
    """Return a table with one adapter per row, which fits into 80 columns.

    Targets are listed without `_proj`. `vision` stands for the vision tower and the connector. If
    an adapter is an activated LoRA (`alora_invocation_tokens`), a column with the token ids of the
    invocation is added.
    """
    infos = list(adapters)
    activated = any(info.invocation for info in infos)
    heads = ["adapter", "ranks", "targets", "tasks", "labels", "digest"]
    if activated:
        heads.insert(3, "invocation")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for head in heads:
        table.add_column(head, no_wrap=head not in ("targets", "invocation", "tasks"))
    for info in infos:
        invocation = " ".join(map(str, info.invocation)) or "-"
        table.add_row(
            escape(info.name),
            " ".join(map(str, sorted({*info.ranks, *info.vision_ranks}))),
            " ".join(target.removesuffix("_proj") for target in _targets_of(info)),
            *([invocation] if activated else []),
            escape(" ".join(info.tasks)) or "any",
            escape(f"{' '.join(info.head_tasks)}: {len(info.head_labels)}")
            if info.head_labels
            else "-",
            info.digest[:12],
        )
    return table


def _targets_of(info: AdapterInfo) -> tuple[str, ...]:
    return (*info.targets, "vision") if info.vision_ranks else info.targets


def _read_all(
    configured: Configuration,
) -> tuple[Sequence[AdapterInfo], Mapping[str, InvalidArgument]]:
    """Return (adapters that a server with this configuration would load, errors by name)."""
    from vlora.adapters.catalog import find_folders, read_each
    from vlora.adapters.files import load_adapter
    from vlora.model.decoder_config import load_config
    from vlora.model.loader import adapter_shape

    options = configured.options
    # The commands print errors themselves, so the log must not print them again.
    logging.getLogger("vlora").addHandler(logging.NullHandler())
    shape = adapter_shape(options.model, load_config(options.model))
    folders = find_folders(options.adapters, configured.names)
    limit = options.limits.max_adapter_bytes
    # The weights of one adapter at a time are in memory.
    infos, errors = read_each(
        folders, lambda name, folder: load_adapter(name, folder, shape, limit).info
    )
    return list(infos.values()), errors
