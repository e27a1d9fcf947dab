"""The adapters benchmark: many registered or resident adapters, and more than fit into memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import RenderableType
from rich.table import Table

from benchmarks.benchmark import Bar, Row, at_least, at_most
from benchmarks.demo_model import DemoModelBenchmark

if TYPE_CHECKING:
    from benchmarks.adapters.measurement import AdaptersResult, ManyAdapters

PARTS = ("registered", "resident", "distinct", "burst", "traces", "split")
COLUMNS = {
    "tokens_per_s": "tokens/s",
    "token_latency_ms": "ms/token",
    "p99_s": "p99, s",
    "step_ms": "step, ms",
    "step_beside_load_ms": "step during a load",
    "loads": "loads",
    "failed": "failed",
}
"""Headers of the table's columns, by their key in a row."""
TIERS = ("pool_hits", "host_hits", "misses")
"""Keys of three shares of the requests: those whose adapter was in the page pool, those whose
adapter was in host memory, and those whose adapter was on disk."""


class AdaptersBenchmark(DemoModelBenchmark[str]):
    """Throughput and latency with many adapters in the pool, in host memory and on disk."""

    name = "adapters"
    bars: ClassVar[Mapping[str, Bar]] = {
        "registered_2000_vs_5": at_least(0.95),
        "resident_64_vs_8": at_most(1.05),
        "distinct_over_predicted": at_most(1.1),
        "overcommit_throughput_ratio": at_least(0.7),
        "overcommit_failed": at_most(0),
        "kv_without_adapter": at_most(0),
        "steps_that_waited_for_disk": at_most(0),
    }

    def set_up(self) -> None:
        from benchmarks import machine

        self._roofline = machine.RooflineByThreads()(self._threads)
        self._scratch = tempfile.TemporaryDirectory()
        self._adapters: ManyAdapters | None = None
        self._results: list[AdaptersResult] = []

    def cells(self) -> Sequence[str]:
        return PARTS

    def run(self, cell: str) -> Iterator[Row]:
        from benchmarks.adapters.measurement import ManyAdapters

        if self._adapters is None:
            self.status("making adapters")
            self._adapters = ManyAdapters(self._model, Path(self._scratch.name), self._grid)
        self.status(cell)
        results = self._run_part(self._adapters, cell)
        self._results += results
        yield from (result.as_row() for result in results)

    def _run_part(self, adapters: ManyAdapters, part: str) -> list[AdaptersResult]:
        from benchmarks.adapters.split import run_split

        match part:
            case "registered":
                return adapters.run_registered()
            case "resident":
                return adapters.run_resident()
            case "distinct":
                return adapters.run_distinct(self._roofline)
            case "burst":
                return adapters.run_burst()
            case "traces":
                return adapters.run_traces(self.status)
            case _:
                return run_split(adapters, self._grid, self.status)

    def summarize(self) -> dict[str, Any]:
        from benchmarks.adapters import measurement, split

        return measurement.summarize(self._results) | split.summarize(self._results)

    def tables(self) -> Iterable[RenderableType]:
        table = Table(
            caption="pool, host, disk: shares of requests whose adapter was there."
            " docs/benchmarks/README.md explains the keys of the JSON file",
            padding=(0, 0),
        )
        # Minimum widths make a narrow terminal wrap the headers, and not cut the figures.
        table.add_column("load", min_width=11)
        for header in COLUMNS.values():
            table.add_column(header, justify="right", min_width=5)
        table.add_column("pool, host, disk")
        for row in self.rows:
            figures = (row.get(key) for key in COLUMNS)
            cells = ["" if figure is None else f"{figure:.4g}" for figure in figures]
            tiers = " ".join(f"{row[tier]:.0%}" for tier in TIERS if tier in row)
            table.add_row(f"{row['what']}: {row['setting']}", *cells, tiers)
        return [table]

    def close(self) -> None:
        self._scratch.cleanup()
