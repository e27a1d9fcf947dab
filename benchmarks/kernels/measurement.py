"""Measurements of the LoRA operators, one cell of the grid at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.kernels.atmm_operator import Atmm, StaticTile, static_tiles
from benchmarks.kernels.cells import KernelCell
from benchmarks.kernels.operators import BASELINES, InFloat32, LoraCall, LoraOperator
from benchmarks.machine import ConcurrentRates, has_bf16_instructions, without_rates
from benchmarks.roofline import Roofline
from benchmarks.timing import interleaved, single_calls
from vlora.atmm.cpu import Cpu
from vlora.atmm.search.timing import Timing

COLD_TOTAL_BYTES = Cpu.here().cold_bytes
"""Size in bytes that the adapters of all layers of a cold cell should have together. The calls use
one layer after another.
"""
POSSIBLY_FASTEST = ("slice_loop", "padded")
"""Baselines that can be the fastest. The others take several times as long."""
MIN_LAYERS, MAX_LAYERS = 2, 512
MULTIPLY_ROUNDS = 100_000
"""Iterations of the peak microbenchmark per sample: 0.2 ms on a core that does 250 GFLOP/s."""


@dataclass(frozen=True)
class Effort:
    """Settings that decide how long a measurement takes.

    rounds: number of rounds. In a round, each operator of a cell is measured once.
    budget: seconds per operator in a cell.
    stability_rounds: number of measured calls per operator in the test of latency stability (100 in
        figure 18 of the paper).
    stability_warm_ups: number of calls before the measured calls (10 in figure 18).
    all_in_fp32: used for bf16 cells on a CPU without bf16 instructions. There, baselines are also
        measured with fp32 weights: all baselines if True, only those in POSSIBLY_FASTEST if False.
    """

    rounds: int
    budget: float
    stability_rounds: int
    stability_warm_ups: int
    all_in_fp32: bool


QUICK = Effort(5, 0.01, stability_rounds=15, stability_warm_ups=2, all_in_fp32=False)
FULL = Effort(9, 0.03, stability_rounds=100, stability_warm_ups=10, all_in_fp32=True)


@dataclass(frozen=True)
class KernelResult:
    """Timings by operator on one cell, and the reason for each operator that was left out."""

    cell: KernelCell
    threads: int
    roofline: Roofline
    timings: Mapping[str, Timing]
    left_out: Mapping[str, str]
    cold_rate: float | None = None
    """Bytes/s read from memory in the rounds of this cell."""
    peak: float | None = None
    """Flop/s of the multiply microbenchmark in the rounds of this cell."""

    @property
    def atmm(self) -> Timing:
        return self.timings[Atmm.name]

    @property
    def baselines(self) -> dict[str, Timing]:
        return {
            name: timing
            for name, timing in self.timings.items()
            if name != Atmm.name and not name.startswith(StaticTile.prefix)
        }

    @property
    def fastest(self) -> str:
        """Name of the fastest baseline."""
        baselines = self.baselines
        return min(baselines, key=lambda name: baselines[name].median)

    def speed_up(self, name: str) -> float | None:
        """Return the speed-up of ATMM over an operator, or None if the operator was left out."""
        return self.timings[name].median / self.atmm.median if name in self.timings else None

    @property
    def speed_up_over_fastest(self) -> float:
        return self.baselines[self.fastest].median / self.atmm.median

    @property
    def noise(self) -> float:
        """The larger of ATMM's noise and that of the fastest baseline."""
        return max(self.atmm.noise, self.baselines[self.fastest].noise)

    @property
    def is_slower(self) -> bool:
        """True if ATMM is slower than the fastest baseline by more than the noise."""
        return self.speed_up_over_fastest < 1 - self.noise

    @property
    def limit(self) -> float:
        """Roofline of the work in seconds.

        The rate of memory is the median of this cell's rounds. The rates of the caches and of the
        multiplications are the best of the run so far.
        """
        adapters, rows = (self.cell.adapter_bytes, self.cell.cold), (self.cell.row_bytes, False)
        return self.roofline.seconds(
            self.cell.flops, (adapters, rows), self.cell.dtype, self.cold_rate
        )

    @property
    def share_of_limit(self) -> float:
        """Fraction of the roofline: the roofline divided by the measured time."""
        return self.limit / self.atmm.median

    def as_row(self) -> dict[str, Any]:
        return {
            **self.cell.as_row(),
            "threads": self.threads,
            "limit_us": round(self.limit * 1e6, 3),
            "peak_gflops": None if self.peak is None else round(self.peak / 1e9, 1),
            "read_gb_per_s": None if self.cold_rate is None else round(self.cold_rate / 1e9, 1),
            "roofline": round(self.share_of_limit, 4),
            "fastest_baseline": self.fastest,
            "vs_fastest_baseline": round(self.speed_up_over_fastest, 4),
            "noise": round(self.noise, 4),
            "slower_than_noise": self.is_slower,
            "us": {name: round(t.median * 1e6, 3) for name, t in self.timings.items()},
            "noise_of": {name: round(t.noise, 4) for name, t in self.timings.items()},
            "left_out": dict(self.left_out),
        }


@dataclass
class Rotation:
    """Function whose calls run one operator on one layer after another.

    A hot cell has one layer. A cold cell has so many layers that each should have left the caches
    before it is used again.
    """

    layers: list[LoraCall]
    y: torch.Tensor
    x: torch.Tensor
    _next: int = field(default=0)

    def __call__(self) -> None:
        self.layers[self._next](self.y, self.x)
        self._next = (self._next + 1) % len(self.layers)


@torch.inference_mode()
def measure_cell(
    cell: KernelCell, threads: int, roofline: Roofline, effort: Effort
) -> KernelResult:
    """Measure ATMM and all operators that it is compared with on one cell."""
    operators: list[LoraOperator] = [Atmm(), *BASELINES]
    if cell.dtype == "bf16" and not has_bf16_instructions():
        operators += [
            InFloat32(baseline)
            for baseline in BASELINES
            if effort.all_in_fp32 or baseline.name in POSSIBLY_FASTEST
        ]
    if not cell.cold:
        operators += static_tiles(cell.dtype)
    result = _measure(cell, threads, roofline, effort, operators)
    assert result.limit > 0  # Computing the limit measures the rates that it needs.
    roofline.remeasure_if_due()
    return result


def _measure(
    cell: KernelCell,
    threads: int,
    roofline: Roofline,
    effort: Effort,
    operators: Sequence[LoraOperator],
) -> KernelResult:
    """Time the operators on one cell, interleaved."""
    generator = torch.Generator().manual_seed(cell.total_rows * cell.width)
    left_out: dict[str, str] = {}
    chosen: list[LoraOperator] = []
    for operator in operators:
        if (reason := operator.why_not(cell)) is None:
            chosen.append(operator)
        else:
            left_out[operator.name] = reason
    x = cell.draw_rows(generator)
    rotations = {op.name: Rotation([], *_rows(op, x)) for op in chosen}
    # For a cold cell, the microbenchmark reads about as many bytes per call as all layers hold.
    read_bytes = _layers(cell) * cell.adapter_bytes if cell.cold else 0
    rates = ConcurrentRates(cell.dtype, MULTIPLY_ROUNDS, read_bytes)
    pairs = cell.draw_pairs(generator)  # All layers have the same values.
    for _ in range(_layers(cell)):
        for operator in chosen:
            rotations[operator.name].layers.append(operator.prepare(pairs, cell))
    calls: dict[str, Callable[[], None]] = {**rotations, **rates.calls()}
    timings = interleaved(
        calls, rounds=effort.rounds, warm=not cell.cold, lead=cell.cold, budget=effort.budget
    )
    return KernelResult(
        cell, threads, roofline, without_rates(timings), left_out, *rates.rates(timings)
    )


def _rows(operator: LoraOperator, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y, filled with zeros, and a copy of x, both in the operator's type."""
    own = x.to(operator.dtype or x.dtype, copy=True)
    return torch.zeros_like(own), own


def _layers(cell: KernelCell) -> int:
    """Return the number of layers whose adapters the calls of a cell use in turn."""
    if not cell.cold:
        return 1
    layers = -(-COLD_TOTAL_BYTES // cell.adapter_bytes)
    return min(MAX_LAYERS, max(MIN_LAYERS, layers))


@torch.inference_mode()
def measure_stability(cell: KernelCell, effort: Effort) -> dict[str, Any]:
    """Return the coefficient of variation of each operator's single calls on one cell."""
    generator = torch.Generator().manual_seed(1)
    x, pairs = cell.draw_rows(generator), cell.draw_pairs(generator)
    rotations = {
        operator.name: Rotation([operator.prepare(pairs, cell)], *_rows(operator, x))
        for operator in (Atmm(), *BASELINES)
        if operator.why_not(cell) is None
    }
    timings = single_calls(
        rotations, rounds=effort.stability_rounds, warm_ups=effort.stability_warm_ups
    )
    return {
        **cell.as_row(),
        "cell": cell.name,
        "variation": {name: round(t.variation, 4) for name, t in timings.items()},
        "mean_us": {
            name: round(sum(t.samples) / len(t.samples) * 1e6, 2) for name, t in timings.items()
        },
    }


def stability_cells(cells: Sequence[KernelCell], *, quick: bool) -> list[KernelCell]:
    """Return the cells of the latency stability test: one per type and number of rows.

    They are hot cells of width 1024 with mixed ranks, from small to large batches, as in figure 18
    of the paper.

    quick: whether to return only every second cell.
    """
    distinct: dict[tuple[str, int], KernelCell] = {}
    for cell in cells:
        if not cell.cold and cell.width == 1024 and cell.rank == "mixed":
            distinct.setdefault((cell.dtype, cell.total_rows), cell)
    chosen = sorted(distinct.values(), key=lambda cell: (cell.dtype, cell.total_rows))
    return chosen[::2] if quick else chosen
