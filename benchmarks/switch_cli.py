"""`vlora bench switch`: the command; torch is imported when it runs."""

from __future__ import annotations

import json as json_files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.options import (
    JsonOption,
    QuickOption,
    ThreadsOption,
    TypesOption,
    console,
    counts,
    types,
)

if TYPE_CHECKING:
    from benchmarks.switch.delora_work import Result
    from benchmarks.switch.merges import SwitchResult
    from benchmarks.switch.mode_changes import Changes

ROUNDS, QUICK_ROUNDS = 7, 3


def switch(
    threads: ThreadsOption = "1,2",
    dtypes: TypesOption = "fp32,bf16",
    plot: Annotated[Path | None, typer.Option(help="Draw figure 20 into this folder.")] = None,
    quick: QuickOption = False,
    json: JsonOption = None,
    grid: Annotated[Path | None, typer.Option(help="Another grid file.")] = None,
    root: Annotated[Path | None, typer.Option(help="Where made checkpoints are kept.")] = None,
) -> None:
    """The merge of all layers against its limit; a switch as a request sees it; deLoRA's extra
    work; what in-place merging does to the weights."""
    from benchmarks import machine as atmm
    from benchmarks import report
    from benchmarks.kernels.cells import GRIDS
    from benchmarks.switch import delora_work as mixture
    from benchmarks.switch import merges as bench
    from benchmarks.switch import mode_changes as modes
    from benchmarks.switch_report import changes_table, draw, drift_table, mixture_table

    shown = console()
    path = grid or GRIDS / "switch.json"
    given: dict[str, Any] = json_files.loads(path.read_text())
    models = bench.load_models(path, types(dtypes), quick=quick)
    described = report.meta("bench switch", quick) | {"grid": path.name, **atmm.describe()}
    results: list[SwitchResult] = []
    limits = atmm.LimitsByThreads()
    numbers = counts(threads)[-1:] if quick else counts(threads)
    with Progress(console=shown, transient=True) as progress:
        task = progress.add_task("merging", total=len(models) * len(numbers) + 3)
        rounds = QUICK_ROUNDS if quick else ROUNDS
        for result in bench.run(models, numbers, rounds, limits, atmm.set_threads):
            results.append(result)
            progress.update(task, advance=1, description=result.model.name)
        atmm.set_threads(numbers[-1])
        mixed: list[Result] = []
        changes: list[Changes] = []
        for dtype in types(dtypes):
            progress.update(task, description="a switch between two tokens")
            bed = modes.bed_for(given["request"], dtype, root)
            changes.append(modes.measure_changes(given["request"], bed, dtype, quick=quick))
            if dtype == "fp32":
                progress.update(task, advance=1, description="rows of several adapters")
                mixed = mixture.run(given["mixture"], bed, limits(numbers[-1]), quick=quick)
            del bed
        progress.update(task, advance=1, description="merging in place")
        drifts = [row for dtype in types(dtypes) for row in modes.drift(given["drift"], dtype)]
        summary = bench.summarize(results) | modes.summarize(changes, drifts)
        summary |= mixture.summarize(mixed)
    shown.print(report.switch_table(results))
    shown.print(changes_table(changes))
    shown.print(mixture_table(mixed))
    shown.print(drift_table(drifts))
    shown.print(report.summary_table(summary, f"merges: geometric means over threads {numbers}"))
    described |= {"limits": limits.as_meta()}
    if json is not None:
        rows = [result.as_row() for result in results] + [result.as_row() for result in mixed]
        rows += [row for found in changes for row in found.as_rows()] + drifts
        report.write_json(json, described, rows, summary)
        shown.print(f"written: {json}", soft_wrap=True)
    if plot is not None and mixed:
        shown.print(f"written: {draw(mixed, plot)}", soft_wrap=True)
