"""The frame of all benchmarks: their list, options, tables, bars, figures and JSON.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, get_type_hints

import typer
from rich.console import Console, RenderableType
from rich.table import Table

from vlora import paths
from vlora.atomic_file import replace_text
from vlora.cli.common import Command

if TYPE_CHECKING:
    from benchmarks.llava import Checkpoint
    from benchmarks.machine import Roofline

REGISTRY: Mapping[str, str] = {
    "kernels": "The LoRA operator against PEFT's loop, slices, dLoRA's einsum and padding.",
    "attention": "Attention over KV pages against its reference implementation and the roofline.",
    "step": "One decode or prefill step of a mid-size model against the roofline, part by part.",
    "quantized": "Products with int8 and int4 weights against the roofline of their own bytes.",
    "peers": "The same requests in our engine and in OpenVINO, llama.cpp and PEFT.",
    "engine": "Sixteen concurrent requests (four with --quick) in process, over gRPC and on PEFT.",
    "switch": "Merging all layers, mode switches, LoRA in mixture mode, drift of merging in place.",
    "policies": "Scheduling policies on seeded traces, measured in real time and simulated.",
    "adapters": "Many adapters: registered, resident, distinct, and more than fit.",
    "premerge": "Steps before and after premerging, by the hot adapter's share of the requests.",
    "prefix": "Rounds of questions about one image, with and without the cache.",
    "activated": "Questions about one image by activated adapters, against ordinary ones.",
    "gateway": "The gateway against gRPC directly.",
    "scale": "Envoy's cost, replicas, many adapters on several servers, and a rolling restart.",
    "structured": "Requests whose answers follow a schema or an expression, against free ones.",
}
"""Lines of the list by name, which is also that of the module. Listing imports no benchmark."""

GRIDS = Path(__file__).parent / "grids"
DEMO = paths.root() / "tools" / "demo"
"""Folder of the demo checkpoint and of its adapters."""
WIDE_COLUMNS = 150
"""Width of the tables if the output is not a terminal."""
NO_SETTINGS = {"quick", "grid", "out", "root", "plot", "isa", "model"}
"""Options that are not part of the metadata under their own names."""

Row = dict[str, Any]
"""One measured row, as it is written to JSON."""

# Options that several benchmarks have.
ThreadCounts = Annotated[
    str,
    typer.Option(
        "--threads",
        metavar="NUMBERS",
        help="Comma-separated thread counts; the grid runs once with each.",
    ),
]
Types = Annotated[
    str, typer.Option(metavar="TYPES", help="Comma-separated storage types, such as fp32,bf16.")
]
Device = Annotated[
    str,
    typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:N; parts that need a CPU are left out."),
]
PlotFolder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Draw figures into this folder (matplotlib).")
]


@dataclass(kw_only=True)
class Benchmark(ABC):
    """One run of a benchmark. Fields that `__init__` takes are options of the command line."""

    name: ClassVar[str]
    bars: ClassVar[Mapping[str, str]] = {}
    """Limits by key of the summary, such as "≥ 0.7"; valid signs are ≥, ≤ and <."""
    title: ClassVar[str] = "summary"
    """Title of the summary's table."""
    shown: ClassVar[Mapping[str, str]] = {}
    """Keys of the rows to show, by title of their table. A row must have the last key."""
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
    root: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of generated models; default: user cache."),
    ] = None
    rows: list[Row] = field(init=False, default_factory=list)
    """All rows so far. The frame appends those that `measure` yields."""
    rooflines: dict[int, Any] = field(init=False, default_factory=dict)
    stack: ExitStack = field(init=False, default_factory=ExitStack)
    """Contexts that cells share. They end with the run, even after errors."""
    started: float = field(init=False, default_factory=time.monotonic)

    def prepare(self) -> None:
        """Read the grid into `values` and check the options. Subclasses add what cells share."""
        self.grid = self.grid or GRIDS / f"{self.name.replace('-', '_')}.json"
        self.values: dict[str, Any] = json.loads(self.grid.read_text())
        self.values |= self.values.get("quick", {}) if self.quick else {}

    @abstractmethod
    def cells(self) -> Sequence[Any]:
        """Return the cells of the grid in the order in which they are measured."""

    @abstractmethod
    def measure(self, cell: Any) -> Iterable[Row]:
        """Measure one cell and yield its rows."""

    @abstractmethod
    def summarize(self) -> dict[str, Any]:
        """Return the summary of the rows so far, with None or NaN for parts that were not run."""

    def tables(self) -> Iterable[RenderableType]:
        """Return the tables to print, except that of the summary: those of `shown`."""
        for title, keys in self.shown.items():
            last = keys.split()[-1]
            rows = [row for row in self.rows if value_of(row, last) is not None]
            yield table(title, rows, keys)

    def draw(self) -> Iterable[Path]:
        """Draw the requested figures and return their files."""
        return []

    def close(self) -> None:
        self.stack.close()

    def settings(self) -> dict[str, Any]:
        """Return the options, which are part of the metadata."""
        own = (f.name for f in fields(self) if f.init and f.name not in NO_SETTINGS)
        return {name: getattr(self, name) for name in own}

    def status(self, text: str) -> None:
        """Print what is being measured."""
        print(f"{time.monotonic() - self.started:5.0f} s  {text}", flush=True)

    def generated(self, model: str = "whole") -> Checkpoint:
        """Return the generated checkpoint of one of `llava.MODELS`."""
        from benchmarks import llava

        return llava.make(llava.MODELS[model], self.root)

    def roofline(self, threads: int) -> Roofline:
        """Return the roofline for a number of threads, which becomes part of the metadata."""
        from benchmarks.machine import roofline

        if threads not in self.rooflines:
            self.rooflines[threads] = roofline(threads, getattr(self, "device", "cpu"))
        found: Roofline = self.rooflines[threads]
        return found

    def median(self, key: str, **where: Any) -> float:
        """Return the median of the values that the matching rows have under `key`, or else NaN."""
        known = [row[key] for row in matching(self.rows, **where) if key in row]
        return median(known) if known else math.nan


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
class DemoBenchmark(ThreadedBenchmark):
    """Benchmark of the demo checkpoint, or of another one."""

    model: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Checkpoint folder.", show_default="the demo model"),
    ] = DEMO / "checkpoint"
    threads: Annotated[int, typer.Option(help="Threads of the engine.")] = 1


def matching(rows: Iterable[Row], /, **where: Any) -> list[Row]:
    """Return the rows that have all these values."""
    return [row for row in rows if where.items() <= row.items()]


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are not None, or None if there is none."""
    known = [value for value in values if value is not None]
    return geometric_mean(known) if known else None


def parse_types(text: str, valid: Iterable[str] = ("fp32", "bf16")) -> list[str]:
    """Return the storage types of a comma-separated list. Raises typer.BadParameter."""
    types, valid = text.split(","), list(valid)
    if not set(types) <= set(valid):
        raise typer.BadParameter(f"--dtypes {text!r}: valid types are {', '.join(valid)}")
    return types


def parse_thread_counts(text: str) -> list[int]:
    """Return the thread counts of a comma-separated list. Raises typer.BadParameter."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"--threads {text!r} is not a list of positive numbers like 1,2")
    return [int(part) for part in parts]


def table(title: str, rows: Iterable[Row], keys: str) -> Table:
    """Return a table of rows with these keys of theirs, separated by spaces.

    A key of a nested figure has a dot, such as `ms.atmm`.
    """
    lines = [[value_of(row, key) for key in keys.split()] for row in rows]
    made = Table(title=title)
    for number, key in enumerate(keys.split()):
        texts = any(isinstance(line[number], str) for line in lines)
        made.add_column(key.replace("_", " "), justify="left" if texts else "right")
    for line in lines:
        made.add_row(*map(show, line))
    return made


def value_of(row: Row, key: str) -> Any:
    """Return a figure of a row, which a key like `ms.atmm` names, or None if it has none."""
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def show(value: Any) -> str:
    """Return a figure as a table shows it: four digits, and a dash if it was not measured."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def medians_by(rows: Sequence[Row], *keys: str) -> list[Row]:
    """Return a row for each combination of these keys, with the medians of all other figures."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return [
        {name: median(row[name] for row in group) for name in group[0] if name not in keys}
        | dict(zip(keys, values, strict=True))
        for values, group in groups.items()
    ]


def is_met(bar: str, value: float) -> bool:
    """Return whether a figure reaches its bar, such as "≥ 0.7"."""
    sign, limit = bar.split()
    if sign == "≥":
        return value >= float(limit)
    return value < float(limit) if sign == "<" else value <= float(limit)


def rounded(value: Any) -> Any:
    """Return a value in which all floats have five digits, and NaN is None."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else float(f"{value:.5g}")


@contextmanager
def figure(path: Path, x: str, y: str, size: tuple[float, float] = (7, 3.5)) -> Iterator[Any]:
    """Yield the axes of a figure with these labels, and write it to a file with its legend."""
    from matplotlib.figure import Figure

    made = Figure(figsize=size, layout="constrained")
    axes = made.subplots()
    yield axes
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=120)


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
    return "\n".join([usage, *(f"  {name:{width}}  {text}" for name, text in REGISTRY.items())])


def load(name: str) -> type[Benchmark]:
    """Import and return the class of a benchmark."""
    module = import_module(f"benchmarks.{name.replace('-', '_')}")
    (found,) = (one for one in vars(module).values() if getattr(one, "name", None) == name)
    loaded: type[Benchmark] = found
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
    app.command(name, help=REGISTRY[name], cls=Command)(command)
    return app


def run(benchmark: Benchmark) -> None:
    """Measure all cells, print the tables and write the JSON file.

    Ctrl-C ends the measurement; the rows so far are reported and written. They are also written
    after each cell, without a summary, so that a run that is killed keeps them.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE_COLUMNS)
    try:
        benchmark.prepare()
        machine = machine_meta(benchmark)
        _continue_file(benchmark, machine)
        for cell in benchmark.cells():
            for row in benchmark.measure(cell):
                benchmark.rows.append(row)
            _save(benchmark, machine, {})
    except KeyboardInterrupt:
        console.print(f"interrupted after {len(benchmark.rows)} rows, which are reported")
    finally:
        benchmark.close()
    if not benchmark.rows:
        console.print("nothing was measured")
        return
    for part in benchmark.tables():
        console.print(part)
    summary = rounded(benchmark.summarize())
    made = Table("key", "value", "bar", "met", title=benchmark.title)
    for key, value in summary.items():
        bar = benchmark.bars.get(key, "")
        met = "" if not bar or value is None else "yes" if is_met(bar, value) else "[red]no[/]"
        made.add_row(key, "–" if value is None else str(value), bar, met)
    console.print(made)
    _save(benchmark, machine, summary)
    written = [] if benchmark.out is None else [benchmark.out]
    for path in (*written, *benchmark.draw()):
        console.print(f"written: {path}", soft_wrap=True)


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
    lines = ",\n".join(f"  {json.dumps(rounded(row))}" for row in benchmark.rows)
    head = json.dumps(meta, indent=1, default=str).replace("\n", "\n ")
    tail = json.dumps(summary, indent=1).replace("\n", "\n ")
    benchmark.out.parent.mkdir(parents=True, exist_ok=True)
    text = f'{{\n "meta": {head},\n "rows": [\n{lines}\n ],\n "summary": {tail}\n}}\n'
    replace_text(benchmark.out, text)


def machine_meta(benchmark: Benchmark) -> Row:
    """Return the conditions that figures depend on: commit, machine, versions, load, kernels."""
    import torch

    from benchmarks.machine import cpu_meta, operator_meta

    assert benchmark.grid is not None
    command = ["git", "-C", str(GRIDS), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": f"bench {benchmark.name}",
        "quick": benchmark.quick,
        "grid": benchmark.grid.name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit or None,
        "cpu": cpu_meta(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
        **operator_meta(),
    }
