"""The kernels benchmark: ATMM compared with its baselines over a fixed grid."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import RenderableType

from benchmarks.benchmark import (
    GRIDS,
    Bar,
    Benchmark,
    GridOption,
    QuickOption,
    Row,
    ThreadsOption,
    TypesOption,
    at_least,
    at_most,
    parse_thread_counts,
    parse_types,
)

if TYPE_CHECKING:
    from benchmarks.kernels.cells import KernelCell
    from benchmarks.kernels.measurement import KernelResult

TORCH_ISAS = {
    "scalar": ("default", "SSE4_2", "SSE41"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE"),
    "avx512_bf16": ("avx512", "AVX512", "AVX512_CORE_BF16"),
    "amx": ("avx512", "AVX512", "AVX512_CORE_AMX"),
}
"""Names that ATen, MKL and oneDNN have for our instruction sets."""

Job = tuple["KernelCell", int | None]
"""A cell and its thread count; with None, the latency stability test on that cell."""


class KernelsBenchmark(Benchmark[Job]):
    """Benchmark of LoRA operators on hot and cold adapters, in decode and in prefill.

    The weights of hot adapters stay in the caches. The weights of cold adapters come from memory.
    """

    name = "kernels"
    bars: ClassVar[Mapping[str, Bar]] = {
        "decode_vs_peft_loop": at_least(4),
        "decode_vs_slice_loop": at_least(2.5),
        "decode_vs_einsum": at_least(10),
        "decode_vs_padded": at_least(4),
        "prefill_vs_peft_loop": at_least(3),
        "prefill_vs_slice_loop": at_least(2),
        "prefill_vs_einsum": at_least(20),
        "prefill_vs_padded": at_least(2),
        "roofline_decode_cold": at_least(0.667),
        "roofline_prefill": at_least(0.741),
        "cells_slower_beyond_noise": at_most(0),
        "roofline_decode_cold_bf16": at_least(0.667),
        "roofline_prefill_bf16": at_least(0.741),
        "cells_slower_beyond_noise_bf16": at_most(0),
    }

    def __init__(
        self,
        *,
        threads: ThreadsOption = "1,2",
        dtypes: TypesOption = "fp32,bf16",
        quick: QuickOption = False,
        plot: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help="Draw the speed-ups into this file (matplotlib)."),
        ] = None,
        grid: GridOption = None,
        isa: Annotated[
            str | None,
            typer.Option(
                metavar="ISA",
                help="Restrict our kernels and torch to an instruction set:"
                f" {', '.join(TORCH_ISAS)}.",
            ),
        ] = None,
    ) -> None:
        super().__init__(quick=quick, grid=grid or GRIDS / "kernels.json")
        if isa is not None:
            _restrict_torch(isa)  # It must precede the first import of torch.
        from benchmarks import machine
        from benchmarks.kernels.cells import load_grid
        from benchmarks.kernels.measurement import FULL, QUICK

        if isa is not None:
            machine.use_isa(isa)
        self._counts = parse_thread_counts(threads)
        self._cells = load_grid(self.grid_path, parse_types(dtypes), quick=quick)
        self._effort = QUICK if quick else FULL
        self.rooflines = self._rooflines = machine.RooflineByThreads()
        self._plot = plot
        self._results: list[KernelResult] = []
        self._stability: list[Row] = []

    def cells(self) -> Sequence[Job]:
        from benchmarks.kernels.measurement import stability_cells

        stable = stability_cells(self._cells, quick=self.quick)
        return [
            *((cell, count) for count in self._counts for cell in self._cells),
            *((cell, None) for cell in stable),
        ]

    def run(self, cell: Job) -> Iterator[Row]:
        from benchmarks import machine
        from benchmarks.kernels.measurement import measure_cell, measure_stability

        shape, threads = cell
        machine.set_threads(threads or self._counts[0])
        self.status(shape.name)
        if threads is None:
            self._stability.append(measure_stability(shape, self._effort))
            yield {"stability": self._stability[-1]}
        else:
            roofline = self._rooflines(threads)
            self._results.append(measure_cell(shape, threads, roofline, self._effort))
            yield self._results[-1].as_row()

    def summarize(self) -> dict[str, Any]:
        from benchmarks.kernels.summary import summarize, summarize_stability

        return summarize(self._results) | summarize_stability(self._stability)

    def tables(self) -> Iterable[RenderableType]:
        from benchmarks.kernels.summary import left_out_counts
        from benchmarks.kernels.tables import kernel_table, stability_table

        yield kernel_table(self._results)
        for reason, count in left_out_counts(self._results).items():
            yield f"left out in {count} cells: {reason}"
        yield stability_table(self._stability, self._effort.stability_rounds)

    def summary_title(self) -> str:
        return f"geometric means over threads {','.join(map(str, self._counts))}"

    def draw(self) -> Iterable[Path]:
        from benchmarks.kernels.tables import draw_speed_ups

        if self._plot is None:
            return []
        draw_speed_ups(self._results, self._plot)
        return [self._plot]


def _restrict_torch(isa: str) -> None:
    """Restrict torch and its libraries, which read these variables when torch is first imported."""
    if isa not in TORCH_ISAS:
        raise typer.BadParameter(f"--isa {isa!r}: valid names are {', '.join(TORCH_ISAS)}")
    names = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
    os.environ.update(zip(names, TORCH_ISAS[isa], strict=True))
