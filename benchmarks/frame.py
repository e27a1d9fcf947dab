"""The frame of all benchmarks: their list, options, progress, tables, bars and JSON.

A benchmark is a dataclass derived from `Benchmark`. Its fields are its options. It has cells, which
are measured one after another and yield rows. The tables and the summary are made from the rows.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import platform
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, get_type_hints

import typer
from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.table import Table

from vlora import paths
from vlora.atomic_file import replace_text
from vlora.cli.common import Command

REGISTRY: Mapping[str, tuple[str, str]] = {
    "kernels": (
        "kernels:Kernels",
        "The LoRA operator against PEFT's loop, slices, dLoRA's einsum, padding and static tiles.",
    ),
    "attention": (
        "attention:Attention",
        "Attention over KV pages against its reference implementation and the roofline.",
    ),
    "step": (
        "step:Step",
        "One decode or prefill step of a mid-size model against the roofline, part by part.",
    ),
    "quantized": (
        "quantized:Quantized",
        "Products with int8 and int4 weights against the roofline of their own bytes.",
    ),
    "llama-cpp": (
        "llama_cpp:LlamaCpp",
        "Decode steps of a quantized model in our engine and in llama.cpp, in one run.",
    ),
    "engine": (
        "engine:EngineLoads",
        "Sixteen concurrent requests (four with --quick) in process, over gRPC and on PEFT.",
    ),
    "switch": (
        "switch:Switch",
        "Merging all layers, mode switches, LoRA in mixture mode, drift of merging in place.",
    ),
    "policies": (
        "policies:Policies",
        "Scheduling policies on seeded traces, measured in real time and simulated.",
    ),
    "adapters": (
        "adapters:Adapters",
        "Many adapters: registered, resident, distinct, more than fit, and a split pool.",
    ),
    "premerge": (
        "premerge:Premerge",
        "Steps before and after premerging, by the hot adapter's share of the requests.",
    ),
    "prefix": ("prefix:Prefix", "Rounds of questions about one image, with and without the cache."),
    "activated": (
        "activated:Activated",
        "Questions about one image by activated adapters, against ordinary ones.",
    ),
    "gateway": (
        "gateway:Gateway",
        "The gateway against gRPC directly, idle connections, and streams that are cut.",
    ),
    "structured": (
        "structured:Structured",
        "Requests whose answers follow a schema or an expression, against free ones.",
    ),
}
"""Module and class, and the line of the list, by name. Listing imports no benchmark."""

GRIDS = Path(__file__).parent / "grids"
DEMO = paths.root() / "tools" / "demo"
"""Folder of the demo checkpoint and of its adapters."""
SAVE_INTERVAL_SECONDS = 5.0
"""Minimum time between two saves of the rows so far."""
WIDE_COLUMNS = 150
"""Width of the tables if the output is not a terminal."""

Row = dict[str, Any]
"""One measured row, as it is written to JSON."""
Columns = Mapping[str, "str | Callable[[Row], Any]"]
"""Columns of a table by header: a key of the rows, or a function of a row."""

# Options that several benchmarks have.
ThreadCounts = Annotated[
    str,
    typer.Option(
        "--threads",
        metavar="NUMBERS",
        help="Comma-separated thread counts; the grid runs once with each.",
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Number of threads; default: as in a server.")
]
Types = Annotated[
    str, typer.Option(metavar="TYPES", help="Comma-separated storage types, such as fp32,bf16.")
]
Device = Annotated[
    str,
    typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:N; parts that need a CPU are left out."),
]
Root = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Folder of generated checkpoints; default: user cache."),
]
PlotFolder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Draw figures into this folder (matplotlib).")
]
_NO_SETTINGS = {"quick", "grid", "out", "root", "plot", "isa"}
"""Options that are not part of the metadata under their own names."""


@dataclass(frozen=True)
class Bar:
    """Limit of a summary figure: a minimum, a maximum, or an exclusive upper bound."""

    sign: str
    limit: float

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g}"

    def is_met(self, value: float) -> bool:
        if self.sign == "≥":
            return value >= self.limit
        return value < self.limit if self.sign == "<" else value <= self.limit


def at_least(limit: float) -> Bar:
    return Bar("≥", limit)


def at_most(limit: float) -> Bar:
    return Bar("≤", limit)


def below(limit: float) -> Bar:
    return Bar("<", limit)


@dataclass(kw_only=True)
class Benchmark(ABC):
    """One run of a benchmark. Fields that `__init__` takes are options of the command line."""

    name: ClassVar[str]
    bars: ClassVar[Mapping[str, Bar]] = {}
    """Limits by key of the summary."""
    title: ClassVar[str] = "summary"
    """Title of the summary's table."""
    conditions: ClassVar[Sequence[str]] = ()
    """Keys of the metadata that must be equal for a run to continue the one in its JSON file. Empty
    if each run replaces the file."""

    quick: Annotated[
        bool, typer.Option("--quick", help="Measure part of the grid, within 50 s on two cores.")
    ] = False
    grid: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Grid file; default: the committed one.")
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write meta, rows and summary to this file."),
    ] = None
    rows: list[Row] = field(init=False, default_factory=list)
    """All rows so far. The frame appends those that `measure` yields."""
    rooflines: dict[int, Any] = field(init=False, default_factory=dict)

    def prepare(self) -> None:
        """Read the grid into `values` and check the options. Subclasses add what cells share."""
        self.grid = self.grid or GRIDS / f"{self.name.replace('-', '_')}.json"
        self.values: dict[str, Any] = json.loads(self.grid.read_text())
        self.values |= self.values.get("quick", {}) if self.quick else {}

    def status(self, text: str) -> None:  # noqa: B027
        """Show what is being measured. The frame replaces this method."""

    @abstractmethod
    def cells(self) -> Sequence[Any]:
        """Return the cells of the grid in the order in which they are measured."""

    @abstractmethod
    def measure(self, cell: Any) -> Iterable[Row]:
        """Measure one cell and yield its rows."""

    @abstractmethod
    def summarize(self) -> dict[str, Any]:
        """Return the summary of the rows so far, with None or NaN for parts that were not run."""

    @abstractmethod
    def tables(self) -> Iterable[RenderableType]:
        """Return the tables to print, except that of the summary."""

    def draw(self) -> Iterable[Path]:
        """Draw the requested figures and return their files."""
        return []

    def close(self) -> None:  # noqa: B027
        """Release what cells share. The frame calls this once, even after errors."""

    def settings(self) -> dict[str, Any]:
        """Return the options, which are part of the metadata."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.init and f.name not in _NO_SETTINGS
        }

    def roofline(self, threads: int) -> Any:
        """Return the roofline for a number of threads, which becomes part of the metadata."""
        from benchmarks.machine import roofline

        if threads not in self.rooflines:
            self.rooflines[threads] = roofline(threads, getattr(self, "device", "cpu"))
        return self.rooflines[threads]


@dataclass(kw_only=True)
class ThreadedBenchmark(Benchmark):
    """Benchmark that runs with one number of threads, by default that of a server's engine."""

    threads: Annotated[
        int, typer.Option(help="Number of threads; default: as in a server.", show_default=False)
    ] = 0

    def prepare(self) -> None:
        from benchmarks.machine import server_threads, set_threads

        super().prepare()
        self.threads = self.threads or server_threads()
        set_threads(self.threads)


@dataclass(kw_only=True)
class DemoBenchmark(Benchmark):
    """Benchmark of the demo checkpoint, or of another one."""

    model: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Checkpoint folder.", show_default="the demo model"),
    ] = DEMO / "checkpoint"
    threads: Annotated[int, typer.Option(help="Threads of the engine.")] = 1

    def prepare(self) -> None:
        from benchmarks.machine import set_threads

        super().prepare()
        set_threads(self.threads)

    def settings(self) -> dict[str, Any]:
        return {"threads": self.threads}


def parse_types(text: str, valid: Iterable[str] = ("fp32", "bf16")) -> list[str]:
    """Return the storage types of a comma-separated list. Raises typer.BadParameter."""
    types, valid = text.split(","), list(valid)
    if not set(types) <= set(valid):
        raise typer.BadParameter(f"--dtypes {text!r}: valid types are {', '.join(valid)}")
    return types


def parse_thread_counts(text: str) -> list[int]:
    """Return the thread counts of a comma-separated list. Raises typer.BadParameter."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"--threads {text!r} is not a list of positive numbers like 1,2")
    return counts


def table(title: str, rows: Iterable[Row], columns: Columns, labels: int = 1) -> Table:
    """Return a table of rows. Columns after the first `labels` are right-aligned."""
    made = Table(title=title)
    for number, header in enumerate(columns):
        made.add_column(header, justify="left" if number < labels else "right")
    for row in rows:
        values = (row.get(c) if isinstance(c, str) else c(row) for c in columns.values())
        made.add_row(*map(show, values))
    return made


def show(value: Any) -> str:
    """Return a figure as a table shows it: four digits, and a dash if it was not measured."""
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.4g}"
    return "–" if value is None else str(value)


def percent(value: float | None, digits: int = 0) -> str:
    """Return a fraction in percent, and a dash if it was not measured."""
    return "–" if value is None else f"{value:.{digits}%}"


def summary_table(summary: Mapping[str, Any], bars: Mapping[str, Bar], title: str) -> Table:
    """Return a table of the summary's figures, each with its bar and whether it is met."""
    made = Table("key", "value", "bar", "met", title=title)
    for key, value in summary.items():
        bar = bars.get(key)
        met = "" if bar is None or value is None else "yes" if bar.is_met(value) else "[red]no[/]"
        made.add_row(key, "–" if value is None else str(value), str(bar or ""), met)
    return made


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
    usage = (
        "usage: python -m benchmarks NAME [--quick] [--json FILE] [OPTION ...]\n"
        "       python -m benchmarks NAME --help\n\nbenchmarks:"
    )
    return "\n".join([usage, *(f"  {name:{width}}  {REGISTRY[name][1]}" for name in REGISTRY)])


def load(name: str) -> type[Benchmark]:
    """Import and return the class of a benchmark."""
    module, _, class_name = REGISTRY[name][0].partition(":")
    loaded: type[Benchmark] = getattr(import_module(f"benchmarks.{module}"), class_name)
    return loaded


def command_line(name: str) -> typer.Typer:
    """Return the command of one benchmark. Its options are the fields of the benchmark's class."""
    benchmark = load(name)

    def command(**options: Any) -> None:
        run(benchmark(**options))

    hints = get_type_hints(benchmark, include_extras=True)
    parameters = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in fields(benchmark)
        if f.init
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False)
    app.command(name, help=REGISTRY[name][1], cls=Command)(command)
    return app


def run(benchmark: Benchmark) -> None:
    """Measure all cells, print the tables and write the JSON file.

    Ctrl-C ends the measurement; the rows so far are reported and written. They are also written
    every SAVE_INTERVAL_SECONDS, without a summary, so that a run that is killed keeps them.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE_COLUMNS)
    try:
        benchmark.prepare()
        machine = machine_meta(benchmark)
        _continue_file(benchmark, machine)
        interrupted = _measure_cells(benchmark, machine, console)
    finally:
        benchmark.close()
    if interrupted:
        console.print(f"interrupted after {len(benchmark.rows)} rows, which are reported")
    if not benchmark.rows:
        console.print("nothing was measured")
        return
    for part in benchmark.tables():
        console.print(part)
    summary = {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in benchmark.summarize().items()
    }
    console.print(summary_table(summary, benchmark.bars, benchmark.title))
    written = [] if benchmark.out is None else [benchmark.out]
    _save(benchmark, machine, summary)
    for path in (*written, *benchmark.draw()):
        console.print(f"written: {path}", soft_wrap=True)


def _measure_cells(benchmark: Benchmark, machine: Row, console: Console) -> bool:
    """Measure all cells with a progress bar. Return whether Ctrl-C ended the measurement."""
    started = time.monotonic()
    last_save = started - SAVE_INTERVAL_SECONDS
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("preparing", total=None)

        def show_status(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal:
                console.print(f"{time.monotonic() - started:5.0f} s  {text}")

        benchmark.status = show_status  # type: ignore[method-assign]
        try:
            cells = benchmark.cells()
            progress.update(task, total=len(cells))
            for cell in cells:
                for row in benchmark.measure(cell):
                    benchmark.rows.append(row)
                    if time.monotonic() - last_save >= SAVE_INTERVAL_SECONDS:
                        _save(benchmark, machine, {})
                        last_save = time.monotonic()
                progress.advance(task)
        except KeyboardInterrupt:
            return True
    return False


def _continue_file(benchmark: Benchmark, machine: Row) -> None:
    """Take over the rows of an earlier run with the same conditions from the JSON file.

    Raise typer.BadParameter if that run had other conditions.
    """
    path = benchmark.out
    if not benchmark.conditions or path is None or not path.is_file():
        return
    document = json.loads(path.read_text())
    meta = machine | benchmark.settings()
    for key in benchmark.conditions:
        if document["meta"].get(key) != meta[key]:
            raise typer.BadParameter(
                f"--json {path} holds a run under other conditions: {key!r} is"
                f" {document['meta'].get(key)!r}, now {meta[key]!r}; remove the file"
            )
    benchmark.rows = document["rows"]


def _save(benchmark: Benchmark, machine: Row, summary: Mapping[str, Any]) -> None:
    """Write the JSON file, if one is wanted, with one row per line and replaced atomically."""
    if benchmark.out is None:
        return
    meta = machine | benchmark.settings()
    if benchmark.rooflines:
        limits = {f"{n} threads": roof.as_meta() for n, roof in benchmark.rooflines.items()}
        meta |= {"limits": limits}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in benchmark.rows)
    head = json.dumps(meta, indent=1, default=str).replace("\n", "\n ")
    tail = json.dumps(summary, indent=1).replace("\n", "\n ")
    benchmark.out.parent.mkdir(parents=True, exist_ok=True)
    text = f'{{\n "meta": {head},\n "rows": [\n{lines}\n ],\n "summary": {tail}\n}}\n'
    replace_text(benchmark.out, text)


def machine_meta(benchmark: Benchmark) -> Row:
    """Return the conditions that figures depend on: commit, machine, versions, load, kernels."""
    import torch

    from benchmarks.machine import operator_meta

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    assert benchmark.grid is not None
    return {
        "command": f"bench {benchmark.name}",
        "quick": benchmark.quick,
        "grid": benchmark.grid.name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit or None,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
        **operator_meta(),
    }


def _cpu() -> dict[str, str]:
    """Return vendor, family, model and name of the CPU. A virtual machine may hide the name."""
    keys = {"vendor_id", "cpu family", "model", "model name", "cache size"}
    values: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return values
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            values.setdefault(key.strip(), value.strip())
    return values
