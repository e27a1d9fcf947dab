"""The interface of a benchmark; `benchmarks.runner` runs it.

Subclasses import torch and `vlora` inside their methods only, so that `--help` is fast.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

import typer
from rich.console import RenderableType

if TYPE_CHECKING:
    from benchmarks.machine import RooflineByThreads

Row = dict[str, Any]
"""One measured row, as it is written to JSON."""

CellT = TypeVar("CellT")

GRIDS = Path(__file__).parent / "grids"

QuickOption = Annotated[
    bool, typer.Option("--quick", help="Measure part of the grid, within 50 s on two cores.")
]
ThreadsOption = Annotated[
    str,
    typer.Option(
        metavar="NUMBERS", help="Comma-separated thread counts; the grid runs once with each."
    ),
]
EngineThreadsOption = Annotated[
    int | None, typer.Option("--threads", help="Number of threads; default: as in a server.")
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda or cuda:N; parts that need a CPU are left out.",
    ),
]
TypesOption = Annotated[
    str, typer.Option(metavar="TYPES", help="Comma-separated storage types: fp32, bf16.")
]
GridOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Grid file to use instead of the default.")
]
RootOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Folder of the generated checkpoints; default: the user cache."
    ),
]
DemoModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model", metavar="FOLDER", help="Checkpoint folder; default: the demo checkpoint."
    ),
]


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


class Benchmark(ABC, Generic[CellT]):
    """One run of a benchmark: its grid, its measurements and its tables.

    The runner makes the command line from the parameters of `__init__`, each annotated with its
    `typer.Option`. `__init__` must accept `quick`, check the options and load the grid.
    """

    name: ClassVar[str]
    bars: ClassVar[Mapping[str, Bar]] = {}
    """Limits by key of the summary."""
    resumable: ClassVar[bool] = False
    """True if a later run with the same file continues a run that was ended early."""
    conditions: ClassVar[Sequence[str]] = ()
    """Keys of the metadata that must be equal for a run to be continued."""

    def __init__(self, *, quick: bool, grid: Path) -> None:
        self.quick = quick
        self.grid_path = grid
        self.rooflines: RooflineByThreads | None = None
        """Rooflines whose figures are part of the metadata."""
        self.rows: list[Row] = []
        """All rows so far. The runner appends those that `run` yields."""
        self.status: Callable[[str], None] = lambda text: None
        """Function that shows what is being measured. The runner replaces it."""

    def meta(self) -> dict[str, Any]:
        """Return the conditions that the figures depend on, beyond those of `report.machine_meta`.

        The runner calls this method before the first cell, and again before it writes the JSON
        file.
        """
        from benchmarks.machine import operator_meta

        meta = {"grid": self.grid_path.name, **self.settings(), **operator_meta()}
        return meta | ({"limits": self.rooflines.as_meta()} if self.rooflines else {})

    def settings(self) -> dict[str, Any]:
        """Return the options that are part of the metadata."""
        return {}

    @abstractmethod
    def cells(self) -> Sequence[CellT]:
        """Return the cells of the grid in the order in which they are measured."""

    @abstractmethod
    def run(self, cell: CellT) -> Iterable[Row]:
        """Measure one cell and yield its rows."""

    @abstractmethod
    def summarize(self) -> dict[str, Any]:
        """Return the summary of the rows so far, with None or NaN for parts that were not run."""

    @abstractmethod
    def tables(self) -> Iterable[RenderableType]:
        """Return the tables to print, except that of the summary."""

    def summary_title(self) -> str:
        """Return the title of the summary's table."""
        return f"summary of {self.name}"

    def resume(self, rows: Sequence[Row]) -> list[Row]:
        """Return those rows of an earlier run that need not be measured again."""
        return []

    def draw(self) -> Iterable[Path]:
        """Draw the requested figures and return their files."""
        return []

    def close(self) -> None:
        """Release the resources that cells share. The runner calls this once, even after errors."""


def parse_types(text: str, *, quantized: bool = False) -> list[str]:
    """Return the storage types of a comma-separated list. Raises typer.BadParameter.

    quantized: whether the types of quantized models are valid as well.
    """
    from benchmarks.dtypes import DTYPES, MODEL_TYPES

    types, valid = text.split(","), MODEL_TYPES if quantized else DTYPES
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


def load_grid_values(path: Path, *, quick: bool) -> dict[str, Any]:
    """Return the entries of a grid file.

    quick: whether the entries under the key `quick` replace entries with the same keys.
    """
    values: dict[str, Any] = json.loads(path.read_text())
    return values | (values["quick"] if quick else {})


def server_threads() -> int:
    """Return the default number of threads of a server's engine."""
    from vlora.config import Options
    from vlora.cores import split_threads

    return split_threads(Options()).engine


def demo_folder() -> Path:
    """Return the folder of the demo checkpoint and its adapters."""
    from vlora import paths

    return paths.root() / "tools" / "demo"
