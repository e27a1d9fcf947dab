"""`vlora bench`: the operator's commands, and the others'; torch is imported when one runs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from benchmarks.attention_cli import attention
from benchmarks.engine_cli import engine
from benchmarks.options import (
    JsonOption,
    QuickOption,
    ThreadsOption,
    TypesOption,
    console,
    counts,
    types,
)
from benchmarks.policies_cli import policies
from benchmarks.step_cli import step
from benchmarks.switch_cli import switch
from benchmarks.tiers_cli import adapters, prefix

if TYPE_CHECKING:
    from benchmarks.kernels.measurement import Result

bench_app = typer.Typer(help="Measure; every bench prints a table and writes JSON.")

TORCH_ISAS = {
    "scalar": ("default", "SSE4_2", "SSE41"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE"),
    "avx512_bf16": ("avx512", "AVX512", "AVX512_CORE_BF16"),
    "amx": ("avx512", "AVX512", "AVX512_CORE_AMX"),
}
"""Our instruction sets, in the words of ATen, MKL and oneDNN."""


@bench_app.callback()
def _root() -> None:
    """Measure; every bench prints a table and writes JSON."""


@bench_app.command()
def kernels(
    threads: ThreadsOption = "1,2",
    dtypes: TypesOption = "fp32,bf16",
    quick: QuickOption = False,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the speed-ups (matplotlib).")] = None,
    grid: Annotated[Path | None, typer.Option(help="Another grid file.")] = None,
    isa: Annotated[
        str | None,
        typer.Option(help=f"As on a CPU with less, for torch as well: {', '.join(TORCH_ISAS)}."),
    ] = None,
) -> None:
    """ATMM against PEFT's loop, a slice loop, dLoRA's einsum, padded batches, a static tile."""
    if isa is not None:
        _hold_torch_to(isa)
    from benchmarks import machine as atmm
    from benchmarks import report
    from benchmarks.kernels import measurement as bench
    from benchmarks.kernels.cells import GRIDS, load_grid

    shown = console()
    if isa is not None:
        atmm.use_isa(isa)
    path = grid or GRIDS / "kernels.json"
    cells = load_grid(path, types(dtypes), quick=quick)
    numbers = counts(threads)
    described = report.meta("bench kernels", quick) | {"grid": path.name, **atmm.describe()}
    effort = bench.QUICK if quick else bench.FULL
    results: list[Result] = []
    table = report.kernel_table()
    with suppress(KeyboardInterrupt), Progress(console=shown, transient=True) as progress:
        # Ctrl-C: what has been measured until then is reported.
        task = progress.add_task("measuring", total=len(cells) * len(numbers))
        limits = atmm.LimitsByThreads()
        for result in bench.run(
            cells,
            numbers,
            effort,
            limits,
            atmm.set_threads,
            bf16_instructions=atmm.bf16_instructions(),
        ):
            results.append(result)
            table.add_row(*report.kernel_cells(result))
            progress.update(task, advance=1, description=result.cell.name)
    atmm.set_threads(numbers[0])
    steady = bench.stability(bench.stability_cells(cells, quick=quick), effort)
    summary = bench.summarize(results) | bench.summarize_stability(steady)
    shown.print(table)
    report.show_left_out(shown, results)
    shown.print(report.stability_table(steady, effort.stability_rounds))
    shown.print(report.summary_table(summary, f"geometric means over threads {threads}"))
    described |= {"limits": limits.as_meta()}
    if json is not None:
        rows = [result.as_row() for result in results] + [{"stability": row} for row in steady]
        report.write_json(json, described, rows, summary)
        shown.print(f"written: {json}", soft_wrap=True)
    if plot is not None:
        report.plot_speed_ups(results, plot)


bench_app.command()(attention)
bench_app.command()(step)
bench_app.command()(engine)
bench_app.command()(switch)
bench_app.command()(policies)
bench_app.command()(adapters)
bench_app.command()(prefix)


def _hold_torch_to(isa: str) -> None:
    """Torch and its libraries read these once, when torch is imported."""
    if isa not in TORCH_ISAS:
        raise typer.BadParameter(f"--isa {isa!r}: known are {', '.join(TORCH_ISAS)}")
    names = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
    os.environ.update(zip(names, TORCH_ISAS[isa], strict=True))
