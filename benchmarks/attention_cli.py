"""`vlora bench attention`: the command; torch is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.options import JsonOption, QuickOption, TypesOption, console, types


def attention(
    dtypes: TypesOption = "fp32,bf16",
    threads: Annotated[
        int | None, typer.Option(help="Default: as a server takes by itself.")
    ] = None,
    quick: QuickOption = False,
    json: JsonOption = None,
    grid: Annotated[Path | None, typer.Option(help="Another grid file.")] = None,
) -> None:
    """Attention over pages against its twin (gather, then torch's) and against the limit."""
    from benchmarks import machine as atmm
    from benchmarks import report
    from benchmarks.attention import measurement as bench
    from benchmarks.kernels.cells import GRIDS
    from vlora.config import Options
    from vlora.cores import split_threads

    shown = console()
    count = threads or split_threads(Options()).engine
    atmm.set_threads(count)
    path = grid or GRIDS / "attention.json"
    cells = bench.load_grid(path, types(dtypes), quick=quick)
    described = report.meta("bench attention", quick) | {"grid": path.name, "threads": count}
    described |= atmm.describe()
    limits = atmm.LimitsByThreads()(count)
    table = Table("cell", "kernel µs", "twin µs", "limit µs", "twin/kernel", "limit/time", "noise")
    for column in table.columns[1:]:
        column.justify = "right"
    results = []
    for result in bench.run(cells, bench.QUICK if quick else bench.FULL, limits):
        results.append(result)
        own, twin = result.timings[bench.KERNEL], result.timings[bench.TWIN]
        table.add_row(
            result.cell.name,
            f"{own.median * 1e6:.0f}",
            f"{twin.median * 1e6:.0f}",
            f"{result.limit * 1e6:.0f}",
            f"{result.vs_twin:.2f}",
            f"{result.roofline:.2f}",
            f"±{own.noise:.0%}",
        )
    shown.print(table)
    summary = bench.summarize(results)
    shown.print(report.summary_table(summary, "1 = at the limit; above 1: faster than the twin"))
    if json is not None:
        report.write_json(json, described, [result.as_row() for result in results], summary)
        shown.print(f"written: {json}", soft_wrap=True)
