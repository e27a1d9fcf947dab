"""Tables of `vlora bench switch` beside that of the merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from vlora.bench.mixture import MIXTURE, UNMERGED, Result
from vlora.bench.modes import Changes


def changes_table(changes: Sequence[Changes]) -> Table:
    table = _table(
        ("from one token to the next", "type", "p50 ms", "p99 ms"),
        "what a request sees of a switch, while it decodes",
    )
    for found in changes:
        for row in found.as_rows():
            table.add_row(
                row["change"], row["dtype"], f"{row['p50_ms']:.1f}", f"{row['p99_ms']:.1f}"
            )
    return table


def mixture_table(results: Sequence[Result]) -> Table:
    table = _table(
        ("phase", "starved", "unmerged ms", "mixture ms", "ratio", "predicted"),
        "LoRA of one step: deLoRA's extra work over unmerged's",
    )
    for result in results:
        table.add_row(
            result.phase,
            f"{result.starved} of {result.requests}",
            *(f"{result.timings[name].median * 1e3:.2f}" for name in (UNMERGED, MIXTURE)),
            f"{result.ratio:.2f}",
            f"{result.predicted_ratio:.2f}",
        )
    return table


def drift_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        ("type", "switches", "largest change", "weights changed"),
        "base weights after merging in place and back (out of place: none)",
    )
    for row in rows:
        table.add_row(
            row["in_place"], str(row["switches"]), f"{row['largest']:.1e}", f"{row['changed']:.1%}"
        )
    return table


def _table(columns: Sequence[str], title: str) -> Table:
    table = Table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table
