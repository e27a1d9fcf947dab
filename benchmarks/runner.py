"""Command line, progress display, interruption, tables and JSON for any benchmark."""

from __future__ import annotations

import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.benchmark import Benchmark
from benchmarks.registry import REGISTRY
from vlora.cli.common import Command

SAVE_INTERVAL_SECONDS = 5.0
"""Minimum time between two saves of a benchmark that saves its rows."""
WIDE_COLUMNS = 150
"""Width of the tables if the output is not a terminal."""

USAGE = """\
usage: python -m benchmarks NAME [--quick] [--json FILE] [OPTION ...]
       python -m benchmarks NAME --help
"""

JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write meta, rows and summary to this file."),
]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the benchmark that the first argument names, or list all benchmarks."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name in ("-h", "--help"):
        print(list_of_benchmarks())
        raise SystemExit(0)
    if name not in REGISTRY:
        nearest = get_close_matches(name, REGISTRY, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        print(f"unknown benchmark {name!r}{hint}\n\n{list_of_benchmarks()}", file=sys.stderr)
        raise SystemExit(2)
    command_line(name)(rest, prog_name=f"python -m benchmarks {name}")
    raise SystemExit(0)


def list_of_benchmarks() -> str:
    """Return the usage, and one line for each benchmark."""
    width = max(map(len, REGISTRY))
    lines = (f"  {name:{width}}  {entry.help}" for name, entry in REGISTRY.items())
    return "\n".join([USAGE, "benchmarks:", *lines])


def command_line(name: str) -> typer.Typer:
    """Return the command of one benchmark, with its own options, --quick and --json."""
    entry = REGISTRY[name]
    app = typer.Typer(add_completion=False)
    app.command(name, help=entry.help, cls=Command)(_command(entry.load()))
    return app


def _command(benchmark: type[Benchmark[Any]]) -> Callable[..., None]:
    """Return a function with the parameters of the benchmark's `__init__`, and `json`."""

    def command(**options: Any) -> None:
        path = options.pop("json")
        run(benchmark(**options), path)

    _, *parameters = inspect.signature(benchmark.__init__, eval_str=True).parameters.values()
    parameters.append(
        inspect.Parameter(
            "json", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=JsonOption
        )
    )
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    command.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def run(benchmark: Benchmark[Any], path: Path | None) -> None:
    """Measure all cells, print the tables and write JSON to `path`.

    Ctrl-C ends the measurement; the rows so far are reported and written. They are also written
    every SAVE_INTERVAL_SECONDS, without a summary, so that a run that is killed keeps them.
    """
    from benchmarks import report

    console = _console()
    started = time.monotonic()
    machine = report.machine_meta(benchmark.name, benchmark.quick)
    if benchmark.resumable and path is not None and path.is_file():
        _resume(benchmark, path, machine | benchmark.meta(), console)

    def save(summary: Mapping[str, Any]) -> None:
        if path is not None:
            report.write_json(path, machine | benchmark.meta(), benchmark.rows, summary)

    interrupted, last_save = False, started - SAVE_INTERVAL_SECONDS
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("preparing", total=None)

        def show(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal:
                console.print(f"{time.monotonic() - started:5.0f} s  {text}")

        benchmark.status = show
        try:
            cells = benchmark.cells()
            progress.update(task, total=len(cells))
            for cell in cells:
                for row in benchmark.run(cell):
                    benchmark.rows.append(row)
                    if time.monotonic() - last_save >= SAVE_INTERVAL_SECONDS:
                        save({})
                        last_save = time.monotonic()
                progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            benchmark.close()
    if interrupted:
        console.print(f"interrupted after {len(benchmark.rows)} rows, which are reported")
    if not benchmark.rows:
        console.print("nothing was measured")
        return
    for table in benchmark.tables():
        console.print(table)
    summary = {key: _or_none(value) for key, value in benchmark.summarize().items()}
    console.print(report.summary_table(summary, benchmark.bars, benchmark.summary_title()))
    if path is not None:
        save(summary)
        console.print(f"written: {path}", soft_wrap=True)
    for figure in benchmark.draw():
        console.print(f"written: {figure}", soft_wrap=True)


def _resume(benchmark: Benchmark[Any], path: Path, meta: dict[str, Any], console: Console) -> None:
    """Continue the earlier run that wrote `path`, with those of its rows that are still valid.

    Raise typer.BadParameter if that run had other conditions.
    """
    document = json.loads(path.read_text())
    for key in benchmark.conditions:
        if document["meta"].get(key) != meta[key]:
            raise typer.BadParameter(
                f"--json {path} holds a run under other conditions: {key!r} is"
                f" {document['meta'].get(key)!r}, now {meta[key]!r}; remove the file"
            )
    benchmark.rows = benchmark.resume(document["rows"])
    if stale := len(document["rows"]) - len(benchmark.rows):
        console.print(f"{stale} rows of {path} are stale and are measured again")


def _or_none(value: Any) -> Any:
    """Return a figure of a summary, or None if it is NaN because its rows were not measured."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE_COLUMNS)
