"""`vlora capacity`: the command; torch is imported when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vlora.config import Options

if TYPE_CHECKING:
    from vlora.capacity import Capacity

MIB = 1 << 20
GIB = 1 << 30


def show(console: Console, options: Options, names: Mapping[str, str], gib: float) -> bool:
    """Prints what fits into so many GiB; False where the weights alone do not."""
    from vlora.capacity import plan

    found = plan(options, names, int(gib * GIB))
    console.print(_parts(found))
    if found.pages:
        console.print(_adapters(found))
    return found.pages > 0


def _parts(found: Capacity) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"{found.memory / GIB:g} GiB")
    table.add_column("part")
    table.add_column("MiB", justify="right")
    table.add_column("that is")
    pool = found.pages * found.page
    known = found.known_pages
    rows = [
        ("base weights", found.weights, "the decoder's"),
        ("merged weights", found.merged, "what known adapters change, once more"),
        ("page pool", pool, f"{found.pages} pages of {found.page} bytes, {found.block} tokens"),
        ("- known adapters", known * found.page, f"{len(found.known)} adapters, {known} pages"),
        (
            "- keys and values",
            pool - known * found.page,
            f"{found.token:.0f} bytes a token;"
            f" {found.sequences(known)} sequences of {found.context} tokens",
        ),
    ]
    for name, size, said in rows:
        table.add_row(name, f"{size / MIB:.1f}", said)
    if not found.pages:
        table.caption = "the weights alone do not fit"
    return table


def _adapters(found: Capacity) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("an adapter of")
    for head in ("packed MiB", "pages", "host MiB", "costs tokens", "64 leave sequences"):
        table.add_column(head, justify="right")
    for cost in (*found.kinds, *found.known):
        table.add_row(
            cost.name,
            f"{cost.packed / MIB:.2f}",
            str(cost.pages),
            f"{cost.host / MIB:.2f}",
            str(cost.pages * found.block),
            str(found.sequences(64 * cost.pages)),
        )
    return table
