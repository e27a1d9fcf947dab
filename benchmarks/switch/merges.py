"""`vlora bench switch`: the merge of all layers, M = W + B·A, against its limit and torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.cells import DTYPES
from benchmarks.machine import Beside, prepare_merge
from benchmarks.roofline import Limits
from benchmarks.timing import Timing, geometric_mean, interleaved
from vlora.atmm.types import CopiedPart, LoraPair, Merges, MergeUpdate
from vlora.memory import hugepages

ATMM, IN_PLACE, ADDMM, COPY = "atmm", "atmm_in_place", "addmm", "copy"
READ_BYTES = 256 << 20
"""Read in the same rounds, for the memory's rate at the time."""
SLOWEST_ADDMM = 2.0
"""Seconds."""
MULTIPLY_ROUNDS = 5_000_000
"""Of the loop at the peak, likewise: 10 ms."""


@dataclass(frozen=True)
class Model:
    """`layers` layers with targets of (d_out, d_in) each, one adapter of one rank on all; copied:
    the shapes of what lies fused beside them, is not targeted, and is copied."""

    name: str
    layers: int
    targets: tuple[tuple[int, int], ...]
    rank: int
    dtype: str
    copied: tuple[tuple[int, int], ...] = ()

    @property
    def elements(self) -> int:
        shapes = (*self.targets, *self.copied)
        return self.layers * sum(d_out * d_in for d_out, d_in in shapes)

    @property
    def flops(self) -> int:
        return 2 * self.rank * self.layers * sum(d_out * d_in for d_out, d_in in self.targets)

    @property
    def moved_bytes(self) -> int:
        """W read, M written, copied or not; A and B read in fp32."""
        size = DTYPES[self.dtype].itemsize
        factors = sum(4 * (d_out + d_in) for d_out, d_in in self.targets)
        return 2 * size * self.elements + self.layers * self.rank * factors

    def as_row(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "layers": self.layers,
            "targets": [list(target) for target in self.targets],
            "copied": [list(shape) for shape in self.copied],
            "rank": self.rank,
            "dtype": self.dtype,
            "mbytes": self.elements * DTYPES[self.dtype].itemsize >> 20,
        }


@dataclass(frozen=True)
class SwitchResult:
    model: Model
    threads: int
    limits: Limits
    timings: Mapping[str, Timing]
    cold_rate: float | None = None
    """bytes/s from memory, by this model's own rounds."""
    peak: float | None = None
    """flop/s, likewise."""

    @property
    def limit(self) -> float:
        """Seconds, by the median peak and memory rate in this model's rounds.

        The peak is that of fp32 for bf16 weights too: the factors are fp32, so that the merged
        matrix is the rounded sum and nothing else (addmm below rounds B first).
        """
        moved = ((self.model.moved_bytes, True),)
        return self.limits.seconds(self.model.flops, moved, "fp32", self.cold_rate, self.peak)

    @property
    def roofline(self) -> float:
        """Limit over measured time: 1 = at the limit."""
        return self.limit / self.timings[ATMM].median

    @property
    def vs_addmm(self) -> float | None:
        """None where torch's takes so long that it is left out."""
        if ADDMM not in self.timings:
            return None
        return self.timings[ADDMM].median / self.timings[ATMM].median

    def as_row(self) -> dict[str, Any]:
        return {
            **self.model.as_row(),
            "threads": self.threads,
            "limit_ms": round(self.limit * 1e3, 3),
            "roofline": round(self.roofline, 4),
            "vs_addmm": None if self.vs_addmm is None else round(self.vs_addmm, 4),
            "ms": {name: round(t.median * 1e3, 3) for name, t in self.timings.items()},
            "noise_of": {name: round(t.noise, 4) for name, t in self.timings.items()},
        }


def load_models(path: Path, dtypes: Sequence[str], *, quick: bool) -> list[Model]:
    found = []
    for entry in json.loads(path.read_text())["models"]:
        layers = entry["quick_layers"] if quick else entry["layers"]
        targets, copied = (
            tuple((d_out, d_in) for d_out, d_in in entry.get(key, ()))
            for key in ("targets", "copied")
        )
        for rank in entry["rank"][: 1 if quick else None]:
            found += [
                Model(entry["name"], layers, targets, rank, dtype, copied) for dtype in dtypes
            ]
    return found


def measure(model: Model, threads: int, limits: Limits, rounds: int) -> SwitchResult:
    """Merge into a second slab, merge in place, torch.addmm per layer, a plain copy."""
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[model.dtype]
    base = hugepages.hugepage_zeros(model.elements, dtype=dtype).normal_(generator=generator)
    merged = hugepages.hugepage_zeros(model.elements, dtype=dtype).copy_(base)
    updates: list[MergeUpdate] = []
    copied: list[CopiedPart] = []
    offset = 0
    for _ in range(model.layers):
        for d_out, d_in in model.copied:
            copied.append(CopiedPart(offset, d_out * d_in))
            offset += d_out * d_in
        for d_out, d_in in model.targets:
            a = torch.randn(model.rank, d_in, generator=generator) / d_in**0.5
            b = torch.randn(d_out, model.rank, generator=generator) * 1e-3
            updates.append(MergeUpdate(offset, LoraPair(a, b)))
            offset += d_out * d_in
    merges = Merges(updates, copied)
    # addmm wants one type: what dLoRA does, with A and B rounded to it once, at load.
    parts = [
        (
            _place(base, update),
            _place(merged, update),
            update.pair.a.to(dtype),
            update.pair.b.to(dtype),
        )
        for update in updates
    ]

    beside_them = [slice(part.offset, part.offset + part.size) for part in copied]

    def addmm() -> None:
        for part in beside_them:
            merged[part] = base[part]
        for source, target, a, b in parts:
            torch.addmm(source, b, a, out=target)

    calls = {
        ATMM: prepare_merge(merged, base, merges),
        IN_PLACE: prepare_merge(merged, merged, merges),
        COPY: lambda: _discard(merged.copy_(base)),
    }
    # In bf16 without instructions for it torch takes minutes.
    if _addmm_seconds(parts[0], model) < SLOWEST_ADDMM:
        calls[ADDMM] = addmm
    beside = Beside("fp32", MULTIPLY_ROUNDS, READ_BYTES)
    timings = interleaved(calls | beside.calls(), rounds=rounds, warm=False, budget=20.0)
    limits.again_if_due()
    return SwitchResult(model, threads, limits, timings, *beside.rates(timings))


@torch.inference_mode()
def run(
    models: Sequence[Model],
    threads: Sequence[int],
    rounds: int,
    limits_for: Callable[[int], Limits],
    set_threads: Callable[[int], None],
) -> Iterator[SwitchResult]:
    for count in threads:
        set_threads(count)
        limits = limits_for(count)
        for model in models:
            yield measure(model, count, limits, rounds)


def summarize(results: Sequence[SwitchResult]) -> dict[str, Any]:
    """merge_vs_limit (limit over measured time, 1 = at the limit), its worst, merge_vs_addmm."""
    summary: dict[str, Any] = {}
    for dtype, suffix in (("fp32", ""), ("bf16", "_bf16")):
        of_type = [result for result in results if result.model.dtype == dtype]
        for key, values in (
            ("merge_vs_limit", [r.roofline for r in of_type]),
            ("merge_vs_addmm", [up for r in of_type if (up := r.vs_addmm) is not None]),
        ):
            if values:
                summary[key + suffix] = round(geometric_mean(values) or 0.0, 3)
        if of_type:
            worst = min(result.roofline for result in of_type)
            summary["merge_vs_limit_worst" + suffix] = round(worst, 3)
    return summary


def _addmm_seconds(part: Sequence[torch.Tensor], model: Model) -> float:
    """About what one matrix after the other takes, by a slice of the first."""
    source, target, a, b = part
    rows = max(1, len(source) // 16)
    began = time.perf_counter()
    torch.addmm(source[:rows], b[:rows], a, out=target[:rows])
    return (time.perf_counter() - began) * model.elements / (rows * source.shape[1])


def _place(slab: torch.Tensor, update: MergeUpdate) -> torch.Tensor:
    """The matrix of a slab that the update is for."""
    d_out, d_in = update.pair.b.shape[0], update.pair.a.shape[1]
    return slab[update.offset : update.offset + d_out * d_in].view(d_out, d_in)


def _discard(_: object) -> None:
    """A call's result is not wanted."""
