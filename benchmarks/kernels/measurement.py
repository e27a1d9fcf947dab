"""`vlora bench kernels`: ATMM beside its baselines over the committed grid."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.kernels.cells import Cell
from benchmarks.kernels.operators import BASELINES, Baseline, Call, InFloat32
from benchmarks.machine import MULTIPLY, READ, Atmm, Beside, StaticTile, static_tiles
from benchmarks.roofline import Limits
from benchmarks.timing import Timing, geometric_mean, interleaved, single_calls
from vlora.atmm.device import Device

COLD_TOTAL_BYTES = Device.here().cold_bytes
"""Adapters of a cold cell rotate through as many layers as make this much."""
MAY_BE_FASTEST = ("slice_loop", "padded")
"""Baselines; the others take several times as long."""
FEWEST_LAYERS, MOST_LAYERS = 2, 512
MULTIPLY_ROUNDS = 100_000
"""Of the loop at the peak, beside a cell: 0.2 ms of a core that does 250 GFLOP/s."""


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    rounds of all operators, and seconds for one of them in one cell; rounds and warm-ups of latency
    stability (the paper's figure 18: 100 after 10). all_in_fp32: in bf16 cells every baseline on
    fp32 weights as well, else those that can be the fastest.
    """

    rounds: int
    budget: float
    stability_rounds: int
    stability_warm_ups: int
    all_in_fp32: bool


QUICK = Effort(5, 0.01, stability_rounds=15, stability_warm_ups=2, all_in_fp32=False)
FULL = Effort(9, 0.03, stability_rounds=100, stability_warm_ups=10, all_in_fp32=True)


@dataclass(frozen=True)
class Result:
    """One cell: the timing of each operator, and who was left out and why."""

    cell: Cell
    threads: int
    limits: Limits
    timings: Mapping[str, Timing]
    left_out: Mapping[str, str]
    cold_rate: float | None = None
    """bytes/s from memory, by this cell's own rounds."""
    peak: float | None = None
    """flop/s, likewise."""

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
        baselines = self.baselines
        return min(baselines, key=lambda name: baselines[name].median)

    def speed_up(self, name: str) -> float | None:
        """Of ATMM over another; None where that was left out."""
        return self.timings[name].median / self.atmm.median if name in self.timings else None

    @property
    def against_fastest(self) -> float:
        return self.baselines[self.fastest].median / self.atmm.median

    @property
    def noise(self) -> float:
        """The larger interquartile range (over its median) of ATMM and the fastest baseline."""
        return max(self.atmm.noise, self.baselines[self.fastest].noise)

    @property
    def slower(self) -> bool:
        """Slower than the fastest baseline by more than the noise."""
        return self.against_fastest < 1 - self.noise

    @property
    def limit(self) -> float:
        """Seconds, by the median peak and memory rate in this cell's rounds, and the best rate of
        the caches that the run has seen so far."""
        adapters, rows = (self.cell.adapter_bytes, self.cell.cold), (self.cell.row_bytes, False)
        return self.limits.seconds(
            self.cell.flops, (adapters, rows), self.cell.dtype, self.cold_rate
        )

    @property
    def roofline(self) -> float:
        """Limit over measured time: 1 = at the limit."""
        return self.limit / self.atmm.median

    def as_row(self) -> dict[str, Any]:
        return {
            **self.cell.as_row(),
            "threads": self.threads,
            "limit_us": round(self.limit * 1e6, 3),
            "peak_gflops": None if self.peak is None else round(self.peak / 1e9, 1),
            "read_gb_per_s": None if self.cold_rate is None else round(self.cold_rate / 1e9, 1),
            "roofline": round(self.roofline, 4),
            "fastest_baseline": self.fastest,
            "vs_fastest_baseline": round(self.against_fastest, 4),
            "noise": round(self.noise, 4),
            "slower_than_noise": self.slower,
            "us": {name: round(t.median * 1e6, 3) for name, t in self.timings.items()},
            "noise_of": {name: round(t.noise, 4) for name, t in self.timings.items()},
            "left_out": dict(self.left_out),
        }


@dataclass
class Rotation:
    """Calls one prepared layer after the other: hot has one layer, cold as many as leave the
    caches between two calls of the same."""

    layers: list[Call]
    y: torch.Tensor
    x: torch.Tensor
    _next: int = field(default=0)

    def __call__(self) -> None:
        self.layers[self._next](self.y, self.x)
        self._next = (self._next + 1) % len(self.layers)


def measure(
    cell: Cell,
    threads: int,
    limits: Limits,
    effort: Effort,
    operators: Sequence[Baseline],
) -> Result:
    """All operators on one cell, interleaved."""
    generator = torch.Generator().manual_seed(cell.total_rows * cell.width)
    left_out: dict[str, str] = {}
    chosen: list[Baseline] = []
    for operator in operators:
        if (reason := operator.why_not(cell)) is None:
            chosen.append(operator)
        else:
            left_out[operator.name] = reason
    x = cell.draw_rows(generator)
    rotations = {op.name: Rotation([], *_rows(op, x)) for op in chosen}
    # A cold cell reads as many bytes as all its layers have, from memory like theirs.
    read = _layers(cell) * cell.adapter_bytes if cell.cold else 0
    beside = Beside(cell.dtype, MULTIPLY_ROUNDS, read)
    pairs = cell.draw_pairs(generator)  # the same values in all layers: each operator copies
    for _ in range(_layers(cell)):
        for operator in chosen:
            rotations[operator.name].layers.append(operator.prepare(pairs, cell))
    calls: dict[str, Callable[[], None]] = {**rotations, **beside.calls()}
    timings = interleaved(
        calls, rounds=effort.rounds, warm=not cell.cold, led=cell.cold, budget=effort.budget
    )
    rates = beside.rates(timings)
    work = {name: t for name, t in timings.items() if name not in (READ, MULTIPLY)}
    return Result(cell, threads, limits, work, left_out, *rates)


def _rows(operator: Baseline, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    own = x.to(operator.dtype or x.dtype, copy=True)
    return torch.zeros_like(own), own


def _layers(cell: Cell) -> int:
    if not cell.cold:
        return 1
    wanted = -(-COLD_TOTAL_BYTES // cell.adapter_bytes)
    return min(MOST_LAYERS, max(FEWEST_LAYERS, wanted))


@torch.inference_mode()
def run(
    cells: Sequence[Cell],
    threads: Sequence[int],
    effort: Effort,
    limits_for: Callable[[int], Limits],
    set_threads: Callable[[int], None],
    *,
    bf16_instructions: bool,
) -> Iterator[Result]:
    """Results as they come, thread count by thread count."""
    for count in threads:
        set_threads(count)
        limits = limits_for(count)
        for cell in cells:
            operators: list[Baseline] = [Atmm(), *BASELINES]
            if cell.dtype == "bf16" and not bf16_instructions:
                operators += [
                    InFloat32(one)
                    for one in BASELINES
                    if effort.all_in_fp32 or one.name in MAY_BE_FASTEST
                ]
            if not cell.cold:
                operators += static_tiles(cell.dtype)
            result = measure(cell, count, limits, effort, operators)
            assert result.limit > 0  # measures what this cell needs, while it is at hand
            limits.again_if_due()
            yield result


@torch.inference_mode()
def stability(cells: Sequence[Cell], effort: Effort) -> list[dict[str, Any]]:
    """Coefficients of variation over the effort's rounds, all operators interleaved."""
    rows = []
    for cell in cells:
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
        rows.append(
            {
                **cell.as_row(),
                "cell": cell.name,
                "variation": {name: round(t.variation, 4) for name, t in timings.items()},
                "mean_us": {
                    name: round(sum(t.samples) / len(t.samples) * 1e6, 2)
                    for name, t in timings.items()
                },
            }
        )
    return rows


def stability_cells(cells: Sequence[Cell], *, quick: bool) -> list[Cell]:
    """Small to large batches of the grid: figure 18 varies the batch."""
    distinct: dict[tuple[str, int], Cell] = {}
    for cell in cells:
        if not cell.cold and cell.width == 1024 and cell.rank == "mixed":
            distinct.setdefault((cell.dtype, cell.total_rows), cell)
    chosen = sorted(distinct.values(), key=lambda cell: (cell.dtype, cell.total_rows))
    return chosen[::2] if quick else chosen


def summarize_stability(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean coefficient of variation by operator, `variation_…`."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row["variation"].items():
            found.setdefault(name, []).append(value)
    return {f"variation_{name}": round(sum(v) / len(v), 4) for name, v in found.items()}


def summarize(results: Sequence[Result]) -> dict[str, Any]:
    """The keys of the issue, over all thread counts: fp32 plain, bf16 with `_bf16`."""
    summary: dict[str, Any] = {}
    for dtype, suffix in (("fp32", ""), ("bf16", "_bf16")):
        of_type = [result for result in results if result.cell.dtype == dtype]
        if not of_type:
            continue
        for key, value in _summary_of(of_type).items():
            summary[key + suffix] = value
    return summary


def _summary_of(results: Sequence[Result]) -> dict[str, Any]:
    decode = [r for r in results if r.cell.regime == "decode"]
    hot, cold = ([r for r in decode if r.cell.cold is heat] for heat in (False, True))
    prefill = [r for r in results if r.cell.regime == "prefill"]
    summary: dict[str, Any] = {}
    for regime, chosen in (("decode", hot), ("prefill", prefill), ("decode_cold", cold)):
        for baseline in BASELINES:
            summary[f"{regime}_vs_{baseline.name}"] = _mean_speed_up(chosen, baseline.name)
        others = {name for r in chosen for name in r.baselines if name.endswith("_in_fp32")}
        for name in sorted(others):
            summary[f"{regime}_vs_{name}"] = _mean_speed_up(chosen, name)
    # An upper bound: of the candidates of `static_tiles`, not of all tiles.
    summary["adaptive_vs_best_static"], summary["best_static"] = _against_static(results)
    worst = min(results, key=lambda r: r.against_fastest)
    summary["worst_cell_vs_best_baseline"] = round(worst.against_fastest, 3)
    summary["worst_cell"] = f"{worst.cell.name} {worst.threads}t vs {worst.fastest}"
    summary["cells"] = len(results)
    summary["cells_slower_beyond_noise"] = sum(r.slower for r in results)
    for name, chosen in (("decode_hot", hot), ("decode_cold", cold), ("prefill", prefill)):
        summary[f"roofline_{name}"] = _rounded(geometric_mean([r.roofline for r in chosen]))
    return summary


def _mean_speed_up(results: Sequence[Result], name: str) -> float | None:
    return _rounded(geometric_mean([s for r in results if (s := r.speed_up(name)) is not None]))


def _against_static(results: Sequence[Result]) -> tuple[float | None, str | None]:
    """The single static choice that is best over all hot cells, and ATMM's speed-up over it: an
    upper bound of what adaptive choice gains, since only the likely choices were timed."""
    results = [result for result in results if not result.cell.cold]
    if not results:
        return None, None
    names = set.intersection(
        *({n for n in r.timings if n.startswith(StaticTile.prefix)} for r in results)
    )
    means = {name: _mean_speed_up(results, name) for name in sorted(names)}
    known = {name: mean for name, mean in means.items() if mean is not None}
    if not known:
        return None, None
    best = min(known, key=known.__getitem__)
    return known[best], best.removeprefix(StaticTile.prefix)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def count_by_regime(cells: Sequence[Cell]) -> str:
    """ "24 decode, 10 prefill" for a heading."""
    groups = itertools.groupby(sorted(cell.regime for cell in cells))
    return ", ".join(f"{len(list(group))} {regime}" for regime, group in groups)
