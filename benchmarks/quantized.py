"""The quantized benchmark: products with int8 and int4 weights against their roofline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import RenderableType

from benchmarks.benchmark import (
    GRIDS,
    Bar,
    Benchmark,
    EngineThreadsOption,
    QuickOption,
    Row,
    at_least,
    load_grid_values,
    server_threads,
)

if TYPE_CHECKING:
    from vlora.kernels.ops import Matrix

MULTIPLY_ROUNDS = 300_000
READ_BYTES = 64 << 20
# Number of rounds, in which each type is measured once, and seconds per type.
ROUNDS, BUDGET = 25, 2.0
QUICK_ROUNDS, QUICK_BUDGET = 3, 0.05
SUMMARY_ROWS = (1, 4, 16)
"""Numbers of rows whose figures are part of the summary. Decode steps have such numbers."""


class QuantizedBenchmark(Benchmark[int]):
    """Products whose weights come from memory. A cell is a number of rows of x.

    Each time is that of the fastest round. Types whose names end with "bf16" multiply in bf16.
    """

    name = "quantized"
    bars: ClassVar[Mapping[str, Bar]] = {
        f"{kind}_{rows}": at_least(0.65) for kind in ("int8", "int4-32") for rows in SUMMARY_ROWS
    }

    def __init__(self, *, threads: EngineThreadsOption = None, quick: QuickOption = False) -> None:
        super().__init__(quick=quick, grid=GRIDS / "quantized.json")
        from benchmarks import machine

        self._threads = threads or server_threads()
        machine.set_threads(self._threads)
        self._grid = load_grid_values(self.grid_path, quick=quick)
        self._matrices: dict[str, list[Matrix]] = {}

    def settings(self) -> dict[str, Any]:
        return {"threads": self._threads}

    def cells(self) -> Sequence[int]:
        rows: Sequence[int] = self._grid["rows"]
        return rows

    def run(self, cell: int) -> Iterator[Row]:
        import torch

        from benchmarks.machine import ConcurrentRates
        from benchmarks.timing import interleaved
        from vlora.atmm.search.timing import Timing

        self.status(f"{cell} rows")
        width, depth = self._grid["width"], self._grid["depth"]
        if not self._matrices:
            self._matrices = {
                kind: _matrices(kind, width, depth, self._grid["mib"] << 20)
                for kind in self._grid["types"]
            }
        x, out = torch.randn(cell, depth), torch.empty(cell, width)
        for peak_type in ("fp32", "bf16"):
            matrices = {
                kind: matrices
                for kind, matrices in self._matrices.items()
                if ("bf16" in kind) == (peak_type == "bf16")
            }
            rates = ConcurrentRates(peak_type, MULTIPLY_ROUNDS, READ_BYTES)
            calls = {kind: _next_product(each, x, out) for kind, each in matrices.items()}
            timings = interleaved(
                calls | rates.calls(),
                rounds=QUICK_ROUNDS if self.quick else ROUNDS,
                warm=False,
                lead=True,
                budget=QUICK_BUDGET if self.quick else BUDGET,
            )
            # The fastest sample was not interrupted: it is shorter than a time slice of the system.
            fastest = {name: Timing((min(t.samples),)) for name, t in timings.items()}
            read, peak = rates.rates(fastest)
            for kind in matrices:
                seconds = fastest[kind].median
                limit = None
                if read is not None and peak is not None:
                    flops = 2.0 * cell * width * depth
                    limit = max(flops / peak, matrix_bytes(kind, width, depth) / read)
                yield {
                    "rows": cell,
                    "type": kind,
                    "us": round(seconds * 1e6, 1),
                    "limit_us": None if limit is None else round(limit * 1e6, 1),
                    "share_of_limit": None if limit is None else round(limit / seconds, 3),
                    "noise": round(timings[kind].noise, 3),
                }

    def summarize(self) -> dict[str, Any]:
        return {
            f"{row['type']}_{row['rows']}": row["share_of_limit"]
            for row in self.rows
            if row["rows"] in SUMMARY_ROWS and str(row["type"]).startswith("int")
        }

    def tables(self) -> Iterable[RenderableType]:
        from benchmarks.report import figure_table

        kinds = self._grid["types"]
        table = figure_table(
            ("rows", *kinds), "µs of a product, and (in parentheses) the fraction of the roofline"
        )
        for rows, group in itertools.groupby(self.rows, key=lambda row: row["rows"]):
            by_kind = {row["type"]: row for row in group}
            cells = (f"{by_kind[k]['us']:.0f} ({by_kind[k]['share_of_limit']})" for k in kinds)
            table.add_row(str(rows), *cells)
        return [table]


def matrix_bytes(kind: str, width: int, depth: int) -> int:
    """Return the size in bytes of a matrix in one of the grid's types."""
    form = _format(kind)
    if form is None:
        return width * depth * (4 if kind == "fp32" else 2)
    size: int = form.matrix_bytes(width, depth)
    return size


def _format(kind: str) -> Any:
    """Return the format of the weights of a quantized type, or None for fp32 and bf16."""
    from vlora.kernels.quantized import Format

    name = kind.removesuffix(" bf16")
    if name == "int8":
        return Format(8, None)
    if not name.startswith("int4"):
        return None
    return Format(4, int(name.removeprefix("int4-")), zeros=True)


def _matrices(kind: str, width: int, depth: int, size: int) -> list[Matrix]:
    """Return random matrices of about `size` bytes in total, but at least two."""
    import torch

    from benchmarks.dtypes import DTYPES
    from vlora.device import host_memory
    from vlora.kernels.ops import Matrix
    from vlora.kernels.quantized import QuantizedMatrix, allocate, arrange

    form = _format(kind)
    count = max(2, size // matrix_bytes(kind, width, depth))
    made: list[Matrix] = []
    drawn = torch.randn(width, depth)
    for _ in range(count):
        if form is None:
            weight = host_memory.hugepage_zeros(width, depth, dtype=DTYPES[kind])
            made.append(Matrix(weight.copy_(drawn)))
            continue
        dtype = torch.bfloat16 if kind.endswith("bf16") else torch.float32
        memory = host_memory.hugepage_zeros(form.matrix_bytes(width, depth), dtype=torch.uint8)
        stored = allocate(form, width, depth, dtype, memory)
        stored.values.random_(0, 256)
        stored.scales.uniform_(0.001, 0.002)
        if stored.zeros is not None:
            stored.zeros.random_(-64, 64)
        made.append(QuantizedMatrix(arrange(stored)))
    return made


def _next_product(matrices: Sequence[Matrix], x: Any, out: Any) -> Callable[[], None]:
    """Return a function. Each call multiplies x by the next of the matrices, in a cycle."""
    cycle = itertools.cycle(matrices)

    def product() -> None:
        next(cycle)(x, out=out)

    return product
