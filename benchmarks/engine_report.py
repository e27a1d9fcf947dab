"""Tables of `vlora bench engine`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks.engine.load import OUTPUT, Run
from benchmarks.engine.measurement import Result


def engine_table(results: Sequence[Result]) -> Table:
    """A line for each way that a load was run; medians stand in the summary."""
    table = Table(
        "load",
        "type",
        "how",
        "token latency ms",
        "first token s",
        "wall s",
        "over the floor",
        title=f"{max(one.load.requests for one in results)} requests at once, {OUTPUT} tokens each",
    )
    for column in table.columns[3:]:
        column.justify = "right"
    for result in results:
        for run, floor, at_once in result.inside:
            _add(table, result, "in process", run, f"{run.token_latency / floor.token_latency:.2f}")
            _add(table, result, f"its floor (at once: {at_once:.2f} s)", floor, "1")
        for run in result.served:
            _add(table, result, "over gRPC", run, "")
        for run in result.peers:
            _add(table, result, "PEFT, mixed batch", run, "")
    return table


def _add(table: Table, result: Result, how: str, run: Run, over: str) -> None:
    row = run.as_row()
    table.add_row(
        result.load.name,
        result.dtype,
        how,
        f"{row['token_latency_ms']:.1f}",
        f"{row['first_token_s']:.2f}",
        f"{row['wall_s']:.2f}",
        over,
    )
