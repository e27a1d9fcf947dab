"""`vlora tile-search`: find the best tile for every shape and write the table."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vlora.cli.common import Command, option

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
    from vlora.atmm.search import table
    from vlora.atmm.search.cpu import CpuBackend
    from vlora.atmm.search.models import BENCH, sides_of
    from vlora.atmm.search.search import Space, filled, search
    from vlora.atmm.search.state import State

    console = Console(highlight=False)
    try:
        core = native.kernels().runtime
        sides = (*BENCH, *(sides_of(model) if model is not None else ()))
    except (ImportError, ValueError, OSError) as error:
        console.print(f"[bold red]error:[/] {error}", soft_wrap=True)
        raise typer.Exit(1) from None
    device = table.Cpu.here()
    counts = [int(count) for count in threads.split(",")]
    space = Space(sides)
    if quick:
        space = Space(sides, QUICK_RANKS, QUICK_SEGMENTS, max_rows=QUICK_ROWS)
    folder = output or (state if quick else table.TABLES)
    started = time.monotonic()
    for dtype in dtypes.split(","):
        isa = core.isa(dtype)
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
                console.print(f"{dtype}: {len(known.done)} shapes are already in {file}")
            effort = (QUICK_ROUNDS, QUICK_BUDGET) if quick else (ROUNDS, BUDGET)
            entries = search(backend, shapes, known, rounds=effort[0], budget=effort[1])
            label = f"{dtype}, {count} thread{'s' if count > 1 else ''}"
            found += filled(_shown(console, label, entries, len(shapes)), backend.key)
            files.append(file)
            searched += len(shapes)
        path = table.path_for(device, isa, dtype, folder)
        table.write(path, device, isa, dtype, found, threads=counts, shapes=searched)
        for file in files:
            file.unlink(missing_ok=True)
        console.print(f"{dtype}: {len(found)} entries in {path}", soft_wrap=True)
    console.print(f"done in {(time.monotonic() - started) / 60:.1f} min")


def _on_cuda(
    dtypes: Sequence[str], output: Path | None, state: Path, seconds: float, *, fresh: bool
) -> None:
    from vlora.atmm.cuda import operator
    from vlora.atmm.search.cuda_search import CudaSearch, shapes, write_table
    from vlora.atmm.tiles import TABLES

    console = Console(highlight=False)
    try:
        device = operator.current()
    except (ImportError, OSError, RuntimeError) as error:
        console.print(f"[bold red]error:[/] {error}", soft_wrap=True)
        raise typer.Exit(1) from None
    file = state / "cuda.jsonl"
    if fresh:
        file.unlink(missing_ok=True)
    wanted = shapes(dtypes)
    entries = CudaSearch(device).search(wanted, file, seconds)
    found = _shown(console, "cuda", entries, len(wanted))
    path = write_table(device, found, output or TABLES)
    console.print(f"{len(found)} of {len(wanted)} shapes in {path}", soft_wrap=True)


def _shown(
    console: Console, label: str, entries: Iterable[dict[str, Any]], total: int
) -> list[dict[str, Any]]:
    """Return the entries as a list, and show a progress bar while they are computed."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    found = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=total)
        for entry in entries:
            found.append(entry)
            progress.update(task, advance=1)
    return found
