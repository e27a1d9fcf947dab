"""The time of a mode switch as a request sees it, and the drift of weights merged in place.

The measured time runs from a request's last token in the old mode to its first token in the new
mode. The benchmark, and not a policy, decides the engine's live adapter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import llava
from benchmarks.dtypes import DTYPES
from benchmarks.synthetic_model import SyntheticModel
from vlora.adapters.files import Adapter, AdapterInfo
from vlora.atmm.types import LoraPair
from vlora.ids import BASE, MatrixId
from vlora.model.switcher import Switcher
from vlora.weights.slab import TARGETS, WeightSlab

SPARE_POSITIONS = 64
"""Number of positions in the pages beyond those that the requests need."""
CHANGES: tuple[tuple[str, int, bool], ...] = (
    ("unmerged → merged", 0, True),
    ("merged, no change", 0, True),
    ("merged → another merged", 1, True),
    ("merged → mixture", 1, False),
    ("merged → unmerged", BASE, False),
    ("unmerged, no change", BASE, False),
)
"""One round of changes as (name, index of the live adapter or BASE, whether all rows use it)."""
UNMERGES = 200
"""Number of times that unmerging is timed."""
WEIGHT_STD, FACTOR_STD = 0.02, 0.02


@dataclass(frozen=True)
class ModeChangeGaps:
    """Seconds between two tokens of a request, by the change of mode between the tokens."""

    dtype: str
    gaps: Mapping[str, Sequence[float]]

    def as_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "change": name,
                "dtype": self.dtype,
                "p50_ms": round(_percentile(gaps, 50) * 1e3, 3),
                "p99_ms": round(_percentile(gaps, 99) * 1e3, 3),
                "samples": len(gaps),
            }
            for name, gaps in self.gaps.items()
        ]


def model_for(grid: Mapping[str, Any], dtype: str, root: Path | None = None) -> SyntheticModel:
    """Return an engine with enough pages for the requests of the grid.

    root: folder of the generated checkpoints; by default that of `llava.cache_root`.
    """
    checkpoint = llava.make(llava.MODELS[grid["model"]], root)
    requests, context = grid["requests"], grid["context"]
    positions = requests * (context + SPARE_POSITIONS)
    return SyntheticModel(checkpoint, dtype, positions, requests, adapters=True)


def measure_changes(
    grid: Mapping[str, Any], model: SyntheticModel, dtype: str, *, quick: bool
) -> ModeChangeGaps:
    """Measure rounds of all changes with decoding requests. The first round is not counted."""
    requests, context = grid["requests"], grid["context"]
    model.stage(requests, context + 1, context)
    # Only two adapters of the largest rank become live, so that all merges are equally large.
    ranks = [model.engine.adapters.slots.adapter(slot).info.ranks for slot in model.slots]
    pair = [slot for slot, own in zip(model.slots, ranks, strict=True) if own == max(ranks)]
    pair *= 2  # The model may have only one such adapter.
    gaps: dict[str, list[float]] = {name: [] for name, _, _ in CHANGES}
    for number in range(1 + grid["quick_rounds" if quick else "rounds"]):
        for name, index, all_live in CHANGES:
            live = BASE if index == BASE else pair[index]
            mixed = [model.slots[i % len(model.slots)] for i in range(requests)]
            step = model.step([live] * requests if all_live else mixed)
            with model.live_adapter(live):
                started = time.perf_counter()
                step()
                if number:
                    gaps[name].append(time.perf_counter() - started)
    return ModeChangeGaps(dtype, gaps)


def unmerge_us(layers: Sequence[int] = (1, 64)) -> float:
    """Return the largest median time of unmerging, in µs, over these numbers of layers."""
    shapes = dict.fromkeys(TARGETS, (64, 64))
    medians = []
    for count in layers:
        slab = WeightSlab(count, shapes)
        slab.base.zero_()
        switcher = Switcher(slab, RandomAdapters.of(slab, 1, 4))
        seconds = []
        for _ in range(UNMERGES):
            switcher.switch(0)
            started = time.perf_counter()
            switcher.switch(BASE)
            seconds.append(time.perf_counter() - started)
        medians.append(statistics.median(seconds) * 1e6)
    return max(medians)


def measure_drift(grid: Mapping[str, Any], dtype: str) -> list[dict[str, Any]]:
    """Return how far merging in place moves the weights from the base, by number of switches.

    Each row has the keys `largest`, the largest change of a weight, and `changed`, the share of
    weights that changed.
    """
    side = grid["hidden"]
    slab = WeightSlab(grid["layers"], dict.fromkeys(TARGETS, (side, side)), DTYPES[dtype])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(slab.elements).normal_(0.0, WEIGHT_STD, generator=generator)
    slab.base.copy_(drawn)
    before = slab.base.clone()
    adapters = RandomAdapters.of(slab, grid["adapters"], grid["rank"])
    switcher = Switcher(slab, adapters, "in_place")
    rows, done = [], 0
    for switches in grid["switches"]:
        for number in range(done, switches):
            switcher.switch(number % grid["adapters"])
        done = switches
        switcher.switch(BASE)
        moved = (slab.base.float() - before.float()).abs()
        rows.append(
            {
                "in_place": dtype,
                "switches": switches,
                "largest": float(moved.max()),
                "changed": round(float((moved > 0).float().mean()), 4),
            }
        )
    return rows


@dataclass(frozen=True)
class RandomAdapters:
    """Random adapters on every matrix of a slab, with the interface that the switcher needs."""

    adapters: Sequence[Adapter]
    matrices: frozenset[MatrixId]

    @classmethod
    def of(cls, slab: WeightSlab, count: int, rank: int) -> RandomAdapters:
        """Return `count` adapters of rank `rank`."""
        generator = torch.Generator().manual_seed(1)
        matrices = frozenset((layer, name) for layer in range(slab.layers) for name in TARGETS)

        def factors(d_out: int, d_in: int) -> LoraPair:
            a, b = torch.empty(rank, d_in), torch.empty(d_out, rank)
            for factor in (a, b):
                factor.normal_(0.0, FACTOR_STD, generator=generator)
            return LoraPair(a, 2 * b)  # A scale of 2, as in PEFT's examples.

        info = AdapterInfo("drawn", "", (rank,), TARGETS, (), {}, (), ())
        adapters = [
            Adapter(
                replace(info, digest=str(number)),
                {matrix: factors(*slab.shapes[matrix[1]]) for matrix in sorted(matrices)},
                None,
            )
            for number in range(count)
        ]
        return cls(adapters, matrices)

    def adapter(self, slot: int) -> Adapter:
        return self.adapters[slot]


def summarize(
    changes: Sequence[ModeChangeGaps], drifts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the time of unmerging and, by type, the gaps between two tokens with and without a
    merge, and the drift after the largest number of switches.
    """
    summary: dict[str, Any] = {"unmerge_us": round(unmerge_us(), 2)}
    for change in changes:
        suffix = "" if change.dtype == "fp32" else f"_{change.dtype}"
        merging = [*change.gaps["unmerged → merged"], *change.gaps["merged → another merged"]]
        summary["switch_p50_ms" + suffix] = round(_percentile(merging, 50) * 1e3, 2)
        summary["switch_p99_ms" + suffix] = round(_percentile(merging, 99) * 1e3, 2)
        unchanged = _percentile(change.gaps["merged, no change"], 50)
        summary["no_switch_p50_ms" + suffix] = round(unchanged * 1e3, 2)
    for row in drifts:
        suffix = "" if row["in_place"] == "fp32" else f"_{row['in_place']}"
        summary["in_place_drift" + suffix] = float(f"{row['largest']:.2g}")
        summary["in_place_changed" + suffix] = row["changed"]
    return summary


def _percentile(values: Sequence[float], percent: int) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(percent / 100))
