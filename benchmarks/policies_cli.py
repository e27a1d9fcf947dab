"""`vlora bench policies`: the command; torch is imported when it runs."""

from __future__ import annotations

import json as jsonlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.options import JsonOption, QuickOption, console

QUICK_SECONDS = 40.0
"""Of replays; loading and calibrating come before."""


def policies(
    minutes: Annotated[float | None, typer.Option(help="Stop after so many.")] = None,
    dtype: Annotated[str, typer.Option(help="Storage type: fp32 or bf16.")] = "bf16",
    plot: Annotated[Path | None, typer.Option(help="Draw figures into this folder.")] = None,
    quick: QuickOption = False,
    json: JsonOption = None,
    grid: Annotated[Path | None, typer.Option(help="Another grid file.")] = None,
    root: Annotated[Path | None, typer.Option(help="Where made checkpoints are kept.")] = None,
) -> None:
    """Policies on seeded traces, measured in real time and simulated beside.

    With --json a run that was stopped goes on where the file ends.
    """
    from benchmarks import machine as atmm
    from benchmarks import report
    from benchmarks.kernels.cells import GRIDS
    from benchmarks.options import types
    from benchmarks.policies import measurement as bench
    from benchmarks.policies_report import draw, policies_table, to_win_table
    from vlora.config import Options
    from vlora.cores import split_threads

    (kind,) = types(dtype)
    began = time.monotonic()
    shown = console()
    threads = split_threads(Options()).engine
    atmm.set_threads(threads)
    path = grid or GRIDS / "policies.json"
    chosen = bench.Grid.load(path, quick=quick)
    described = report.meta("bench policies", quick) | {"grid": path.name, "dtype": kind}
    described |= {"threads": threads, "workloads": chosen.given["workloads"], **atmm.describe()}
    rows = _rows(json, described)
    seconds = minutes * 60 if minutes is not None else QUICK_SECONDS if quick else 1e9

    def keep() -> None:
        if json is not None:
            report.write_json(json, described, rows, bench.summarize(rows))

    with Progress(console=shown, transient=True) as progress:
        task = progress.add_task("loading and calibrating", total=1.0)

        def told(what: str, share: float) -> None:
            progress.update(task, description=what, completed=share)
            if not shown.is_terminal:
                shown.print(f"{time.monotonic() - began:5.0f} s {share:4.0%}  {what}")

        try:
            bed = bench.Bed(bench.checkpoint_of(chosen, root), kind)
            bench.run(chosen, bed, rows, deadline=began + seconds, kept=keep, told=told)
        except KeyboardInterrupt:
            shown.print("stopped; what was measured is kept")
    summary = bench.summarize(rows)
    shown.print(policies_table(rows))
    shown.print(to_win_table(bench.to_win(rows)))
    shown.print(report.summary_table(summary, "average token latency, ours over theirs"))
    if json is not None:
        keep()
        shown.print(f"written: {json}", soft_wrap=True)
    if plot is not None:
        for written in draw(rows, plot):
            shown.print(f"written: {written}", soft_wrap=True)


def _rows(path: Path | None, described: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run before this one has measured, under the same conditions, with policies and a cost
    model that have not changed since."""
    from benchmarks.policies.source_fingerprint import current

    if path is None or not path.is_file():
        return []
    found = jsonlib.loads(path.read_text())
    same = ("command", "quick", "grid", "dtype", "threads", "workloads", "cpu")
    if any(found["meta"].get(key) != described[key] for key in same):
        raise typer.BadParameter(f"--json {path} holds a run under other conditions; remove it")
    rows = current(found["rows"])
    if len(rows) < len(found["rows"]):
        stale = len(found["rows"]) - len(rows)
        console().print(f"{stale} rows of {path} are of other code and measured anew")
    return rows
