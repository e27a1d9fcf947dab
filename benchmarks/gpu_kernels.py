"""ATMM on a GPU against other LoRA operators, over the grid of the benchmark `kernels`.

The baselines are those of the benchmark `kernels`: PEFT's loop, a loop over the rows of each
adapter, dLoRA's einsum, batches padded to equal size. Each operator is timed as a captured graph,
PEFT's loop call by call. Before that, its result is compared with one in float64.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_device import GpuLimits, device_limits, parser_of, write_json
from benchmarks.lora_operators import BASELINES, KernelCell, LoraCall, LoraOperator, load_grid
from benchmarks.machine import DTYPES
from vlora.atmm.cuda.choice import Table
from vlora.atmm.cuda.operator import Operator, current, table_path
from vlora.atmm.cuda.tables import DeviceGroup
from vlora.atmm.search.gpu_timing import GpuWork, interleaved
from vlora.atmm.types import LoraPair

GRID = Path(__file__).parent / "grids" / "kernels.json"
UNCAPTURED = ("peft_loop",)
"""Baselines that cannot be captured, because each call copies index lists to the device."""
COLD_BYTES = 256 << 20
MOST_LAYERS = 128
"""Maximum number of layers in a cold cell, which its calls use in turn. A cell has as many layers
as COLD_BYTES can hold, up to this number. The layers of small adapters may therefore still fit into
L2 together. The figure `layers_mb` shows their total size.
"""
ROUNDS = 5
TOLERANCE = 3e-2
"""Tolerance relative to the largest true value. bf16 rounds intermediates to 8 bits."""


class Atmm(LoraOperator):
    """The operator under test."""

    name = "atmm"

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        operator = self._operator
        group = DeviceGroup(cell.width, [cell.width], pairs[0].a.dtype, operator.device)
        for pair in pairs:
            group.append([pair])
        group.ready()
        segments = operator.segments(cell.segments)
        return lambda y, x: operator.apply(y, x, segments, group)


def measure(cell: KernelCell, operator: Operator, limits: GpuLimits) -> dict[str, Any]:
    """Measure all operators on one cell, interleaved, and return its row.

    The calls of an operator use `layers` layers in turn. The row has the reason for each operator
    that was left out.
    """
    device = operator.device
    generator = torch.Generator().manual_seed(cell.total_rows * cell.width)
    pairs = [LoraPair(a.to(device), b.to(device)) for a, b in cell.draw_pairs(generator)]
    x = cell.draw_rows(generator).to(device)
    want = _expected(x, pairs, cell)
    layers = 1
    if cell.cold:
        most = 2 if operator.library.emulated else MOST_LAYERS
        layers = min(most, max(2, -(-COLD_BYTES // cell.adapter_bytes)))
    left_out: dict[str, str] = {}
    work: dict[str, GpuWork] = {}
    for candidate in (Atmm(operator), *BASELINES):
        if (reason := candidate.why_not(cell)) is None:
            with torch.device(device):
                calls = [candidate.prepare(pairs, cell) for _ in range(layers)]
            if not (error := _error(calls[0], x, want)) < TOLERANCE:
                reason = f"wrong: {error:.1e} of the largest value"
        if reason is not None:
            left_out[candidate.name] = reason
            continue
        y = torch.randn_like(x)
        passes = [partial(call, y, x) for call in calls]
        work[candidate.name] = GpuWork(passes, graph=candidate.name not in UNCAPTURED)
    timed = interleaved(work, ROUNDS)
    group = DeviceGroup(cell.width, [cell.width], DTYPES[cell.dtype], device)
    group.max_rank = max(-(-rank // 8) * 8 for rank in cell.ranks)
    chosen = operator.choose(torch.empty_like(x), x, operator.segments(cell.segments), group)
    operator.check()
    return {
        **cell.as_row(),
        "limit_us": round(limits.seconds(cell.bytes, cell.flops, cell.dtype) * 1e6, 4),
        "choice": chosen.name,
        "layers_mb": round(layers * cell.adapter_bytes / 1e6, 1),
        "us": {name: round(one.median * 1e6, 2) for name, one in timed.items()},
        "noise": {name: round(one.noise, 3) for name, one in timed.items()},
        "left_out": left_out,
    }


def _expected(x: torch.Tensor, pairs: Sequence[LoraPair], cell: KernelCell) -> torch.Tensor:
    """Return what the LoRA operator adds to y, computed in float64."""
    want = torch.zeros_like(x, dtype=torch.float64)
    for s in cell.segments:
        rows = slice(s.start, s.start + s.length)
        a, b = (part.double() for part in pairs[s.slot])
        want[rows] = (x[rows].double() @ a.T) @ b.T
    return want


def _error(call: LoraCall, x: torch.Tensor, want: torch.Tensor) -> float:
    before = torch.randn_like(x)
    y = before.clone()
    call(y, x)
    true = before.double() + want
    return float((y.double() - true).abs().max() / true.abs().max())


def run(
    cells: Sequence[KernelCell], operator: Operator, limits: GpuLimits, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the cells, for at most about `seconds` in total.

    The iterator ends before a cell for which the time left would probably not suffice.
    """
    end, longest = time.monotonic() + seconds, 0.0
    for cell in cells:
        started = time.monotonic()
        if started + 1.5 * longest > end:
            return
        yield measure(cell, operator, limits)
        longest = max(longest, time.monotonic() - started)


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return geometric means of speed-ups for hot decode, cold decode and prefill.

    `limit` is the roofline divided by ATMM's time.
    """
    summary: dict[str, Any] = {"cells": len(rows)}
    for regime, chosen in (
        ("decode_hot", [r for r in rows if r["regime"] == "decode" and not r["cold"]]),
        ("decode_cold", [r for r in rows if r["regime"] == "decode" and r["cold"]]),
        ("prefill", [r for r in rows if r["regime"] == "prefill"]),
    ):
        for name in sorted({name for row in chosen for name in row["us"]}):
            times = [(r["us"][name], r["us"]["atmm"]) for r in chosen if name in r["us"]]
            key = f"{regime}_vs_{name}"
            if name == "atmm":
                times = [(r["limit_us"], r["us"]["atmm"]) for r in chosen]
                key = f"{regime}_limit"
            summary[key] = round(statistics.geometric_mean(a / b for a, b in times), 3)
    return summary | {"left_out": {n: why for r in rows for n, why in r["left_out"].items()}}


def main() -> None:
    parser = parser_of("gpu_kernels", __doc__)
    parser.add_argument("--seconds", type=float, default=45.0, metavar="N", help="time limit")
    parser.add_argument("--tables", type=Path, metavar="FOLDER", help="tables of a tile search")
    given = parser.parse_args()
    operator = current()
    if given.tables and (path := table_path(operator.name, given.tables)).exists():
        operator.table = Table.load(path, operator.library)
    cells = [cell for quick in (True, False) for cell in load_grid(GRID, ["bf16"], quick=quick)]
    rows: list[dict[str, Any]] = []
    for row in run(list(dict.fromkeys(cells)), operator, device_limits(), given.seconds):
        rows.append(row)
        print(json.dumps(row), flush=True)
        write_json(given.json, {"rows": rows, "summary": summarize(rows)})
    print(f"{len(rows)} of {len(set(cells))} cells")
    if not rows:
        raise SystemExit("no cell was finished in time")


if __name__ == "__main__":
    main()
