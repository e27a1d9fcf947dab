"""`vlora tile-search`: find the best tile for every shape and write the table."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vlora.cli.common import Command, console, counted, option, print_labelled, print_plain

if TYPE_CHECKING:
    from vlora.atmm.search.search import Space

ROUNDS, QUICK_ROUNDS = 7, 3
# Seconds after which MIN_ROUNDS samples of a shape are enough. They count separately for hot and
# for cold adapters.
BUDGET, QUICK_BUDGET = 0.12, 0.02
QUICK_RANKS, QUICK_SEGMENTS, QUICK_ROWS = (64,), (4,), 256
STATE = Path("out") / "tile-search"
app = typer.Typer(add_completion=False)


Model = Annotated[Path | None, option("FOLDER", "Checkpoint whose LoRA targets are searched.")]
Dtypes = Annotated[str, option("TYPES", "Storage types, such as fp32,bf16.")]
Threads = Annotated[str, option("NUMBERS", "Thread counts of a call, such as 1,2.")]
Output = Annotated[Path | None, option("FOLDER", "Folder for the tables.")]
StateFolder = Annotated[
    Path, option("FOLDER", "Folder from which an interrupted search is resumed.")
]
Quick = Annotated[
    bool, option(None, "Search few shapes in few rounds; write the table below --state.", "--quick")
]
Fresh = Annotated[bool, option(None, "Discard the state of an interrupted search.", "--fresh")]
Cuda = Annotated[
    bool, option(None, "Search on the GPU; --model and --threads apply to the CPU only.", "--cuda")
]
Minutes = Annotated[
    float, option("MINUTES", "With --cuda: stop after this many minutes; a later call resumes.")
]


@app.command(cls=Command)
def tile_search(
    model: Model = None,
    dtypes: Dtypes = "fp32,bf16",
    threads: Threads = "1",
    output: Output = None,
    state: StateFolder = STATE,
    quick: Quick = False,
    fresh: Fresh = False,
    cuda: Cuda = False,
    minutes: Minutes = 30.0,
) -> None:
    """Find the best tile for every shape by profiling (algorithm 2) and write the table."""
    if cuda:
        _on_cuda(dtypes.split(","), output, state, minutes * 60, fresh=fresh)
        return
    from vlora import native
    from vlora.atmm.search.search import BENCH, Space, sides_of

    with _errors(ImportError, ValueError, OSError):
        core = native.kernels().runtime
        sides = (*BENCH, *(sides_of(model) if model is not None else ()))
    counts = [int(count) for count in threads.split(",")]
    space = Space(sides)
    if quick:
        space = Space(sides, QUICK_RANKS, QUICK_SEGMENTS, max_rows=QUICK_ROWS)
    started = time.monotonic()
    for dtype in dtypes.split(","):
        _on_cpu(dtype, core.isa(dtype), counts, space, output, state, quick=quick, fresh=fresh)
    print_plain(f"done in {(time.monotonic() - started) / 60:.1f} min")


def _on_cpu(
    dtype: str,
    isa: str,
    counts: list[int],
    space: Space,
    output: Path | None,
    state: Path,
    *,
    quick: bool,
    fresh: bool,
) -> None:
    """Search all shapes of a storage type with each number of threads, and write the table."""
    from vlora.atmm import tiles
    from vlora.atmm.cpu import Cpu
    from vlora.atmm.search.cpu import CpuBackend
    from vlora.atmm.search.search import State, filled, search

    device = Cpu.here()
    rounds, budget = (QUICK_ROUNDS, QUICK_BUDGET) if quick else (ROUNDS, BUDGET)
    found: list[dict[str, Any]] = []
    files, searched = [], 0
    for count in counts:
        backend = CpuBackend(dtype, count)
        shapes = space.shapes(backend.key)
        stamp = f"{device.name} {isa} {dtype} {count} quick={quick} {backend.digest}"
        file = state / f"{isa}-{dtype}-{count}{'-quick' if quick else ''}.jsonl"
        if fresh:
            file.unlink(missing_ok=True)
        known = State(file, stamp)
        if known.done:
            print_plain(f"{dtype}: {len(known.done)} shapes are already in {file}")
        entries = search(backend, shapes, known, rounds=rounds, budget=budget)
        found += filled(
            _shown(f"{dtype}, {counted(count, 'thread')}", entries, len(shapes)), backend.key
        )
        files.append(file)
        searched += len(shapes)
    path = tiles.table_path(device, isa, dtype, output or (state if quick else tiles.TABLES))
    tiles.write_table(path, device, isa, dtype, found, threads=counts, shapes=searched)
    for file in files:
        file.unlink(missing_ok=True)
    print_plain(f"{dtype}: {len(found)} entries in {path}")


def _on_cuda(
    dtypes: Sequence[str], output: Path | None, state: Path, seconds: float, *, fresh: bool
) -> None:
    from vlora.atmm.cuda import operator
    from vlora.atmm.search.cuda_search import CudaSearch, shapes, write_table
    from vlora.atmm.tiles import TABLES

    with _errors(ImportError, OSError, RuntimeError):
        device = operator.current()
    file = state / "cuda.jsonl"
    if fresh:
        file.unlink(missing_ok=True)
    wanted = shapes(dtypes)
    found = _shown("cuda", CudaSearch(device).search(wanted, file, seconds), len(wanted))
    path = write_table(device, found, output or TABLES)
    print_plain(f"{len(found)} of {len(wanted)} shapes in {path}")


@contextmanager
def _errors(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        print_labelled("error:", "bold red", *str(error).split("\n"))
        raise typer.Exit(1) from None


def _shown(label: str, entries: Iterable[dict[str, Any]], total: int) -> list[dict[str, Any]]:
    """Return the entries as a list, and show a progress bar while they are computed."""
    text, bar = TextColumn("{task.description}"), BarColumn()
    columns = (text, bar, MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        return list(progress.track(entries, total=total, description=label))
