"""`vlora bench adapters` and `vlora bench prefix`; torch is imported when they run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from benchmarks.options import JsonOption, QuickOption, console
from vlora import paths

COLUMNS = {
    "tokens_per_s": "tokens/s",
    "token_latency_ms": "ms/token",
    "p99_s": "p99, s",
    "step_ms": "step, ms",
    "step_beside_load_ms": "by a load",
    "loads": "loads",
    "failed": "failed",
}
"""Of the table: keys of a row, and what they are called."""
TIERS = ("pool_hits", "host_hits", "misses")

ModelOption = Annotated[Path | None, typer.Option("--model", help="Default: the demo checkpoint.")]
ThreadsOption = Annotated[int, typer.Option(help="Threads of the engine.")]


def adapters(
    model: ModelOption = None,
    threads: ThreadsOption = 1,
    quick: QuickOption = False,
    json: JsonOption = None,
) -> None:
    """Many adapters: registered, resident, distinct in a batch, more than there is room for; one
    pool beside a static split."""
    from benchmarks import machine as atmm
    from benchmarks import report
    from benchmarks.adapters import measurement as bench
    from benchmarks.adapters import split
    from benchmarks.kernels.cells import GRIDS

    atmm.set_threads(threads)
    grid = bench.load_grid(GRIDS / "adapters.json", quick=quick)
    described = report.meta("bench adapters", quick) | {"grid": "adapters.json"}
    described |= atmm.describe() | {"threads": threads}
    limits = atmm.LimitsByThreads()(threads)
    rows: list[bench.Row] = []
    shown = console()
    with tempfile.TemporaryDirectory() as scratch, Progress(console=shown, transient=True) as bar:
        task = bar.add_task("making adapters", total=6)
        made = bench.Bench(model or _demo(), Path(scratch), grid)

        def told(what: str) -> None:
            bar.update(task, description=what)

        for name, part in (
            ("registered", made.registered),
            ("resident", made.resident),
            ("distinct", lambda: made.distinct(limits)),
            ("burst", made.burst),
            ("traces", lambda: made.traces(told)),
            ("split", lambda: split.run(made, grid, told)),
        ):
            told(name)
            rows += part()
            bar.update(task, advance=1)
    found = [row.as_row() for row in rows]
    summary = bench.summarize(rows) | split.summarize(rows)
    _finish("adapters", _table(found), found, summary, described, json)


def prefix(
    model: ModelOption = None,
    threads: ThreadsOption = 1,
    quick: QuickOption = False,
    json: JsonOption = None,
) -> None:
    """Rounds of questions on one image: first token and tokens computed, with the cache and
    without."""
    from benchmarks import machine as atmm
    from benchmarks import prefix as bench
    from benchmarks import report
    from benchmarks.adapters.measurement import load_grid
    from benchmarks.kernels.cells import GRIDS

    atmm.set_threads(threads)
    grid = load_grid(GRIDS / "prefix.json", quick=quick)
    described = report.meta("bench prefix", quick) | {"grid": "prefix.json"}
    described |= atmm.describe() | {"threads": threads}
    rounds = bench.run(model or _demo(), grid)
    rows = [one.as_row() for one in rounds]
    _finish("prefix", _by_round(rows), rows, bench.summarize(rounds), described, json)


def _demo() -> Path:

    return paths.root() / "tools" / "demo" / "checkpoint"


def _finish(
    name: str,
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    described: Mapping[str, Any],
    json: Path | None,
) -> None:
    from benchmarks import report

    shown = console()
    shown.print(table)
    shown.print(report.summary_table(summary, f"bench {name}"))
    if json is not None:
        report.write_json(json, described, rows, summary)
        shown.print(f"written: {json}", soft_wrap=True)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        caption="pool, host, disk: where a request's adapter was. More with --json; what each key"
        " means, and its bar: docs/benchmarks/adapters.md",
        padding=(0, 0),
    )
    # In a narrow terminal words are wrapped; a figure that is cut says nothing.
    table.add_column("load", min_width=11)
    for head in COLUMNS.values():
        table.add_column(head, justify="right", min_width=5)
    table.add_column("pool, host, disk")
    for row in rows:
        figures = (row.get(key) for key in COLUMNS)
        cells = ["" if figure is None else f"{figure:.4g}" for figure in figures]
        tiers = " ".join(f"{row[tier]:.0%}" for tier in TIERS if tier in row)
        table.add_row(f"{row['what']}: {row['setting']}", *cells, tiers)
    return table


def _by_round(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Medians over the conversations, with the cache beside without."""
    table = Table("round", "first token, ms", "without", "tokens computed", "without")
    for number in sorted({row["round"] for row in rows}):
        cells = [
            median(r[key] for r in rows if (r["round"], r["cached"]) == (number, cached))
            for key in ("first_token_ms", "computed_tokens")
            for cached in (True, False)
        ]
        table.add_row(str(number), *(f"{cell:.5g}" for cell in cells))
    return table
