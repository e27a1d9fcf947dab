"""What a change of mode costs a request, and what in-place merging costs the weights.

The whole switch: from the last token of a request in the old mode to its first in the new one,
in a real engine whose live adapter is decided here.
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
from benchmarks.kernels.cells import DTYPES
from benchmarks.synthetic_model import TestBed
from vlora.atmm.types import LoraPair
from vlora.ids import BASE, MatrixId
from vlora.lora.adapter import Adapter, AdapterInfo
from vlora.lora.slab import TARGETS, WeightSlab
from vlora.lora.switcher import Switcher

SPARE = 64
"""Positions in the pages beyond what the requests need."""
ROUND: tuple[tuple[str, int, bool], ...] = (
    # name of the change, number of the adapter in the weights, whether all rows are its own
    ("unmerged → merged", 0, True),
    ("merged, no change", 0, True),
    ("merged → another merged", 1, True),
    ("merged → mixture", 1, False),
    ("merged → unmerged", BASE, False),
    ("unmerged, no change", BASE, False),
)
UNMERGES = 200
WEIGHT_STD, FACTOR_STD = 0.02, 0.02


@dataclass(frozen=True)
class Changes:
    """gaps: seconds between two tokens of a request, by what changed between them."""

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


def bed_for(given: Mapping[str, Any], dtype: str, root: Path | None = None) -> TestBed:
    """An engine with pages for the requests. root: where checkpoints are kept."""
    checkpoint = llava.make(llava.MODELS[given["model"]], root)
    requests, context = given["requests"], given["context"]
    return TestBed(checkpoint, dtype, requests * (context + SPARE), requests, adapters=True)


def measure_changes(given: Mapping[str, Any], bed: TestBed, dtype: str, *, quick: bool) -> Changes:
    """Decoding requests through rounds of all changes; the first round warms up."""
    requests, context = given["requests"], given["context"]
    bed.stage(requests, context + 1, context)
    # Two adapters of the largest rank: what is merged is then alike.
    ranks = [bed.engine.adapters.adapter(slot).info.ranks for slot in bed.slots]
    pair = [slot for slot, own in zip(bed.slots, ranks, strict=True) if own == max(ranks)]
    pair *= 2  # there may be only one
    gaps: dict[str, list[float]] = {name: [] for name, _, _ in ROUND}
    for turn in range(1 + given["quick_rounds" if quick else "rounds"]):
        for name, number, own in ROUND:
            live = BASE if number == BASE else pair[number]
            others = [bed.slots[i % len(bed.slots)] for i in range(requests)]
            step = bed.step([live] * requests if own else others)
            with bed.holding(live):
                began = time.perf_counter()
                step()
                if turn:
                    gaps[name].append(time.perf_counter() - began)
    return Changes(dtype, gaps)


def unmerge_us(layers: Sequence[int] = (1, 64)) -> float:
    """Median µs of going back to the base weights, the worst of models of so many layers."""
    shapes = dict.fromkeys(TARGETS, (64, 64))
    found = []
    for count in layers:
        slab = WeightSlab(count, shapes)
        slab.base.zero_()
        switcher = Switcher(slab, Drawn.of(slab, 1, 4))
        taken = []
        for _ in range(UNMERGES):
            switcher.switch(0)
            began = time.perf_counter()
            switcher.switch(BASE)
            taken.append(time.perf_counter() - began)
        found.append(statistics.median(taken) * 1e6)
    return max(found)


def drift(given: Mapping[str, Any], dtype: str) -> list[dict[str, Any]]:
    """How far in-place merging has moved the base weights after so many switches among adapters:
    the largest change, and the share of weights that changed."""
    side = given["hidden"]
    slab = WeightSlab(given["layers"], dict.fromkeys(TARGETS, (side, side)), DTYPES[dtype])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(slab.elements).normal_(0.0, WEIGHT_STD, generator=generator)
    slab.base.copy_(drawn)
    before = slab.base.clone()
    switcher = Switcher(slab, Drawn.of(slab, given["adapters"], given["rank"]), "in_place")
    rows, done = [], 0
    for switches in given["switches"]:
        for turn in range(done, switches):
            switcher.switch(turn % given["adapters"])
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
class Drawn:
    """Random adapters on every matrix of a slab."""

    adapters: Sequence[Adapter]
    matrices: frozenset[MatrixId]

    @classmethod
    def of(cls, slab: WeightSlab, count: int, rank: int) -> Drawn:
        generator = torch.Generator().manual_seed(1)
        matrices = frozenset((layer, name) for layer in range(slab.layers) for name in TARGETS)

        def factors(d_out: int, d_in: int) -> LoraPair:
            a, b = torch.empty(rank, d_in), torch.empty(d_out, rank)
            for factor in (a, b):
                factor.normal_(0.0, FACTOR_STD, generator=generator)
            return LoraPair(a, 2 * b)  # a scale of 2, as PEFT's examples have it

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


def summarize(changes: Sequence[Changes], drifts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """unmerge_us; switch_ms and switch_step_ms (p50, p99 of a token's wait with a merge before it,
    and p50 without), in_place_drift and in_place_changed after the most switches, by type."""
    summary: dict[str, Any] = {"unmerge_us": round(unmerge_us(), 2)}
    for found in changes:
        suffix = "" if found.dtype == "fp32" else f"_{found.dtype}"
        merging = [*found.gaps["unmerged → merged"], *found.gaps["merged → another merged"]]
        summary["switch_p50_ms" + suffix] = round(_percentile(merging, 50) * 1e3, 2)
        summary["switch_p99_ms" + suffix] = round(_percentile(merging, 99) * 1e3, 2)
        still = _percentile(found.gaps["merged, no change"], 50)
        summary["no_switch_p50_ms" + suffix] = round(still * 1e3, 2)
    for row in drifts:
        suffix = "" if row["in_place"] == "fp32" else f"_{row['in_place']}"
        summary["in_place_drift" + suffix] = float(f"{row['largest']:.2g}")
        summary["in_place_changed" + suffix] = row["changed"]
    return summary


def _percentile(values: Sequence[float], percent: int) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(percent / 100))
