"""`vlora bench adapters` and `vlora bench prefix`; torch is imported when they run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from vlora.bench.options import JsonOption, QuickOption, console

ModelOption = Annotated[Path | None, typer.Option("--model", help="Default: the demo checkpoint.")]
ThreadsOption = Annotated[int, typer.Option(help="Threads of the engine.")]


def adapters(
    model: ModelOption = None,
    threads: ThreadsOption = 1,
    quick: QuickOption = False,
    json: JsonOption = None,
) -> None:
    """Many adapters: registered, resident, distinct in a batch, more than there is room for."""
    from vlora.bench import adapters as bench
    from vlora.bench import atmm, report
    from vlora.bench.cells import GRIDS

    atmm.set_threads(threads)
    grid = bench.load_grid(GRIDS / "adapters.json", quick=quick)
    described = report.meta("bench adapters", quick) | {"grid": "adapters.json"}
    described |= atmm.describe() | {"threads": threads}
    limits = atmm.LimitsByThreads()(threads)
    rows: list[bench.Row] = []
    shown = console()
    with tempfile.TemporaryDirectory() as scratch, Progress(console=shown, transient=True) as bar:
        task = bar.add_task("making adapters", total=5)
        made = bench.Bench(model or _demo(), Path(scratch), grid)
        for name, part in (
            ("registered", made.registered),
            ("resident", made.resident),
            ("distinct", lambda: made.distinct(limits)),
            ("burst", made.burst),
            ("traces", lambda: made.traces(lambda what: bar.update(task, description=what))),
        ):
            bar.update(task, description=name)
            rows += part()
            bar.update(task, advance=1)
    _finish("adapters", [row.as_row() for row in rows], bench.summarize(rows), described, json)


def prefix(
    model: ModelOption = None,
    threads: ThreadsOption = 1,
    quick: QuickOption = False,
    json: JsonOption = None,
) -> None:
    """Rounds of questions on one image: first token and tokens computed, with the cache and
    without."""
    from vlora.bench import atmm, report
    from vlora.bench import prefix as bench
    from vlora.bench.adapters import load_grid
    from vlora.bench.cells import GRIDS

    atmm.set_threads(threads)
    grid = load_grid(GRIDS / "prefix.json", quick=quick)
    described = report.meta("bench prefix", quick) | {"grid": "prefix.json"}
    described |= atmm.describe() | {"threads": threads}
    rounds = bench.run(model or _demo(), grid)
    rows = [one.as_row() for one in rounds]
    _finish("prefix", rows, bench.summarize(rounds), described, json)


def _demo() -> Path:
    from vlora import places

    return places.root() / "tools" / "demo" / "checkpoint"


def _finish(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    described: Mapping[str, Any],
    json: Path | None,
) -> None:
    from vlora.bench import report

    shown = console()
    shown.print(_table(rows))
    shown.print(report.summary_table(summary, f"bench {name}"))
    if json is not None:
        report.write_json(json, described, rows, summary)
        shown.print(f"written: {json}", soft_wrap=True)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    heads: Iterable[str] = dict.fromkeys(key for row in rows for key in row)
    table = Table(*heads)
    for row in rows:
        table.add_row(*(str(row.get(head, "")) for head in heads))
    return table
