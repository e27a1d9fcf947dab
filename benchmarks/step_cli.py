"""`vlora bench step`: the command; torch is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from benchmarks.options import JsonOption, QuickOption, TypesOption, console, types

if TYPE_CHECKING:
    from benchmarks.step.measurement import Result

ModelsOption = Annotated[
    str | None, typer.Option(help="whole, grouped, or both (the grid's by default).")
]
ThreadsOption = Annotated[int | None, typer.Option(help="Default: as a server takes by itself.")]


def step(
    dtypes: TypesOption = "fp32,bf16",
    models: ModelsOption = None,
    threads: ThreadsOption = None,
    quick: QuickOption = False,
    json: JsonOption = None,
    grid: Annotated[Path | None, typer.Option(help="Another grid file.")] = None,
    root: Annotated[Path | None, typer.Option(help="Where made checkpoints are kept.")] = None,
) -> None:
    """One step of a mid-size model beside the machine's limit: decoding and prefill, by part."""
    from benchmarks import machine as atmm
    from benchmarks import report
    from benchmarks.kernels.cells import GRIDS
    from benchmarks.step import measurement as bench
    from benchmarks.step_report import step_table
    from vlora.config import Options
    from vlora.cores import split_threads

    shown = console()
    count = threads or split_threads(Options()).engine
    atmm.set_threads(count)
    path = grid or GRIDS / "step.json"
    chosen = None if models is None else models.split(",")
    cells = bench.load_grid(path, types(dtypes), chosen, quick=quick)
    described = report.meta("bench step", quick) | {"grid": path.name, "threads": count}
    described |= atmm.describe()
    limits = atmm.LimitsByThreads()
    results: list[Result] = []
    with Progress(console=shown, transient=True) as progress:
        task = progress.add_task("measuring", total=len(cells))
        effort = bench.QUICK if quick else bench.FULL
        slower: list[float] = []
        for result in bench.run(cells, effort, limits(count), root, slower.append):
            results.append(result)
            progress.update(task, advance=1, description=result.cell.name)
        progress.update(task, description="memory")
        summary = bench.summarize(results) | {"busy_neighbour": round(max(slower), 3)}
        summary |= bench.memory(cells, root)
    shown.print(step_table(results))
    shown.print(report.summary_table(summary, "limit over time, and what else the step is held to"))
    described |= {"limits": limits.as_meta()}
    if json is not None:
        report.write_json(json, described, [result.as_row() for result in results], summary)
        shown.print(f"written: {json}", soft_wrap=True)
