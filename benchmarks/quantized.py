"""The quantized benchmark: products with int8 and int4 weights against their roofline.

The weights come from memory. Types whose names end with "bf16" multiply in bf16. Those with
"dynamic" multiply bytes, and their roofline has the peak of a loop of such products. Each time is
that of the fastest round, which was not interrupted: it is shorter than a time slice of the system.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from benchmarks.frame import Row, ThreadedBenchmark
from benchmarks.gpu_device import discard
from benchmarks.machine import DTYPES, timed_with_rates
from vlora.device import host_memory
from vlora.kernels.formats import Format
from vlora.kernels.ops import Matrix
from vlora.kernels.quantized import QuantizedMatrix, allocate, arrange

READ_BYTES, MULTIPLY_ROUNDS = 64 << 20, 300_000
SUMMARY_ROWS = (1, 4, 16)
"""Numbers of rows whose figures are part of the summary. Decode steps have such numbers."""


@dataclass(kw_only=True)
class Quantized(ThreadedBenchmark):
    """Fraction of the roofline of each type. A cell is a number of rows of x."""

    name = "quantized"
    bars: ClassVar = {
        f"{kind}_{rows}": "≥ 0.65" for kind in ("int8", "int4-32") for rows in SUMMARY_ROWS
    } | {"int8_prefill_vs_float": "≥ 2.5", "int8_prefill_vs_peak": "≥ 0.6"}

    shown: ClassVar = {"products": "rows type us limit_us share_of_limit noise"}

    def cells(self) -> Sequence[int]:
        self.status("drawing weights")
        self._shape = self.values["width"], self.values["depth"]
        self._weights = {
            kind: _matrices(kind, *self._shape, self.values["mib"] << 20)
            for kind in self.values["types"]
        }
        rows: Sequence[int] = self.values["rows"]
        return rows

    def measure(self, cell: int) -> Iterator[Row]:
        self.status(f"{cell} rows")
        width, depth = self._shape
        x, out = torch.randn(cell, depth), torch.empty(cell, width)
        rounds, budget = (3, 0.05) if self.quick else (25, 2.0)
        options = {"rounds": rounds, "warm": False, "lead": True, "budget": budget}
        for peak_type in ("fp32", "bf16", "int8"):
            chosen = {
                kind: _next_product(matrices, x, out)
                for kind, matrices in self._weights.items()
                if _peak_type(kind) == peak_type
            }
            timings, rates = timed_with_rates(
                chosen, peak_type, MULTIPLY_ROUNDS, READ_BYTES, **options
            )
            for kind, timing in timings.items():
                seconds = min(timing.samples)
                multiplying = 2.0 * cell * width * depth / max(rates.peaks)
                reading = matrix_bytes(kind, width, depth) / max(rates.reads)
                limit = max(multiplying, reading)
                figures = {"us": seconds * 1e6, "limit_us": limit * 1e6, "noise": timing.noise}
                yield {"rows": cell, "type": kind, "share_of_limit": limit / seconds, **figures}

    def summarize(self) -> dict[str, Any]:
        summary = {
            f"{row['type']}_{row['rows']}": row["share_of_limit"]
            for row in self.rows
            if row["rows"] in SUMMARY_ROWS and str(row["type"]).startswith("int")
        }
        prefill = max(row["rows"] for row in self.rows)
        rows = {row["type"]: row for row in self.rows if row["rows"] == prefill}
        dynamic, floats = rows["int8-dynamic"], (rows["fp32"], rows["bf16"])
        ratio = min(row["us"] for row in floats) / dynamic["us"]
        figures = {
            "int8_prefill_vs_float": ratio,
            "int8_prefill_vs_peak": dynamic["share_of_limit"],
        }
        return summary | figures


def matrix_bytes(kind: str, width: int, depth: int) -> int:
    """Return the size in bytes of a matrix in one of the grid's types."""
    form = _format(kind)
    return form.matrix_bytes(width, depth) if form else width * depth * DTYPES[kind].itemsize


def _peak_type(kind: str) -> str:
    if "dynamic" in kind:
        return "int8"
    return "bf16" if "bf16" in kind else "fp32"


def _format(kind: str) -> Format | None:
    """Return the format of the weights of a quantized type, or None for fp32 and bf16."""
    if not kind.startswith("int"):
        return None
    name, group, *_ = [*kind.removesuffix(" bf16").removesuffix("-dynamic").split("-"), None]
    size = int(group) if group else None
    return Format(int(name[3:]), size, zeros=size is not None, dynamic="dynamic" in kind)


def _matrices(kind: str, width: int, depth: int, size: int) -> list[Matrix]:
    """Return random matrices of about `size` bytes in total, but at least two."""
    form = _format(kind)
    made: list[Matrix] = []
    drawn = torch.randn(width, depth)
    for _ in range(max(2, size // matrix_bytes(kind, width, depth))):
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


def _next_product(
    matrices: Sequence[Matrix], x: torch.Tensor, out: torch.Tensor
) -> Callable[[], None]:
    """Return a function. Each call multiplies x by the next of the matrices, in a cycle."""
    cycle = itertools.cycle(matrices)
    return lambda: discard(next(cycle)(x, out=out))
