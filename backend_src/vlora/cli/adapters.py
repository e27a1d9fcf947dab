"""`vlora adapters`: list, check, generate and convert adapters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from vlora.cli import common
from vlora.cli.common import console, print_labelled, print_plain
from vlora.cli.convert import convert
from vlora.cli.generate import generate

if TYPE_CHECKING:
    from vlora.adapters.files import AdapterInfo
    from vlora.errors import InvalidArgument

app = typer.Typer(
    cls=common.Group,
    help="List and check the adapters that a server would load; generate and convert adapters.",
    add_completion=False,
)
app.command("generate", cls=common.Command)(generate)
app.command("convert", cls=common.Command)(convert)


@app.command("list", cls=common.ConfiguredCommand)
def list_adapters(
    model: common.ModelOption = None,
    adapters: common.AdaptersOption = None,
    repository: common.RepositoryOption = None,
    options_file: common.OptionsFileOption = None,
) -> None:
    """List all adapters with their ranks, targets, tasks, labels and digests."""
    found, broken = _read_all(model, adapters, repository, options_file)
    if found:
        console.print(table_of(found))
    _print_broken(broken.values())


@app.command("check", cls=common.ConfiguredCommand)
def check_adapters(
    model: common.ModelOption = None,
    adapters: common.AdaptersOption = None,
    repository: common.RepositoryOption = None,
    options_file: common.OptionsFileOption = None,
) -> None:
    """Load all adapters and print why any of them fails. The exit status is 1 if one fails."""
    found, broken = _read_all(model, adapters, repository, options_file)
    for info in found:
        print_labelled("ok     ", "green", info.name)
    _print_broken(broken.values())
    if broken:
        raise typer.Exit(1)


def _print_broken(errors: Iterable[InvalidArgument]) -> None:
    for error in errors:
        print_labelled("broken ", "red", str(error))


def table_of(adapters: Iterable[AdapterInfo]) -> Table:
    """Return a table with one adapter per row, which fits into 80 columns.

    If an adapter is an activated LoRA, a column has the token ids of the invocation.
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
        # `vision` stands for the vision tower and the connector.
        targets = (*info.targets, "vision") if info.vision_ranks else info.targets
        table.add_row(
            info.name,
            " ".join(map(str, sorted({*info.ranks, *info.vision_ranks}))),
            " ".join(target.removesuffix("_proj") for target in targets),
            *([invocation] if activated else []),
            " ".join(info.tasks) or "any",
            f"{' '.join(info.head_tasks)}: {len(info.head_labels)}" if info.head_labels else "-",
            info.digest[:12],
        )
    return table


def _read_all(*overrides: Any) -> tuple[Sequence[AdapterInfo], Mapping[str, InvalidArgument]]:
    """Return (adapters that a server with these overrides would load, errors by name)."""
    from vlora.adapters.catalog import find_folders, read_each
    from vlora.adapters.files import load_adapter
    from vlora.model.decoder_config import load_config
    from vlora.model.loader import adapter_shape

    # The commands print errors themselves, so the log must not print them again.
    logging.getLogger("vlora").addHandler(logging.NullHandler())
    with common.report_errors():
        configured = common.load_configuration(*overrides)
        options, root = configured.options, configured.options.adapters
        shape = adapter_shape(options.model, load_config(options.model))
        folders = find_folders(root, configured.names)
        limit = options.limits.max_adapter_bytes
        # The weights of one adapter at a time are in memory.
        infos, broken = read_each(
            folders, lambda name, folder: load_adapter(name, folder, shape, limit).info
        )
    found = list(infos.values())
    if not found and not broken:
        where = f" in {root}: it has no subfolders with files"
        if root is None:
            where = ": no adapter folder is set; name one with --adapters FOLDER"
        print_plain(f"no adapters{where}")
    return found, broken
