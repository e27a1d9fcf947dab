"""The attention benchmark: the kernel for KV pages against torch's attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import RenderableType

from benchmarks.benchmark import (
    GRIDS,
    Bar,
    Benchmark,
    EngineThreadsOption,
    GridOption,
    QuickOption,
    Row,
    TypesOption,
    at_least,
    parse_types,
    server_threads,
)

if TYPE_CHECKING:
    from benchmarks.attention.measurement import AttentionCell, AttentionResult


class AttentionBenchmark(Benchmark["AttentionCell"]):
    """Attention over KV pages in decode, prefill and mixed steps."""

    name = "attention"
    bars: ClassVar[Mapping[str, Bar]] = {
        "vs_twin_worst": at_least(1),
        "roofline_decode": at_least(0.667),
    }

    def __init__(
        self,
        *,
        dtypes: TypesOption = "fp32,bf16",
        threads: EngineThreadsOption = None,
        quick: QuickOption = False,
        grid: GridOption = None,
    ) -> None:
        super().__init__(quick=quick, grid=grid or GRIDS / "attention.json")
        from benchmarks import machine
        from benchmarks.attention.measurement import load_grid

        self._threads = threads or server_threads()
        machine.set_threads(self._threads)
        self._cells = load_grid(self.grid_path, parse_types(dtypes), quick=quick)
        self._roofline = machine.RooflineByThreads()(self._threads)
        self._results: list[AttentionResult] = []

    def settings(self) -> dict[str, Any]:
        return {"threads": self._threads}

    def cells(self) -> Sequence[AttentionCell]:
        return self._cells

    def run(self, cell: AttentionCell) -> Iterator[Row]:
        from benchmarks.attention.measurement import FULL, QUICK, measure

        self.status(cell.name)
        self._results.append(measure(cell, QUICK if self.quick else FULL, self._roofline))
        yield self._results[-1].as_row()

    def summarize(self) -> dict[str, Any]:
        from benchmarks.attention.measurement import summarize

        return summarize(self._results)

    def tables(self) -> Iterable[RenderableType]:
        from benchmarks.attention.measurement import KERNEL, TWIN
        from benchmarks.report import figure_table

        columns = ("cell", "kernel µs", "twin µs", "limit µs", "twin/kernel", "limit/time", "noise")
        table = figure_table(columns, "twin: gather the pages, then torch's attention")
        for result in self._results:
            kernel, twin = result.timings[KERNEL], result.timings[TWIN]
            table.add_row(
                result.cell.name,
                f"{kernel.median * 1e6:.0f}",
                f"{twin.median * 1e6:.0f}",
                f"{result.limit * 1e6:.0f}",
                f"{result.vs_twin:.2f}",
                f"{result.share_of_limit:.2f}",
                f"±{kernel.noise:.0%}",
            )
        return [table]

    def summary_title(self) -> str:
        return "roofline: fraction of the roofline; vs_twin: time of torch's attention / our time"
