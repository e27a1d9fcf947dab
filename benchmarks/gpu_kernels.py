"""ATMM on a GPU against other LoRA operators, over the grid of the benchmark `kernels`.

The baselines are those of the benchmark `kernels` (PEFT's loop, a loop over the rows of each
adapter, dLoRA's einsum, batches padded to equal size), ATMM with one tile choice for all shapes
("static") and, if they can be imported, the kernels of vLLM and SGLang. Each operator is timed as a
captured graph (device time) and call by call (with host time). Before that, its result is compared
with one in float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_device import device_limits, write_json
from benchmarks.gpu_peers import PEERS
from benchmarks.gpu_timing import GpuLimits
from benchmarks.lora_operators import BASELINES, KernelCell, LoraCall, LoraOperator, load_grid
from benchmarks.machine import DTYPES
from vlora.atmm.cuda.choice import KernelChoice, Shape, Table, built_in
from vlora.atmm.cuda.operator import Operator, current, table_path
from vlora.atmm.cuda.tables import DeviceGroup
from vlora.atmm.search.gpu_timing import Call as Pass
from vlora.atmm.search.gpu_timing import GpuTiming, GpuWork, interleaved
from vlora.atmm.types import LoraPair

GRID = Path(__file__).parent / "grids" / "kernels.json"
ATMM, STATIC = "atmm", "static: "
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


class Drawn(KernelCell):
    """A cell whose slots are drawn once, on the CPU.

    `KernelCell.slots` draws the slots again at each access, on the default device.
    """

    @cached_property
    def slots(self) -> tuple[int, ...]:
        with torch.device("cpu"):
            return KernelCell.slots.fget(self)  # type: ignore[attr-defined,no-any-return]


class Atmm(LoraOperator):
    """The operator under test, with the table's choices or one choice for every shape."""

    def __init__(
        self, operator: Operator, choice: KernelChoice | None = None, name: str = ATMM
    ) -> None:
        self.name = name  # type: ignore[misc]
        self._operator, self._choice = operator, choice

    def why_not(self, cell: KernelCell) -> str | None:
        if self._choice is not None and self._choice.shrink is not None and cell.width % 8:
            return "not aligned to 16 bytes"
        return None

    def prepare(self, pairs: Sequence[LoraPair], cell: KernelCell) -> LoraCall:
        operator = self._operator
        group = DeviceGroup(cell.width, [cell.width], pairs[0].a.dtype, operator.device)
        for pair in pairs:
            group.append([pair])
        group.ready()
        segments = operator.segments(cell.segments)

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            operator.apply(y, x, segments, group, self._choice)

        return call


@dataclass
class GpuKernelResult:
    """Seconds per call of each operator on one cell, timed as a graph and call by call.

    limit: roofline of a call in seconds.
    left_out: reason for each operator that was left out.
    choice: name of the kernels and tiles that ATMM chose.
    layers: number of layers that the calls use in turn.
    """

    cell: KernelCell
    limit: float
    graph: dict[str, GpuTiming] = field(default_factory=dict)
    eager: dict[str, GpuTiming] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    choice: str = ""
    layers: int = 1

    def as_row(self) -> dict[str, Any]:
        def us(timed: Mapping[str, GpuTiming]) -> dict[str, float]:
            return {name: round(one.median * 1e6, 2) for name, one in timed.items()}

        return {
            **self.cell.as_row(),
            "name": self.cell.name,
            "limit_us": round(self.limit * 1e6, 4),
            "choice": self.choice,
            "layers_mb": round(self.layers * self.cell.adapter_bytes / 1e6, 1),
            "graph_us": us(self.graph),
            "eager_us": us(self.eager),
            "noise": {name: round(one.noise, 3) for name, one in self.graph.items()},
            "left_out": self.left_out,
        }


def measure(
    cell: KernelCell, operator: Operator, statics: Mapping[str, KernelChoice], limits: GpuLimits
) -> GpuKernelResult:
    """Measure all operators on one cell, interleaved."""
    cell = Drawn(**vars(cell))
    device = operator.device
    generator = torch.Generator().manual_seed(cell.total_rows * cell.width)
    pairs = [LoraPair(a.to(device), b.to(device)) for a, b in cell.draw_pairs(generator)]
    x = cell.draw_rows(generator).to(device)
    result = GpuKernelResult(cell, limits.seconds(cell.bytes, cell.flops, cell.dtype))
    if cell.cold:
        most = 2 if operator.library.emulated else MOST_LAYERS
        result.layers = min(most, max(2, -(-COLD_BYTES // cell.adapter_bytes)))
    candidates = [Atmm(operator), *BASELINES, *PEERS]
    if not cell.cold:
        candidates += [Atmm(operator, choice, STATIC + name) for name, choice in statics.items()]
    passes = _checked_passes(candidates, pairs, x, result)
    captured = {}
    for name, calls in passes.items():
        if name in UNCAPTURED:
            continue
        try:
            captured[name] = GpuWork(calls, graph=True)
        except RuntimeError as raised:
            if name == ATMM:
                raise
            result.left_out[f"{name} as a graph"] = str(raised).splitlines()[0][:200]
    result.graph = interleaved(captured, ROUNDS)
    dynamic = {name: calls for name, calls in passes.items() if not name.startswith(STATIC)}
    eager = {name: GpuWork(calls, graph=False) for name, calls in dynamic.items()}
    result.eager = interleaved(eager, ROUNDS)
    group = DeviceGroup(cell.width, [cell.width], DTYPES[cell.dtype], device)
    group.max_rank = max(-(-rank // 8) * 8 for rank in cell.ranks)
    chosen = operator.choose(torch.empty_like(x), x, operator.segments(cell.segments), group)
    result.choice = chosen.name
    operator.check()
    return result


def _checked_passes(
    candidates: Sequence[LoraOperator],
    pairs: Sequence[LoraPair],
    x: torch.Tensor,
    result: GpuKernelResult,
) -> dict[str, list[Pass]]:
    """Return the calls of each operator whose result is right; write down why others are left out.

    An operator has a call for each of `result.layers` layers.
    """
    cell, want = result.cell, _expected(x, pairs, result.cell)
    passes: dict[str, list[Pass]] = {}
    for candidate in candidates:
        reason = candidate.why_not(cell)
        if reason is None:
            try:
                with torch.device(x.device):
                    calls = [candidate.prepare(pairs, cell) for _ in range(result.layers)]
                error = _error(calls[0], x, want)
                if not error < TOLERANCE:
                    reason = f"wrong: {error:.1e} of the largest value"
            except Exception as raised:  # An error in a foreign kernel must not stop the benchmark.
                if candidate.name == ATMM:
                    raise
                reason = f"{type(raised).__name__}: {raised}".splitlines()[0][:200]
        if reason is not None:
            result.left_out[candidate.name] = reason
            continue
        y = torch.randn_like(x)
        passes[candidate.name] = [partial(call, y, x) for call in calls]
    return passes


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
    cells: Sequence[KernelCell],
    operator: Operator,
    statics: Mapping[str, KernelChoice],
    limits: GpuLimits,
    seconds: float,
) -> Iterator[GpuKernelResult]:
    """Yield the results of the cells, for at most about `seconds` in total.

    The iterator ends before a cell for which the time left would probably not suffice.
    """
    end, longest = time.monotonic() + seconds, 0.0
    for cell in cells:
        started = time.monotonic()
        if started + 1.5 * longest > end:
            return
        yield measure(cell, operator, statics, limits)
        longest = max(longest, time.monotonic() - started)


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return geometric means of speed-ups for hot decode, cold decode and prefill.

    Figures whose names end in `_eager` are timed call by call, the others as graphs. PEFT's loop is
    timed call by call only. `limit` is the roofline divided by ATMM's time.
    """
    summary: dict[str, Any] = {"cells": len(rows)}
    for regime, chosen in (
        ("decode_hot", [r for r in rows if r["regime"] == "decode" and not r["cold"]]),
        ("decode_cold", [r for r in rows if r["regime"] == "decode" and r["cold"]]),
        ("prefill", [r for r in rows if r["regime"] == "prefill"]),
    ):
        if not chosen:
            continue
        summary[f"{regime}_limit"] = _mean([r["limit_us"] / r["graph_us"][ATMM] for r in chosen])
        for kind, suffix in (("graph_us", ""), ("eager_us", "_eager")):
            names = sorted({n for r in chosen for n in r[kind] if not n.startswith((ATMM, STATIC))})
            for name in names:
                ratios = [r[kind][name] / r[kind][ATMM] for r in chosen if name in r[kind]]
                summary[f"{regime}_vs_{name}{suffix}"] = _mean(ratios)
    hot = [r for r in rows if not r["cold"]]
    by_row = [{name for name in r["graph_us"] if name.startswith(STATIC)} for r in hot]
    shared = set.intersection(*by_row) if by_row else set()
    means = {n: _mean([r["graph_us"][n] / r["graph_us"][ATMM] for r in hot]) for n in shared}
    if means:
        best = min(means, key=means.__getitem__)
        summary["adaptive_vs_best_static"], summary["best_static"] = means[best], best
    summary["left_out"] = {n: why for r in rows for n, why in r["left_out"].items()}
    return summary


def _mean(values: Sequence[float]) -> float:
    return round(statistics.geometric_mean(values), 3)


def static_choices(operator: Operator) -> dict[str, KernelChoice]:
    """Return the choices that most shapes of prompts have, by name."""
    shapes = [
        Shape("bf16", rows, side, side, rank, 2)
        for rows in (16, 64, 256)
        for side in (1024, 4096)
        for rank in (16, 64)
    ]
    count = operator.multiprocessors
    picks = [built_in(shape, operator.library, count, tensor_cores=True) for shape in shapes]
    most = sorted(set(picks), key=lambda choice: (-picks.count(choice), choice.name))[:6]
    return {choice.name: choice for choice in most}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_kernels", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of the results")
    parser.add_argument("--seconds", type=float, default=45.0, metavar="N", help="time limit")
    parser.add_argument("--tables", type=Path, metavar="FOLDER", help="tables of a tile search")
    given = parser.parse_args()
    operator = current()
    if given.tables and (path := table_path(operator.name, given.tables)).exists():
        operator.table = Table.load(path, operator.library)
    cells = [cell for quick in (True, False) for cell in load_grid(GRID, ["bf16"], quick=quick)]
    rows: list[dict[str, Any]] = []
    statics, limits = static_choices(operator), device_limits()
    for result in run(list(dict.fromkeys(cells)), operator, statics, limits, given.seconds):
        rows.append(result.as_row())
        print(json.dumps(rows[-1]), flush=True)
        write_json(given.json, {"rows": rows, "summary": summarize(rows)})
    print(f"{len(rows)} of {len(set(cells))} cells")
    if not rows:
        raise SystemExit("no cell was finished in time")


if __name__ == "__main__":
    main()
