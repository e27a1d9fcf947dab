"""Tables of `vlora bench step`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks.step.measurement import Result
from benchmarks.step.parts import PARTS


def step_table(results: Sequence[Result]) -> Table:
    adapters = sorted({n for result in results for n in result.timings})
    table = Table(
        "step",
        "limit ms",
        *(f"{n} adapters ms" for n in adapters),
        "limit/time",
        *PARTS,
        "rest",
        "python",
        "noise",
        title="one step; limit, shares of time and limit/time are the base model's",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        shares = result.shares[0]
        table.add_row(
            result.cell.name,
            f"{result.limit(0) * 1e3:.1f}",
            *(
                f"{result.timings[n].median * 1e3:.1f}" if n in result.timings else "–"
                for n in adapters
            ),
            f"{result.roofline():.2f}",
            *(f"{shares[part]:.0%}" for part in PARTS),
            f"{result.elsewhere:.0%}",
            "–" if result.python is None else f"{result.python:.1%}",
            f"±{result.timings[0].noise:.0%}",
        )
    return table
