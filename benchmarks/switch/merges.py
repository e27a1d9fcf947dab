"""Merging of all layers, M = W + B·A, compared with the roofline and with torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.dtypes import DTYPES
from benchmarks.gpu_timing import discard
from benchmarks.machine import ConcurrentRates, without_rates
from benchmarks.roofline import Roofline
from benchmarks.timing import interleaved, rounded_mean
from vlora.atmm import op
from vlora.atmm.search.timing import Timing
from vlora.atmm.types import CopiedPart, LoraPair, Merges, MergeUpdate
from vlora.device import host_memory

ATMM, IN_PLACE, ADDMM, COPY = "atmm", "atmm_in_place", "addmm", "copy"
READ_BYTES = 256 << 20
"""Bytes that the microbenchmark of the memory reads in each round."""
MAX_ADDMM_SECONDS = 2.0
"""Maximum duration of torch's merge. A slower one is left out."""
MULTIPLY_ROUNDS = 5_000_000
"""Iterations of the peak microbenchmark in each round; they take 10 ms."""


@dataclass(frozen=True)
class MergeModel:
    """Layers whose targets have shapes (d_out, d_in), and an adapter of all targets with one rank.

    copied: shapes of the matrices that are fused with targets without being targets. Merging copies
        them.
    """

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
        """Bytes read (W, and A and B in fp32) and written (M, copied parts included)."""
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
class MergeResult:
    """Timings of the different ways to merge one model."""

    model: MergeModel
    threads: int
    roofline: Roofline
    timings: Mapping[str, Timing]
    cold_rate: float | None = None
    """Bytes/s read from memory in the rounds of this model."""
    peak: float | None = None
    """Flop/s of the multiply microbenchmark in the rounds of this model."""

    @property
    def limit(self) -> float:
        """Roofline of the merge in seconds, at the median rates of this model's rounds.

        The peak is that of fp32, even for bf16 weights. The factors are fp32, and the merged matrix
        is the sum rounded once. (torch's addmm rounds B as well.)
        """
        moved = ((self.model.moved_bytes, True),)
        return self.roofline.seconds(self.model.flops, moved, "fp32", self.cold_rate, self.peak)

    @property
    def share_of_limit(self) -> float:
        """Fraction of the roofline: the roofline divided by the measured time."""
        return self.limit / self.timings[ATMM].median

    @property
    def vs_addmm(self) -> float | None:
        """Time of torch's addmm divided by that of ATMM, or None if addmm was left out."""
        if ADDMM not in self.timings:
            return None
        return self.timings[ADDMM].median / self.timings[ATMM].median

    def as_row(self) -> dict[str, Any]:
        return {
            **self.model.as_row(),
            "threads": self.threads,
            "limit_ms": round(self.limit * 1e3, 3),
            "roofline": round(self.share_of_limit, 4),
            "vs_addmm": None if self.vs_addmm is None else round(self.vs_addmm, 4),
            "ms": {name: round(t.median * 1e3, 3) for name, t in self.timings.items()},
            "noise_of": {name: round(t.noise, 4) for name, t in self.timings.items()},
        }


def load_models(path: Path, dtypes: Sequence[str], *, quick: bool) -> list[MergeModel]:
    """Return the models of a grid file."""
    models = []
    for entry in json.loads(path.read_text())["models"]:
        layers = entry["quick_layers"] if quick else entry["layers"]
        targets, copied = (
            tuple((d_out, d_in) for d_out, d_in in entry.get(key, ()))
            for key in ("targets", "copied")
        )
        for rank in entry["rank"][: 1 if quick else None]:
            models += [
                MergeModel(entry["name"], layers, targets, rank, dtype, copied) for dtype in dtypes
            ]
    return models


@torch.inference_mode()
def measure(model: MergeModel, threads: int, roofline: Roofline, rounds: int) -> MergeResult:
    """Measure merging into a second slab, merging in place, torch.addmm per matrix, and a copy."""
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[model.dtype]
    base = host_memory.hugepage_zeros(model.elements, dtype=dtype).normal_(generator=generator)
    merged = host_memory.hugepage_zeros(model.elements, dtype=dtype).copy_(base)
    updates, copied = _updates(model, generator)
    merges = Merges(updates, copied)
    # addmm needs one type. As in dLoRA, A and B are rounded to that type once, at load.
    matrices = [
        (
            _matrix_of(base, update),
            _matrix_of(merged, update),
            update.pair.a.to(dtype),
            update.pair.b.to(dtype),
        )
        for update in updates
    ]
    copied_slices = [slice(part.offset, part.offset + part.size) for part in copied]

    def addmm() -> None:
        for part in copied_slices:
            merged[part] = base[part]
        for source, target, a, b in matrices:
            torch.addmm(source, b, a, out=target)

    calls = {
        ATMM: lambda: op.merge(merged, base, merges),
        IN_PLACE: lambda: op.merge(merged, merged, merges),
        COPY: lambda: discard(merged.copy_(base)),
    }
    # Without bf16 instructions, torch takes minutes in bf16.
    if _addmm_seconds(matrices[0], model) < MAX_ADDMM_SECONDS:
        calls[ADDMM] = addmm
    concurrent = ConcurrentRates("fp32", MULTIPLY_ROUNDS, READ_BYTES)
    timings = interleaved(calls | concurrent.calls(), rounds=rounds, warm=False, budget=20.0)
    roofline.remeasure_if_due()
    return MergeResult(model, threads, roofline, without_rates(timings), *concurrent.rates(timings))


def summarize(results: Sequence[MergeResult]) -> dict[str, Any]:
    """Return, by type, the mean and worst share of the roofline, and the speed-up over addmm."""
    summary: dict[str, Any] = {}
    for dtype, suffix in (("fp32", ""), ("bf16", "_bf16")):
        of_type = [result for result in results if result.model.dtype == dtype]
        for key, values in (
            ("merge_vs_limit", [r.share_of_limit for r in of_type]),
            ("merge_vs_addmm", [ratio for r in of_type if (ratio := r.vs_addmm) is not None]),
        ):
            if values:
                summary[key + suffix] = rounded_mean(values)
        if of_type:
            worst = min(result.share_of_limit for result in of_type)
            summary["merge_vs_limit_worst" + suffix] = round(worst, 3)
    return summary


def _updates(
    model: MergeModel, generator: torch.Generator
) -> tuple[list[MergeUpdate], list[CopiedPart]]:
    """Return random factors for every target, and the parts that are copied."""
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
    return updates, copied


def _addmm_seconds(matrix: Sequence[torch.Tensor], model: MergeModel) -> float:
    """Return the estimated time of addmm on all matrices, from a slice of the first one."""
    source, target, a, b = matrix
    rows = max(1, len(source) // 16)
    started = time.perf_counter()
    torch.addmm(source[:rows], b[:rows], a, out=target[:rows])
    return (time.perf_counter() - started) * model.elements / (rows * source.shape[1])


def _matrix_of(slab: torch.Tensor, update: MergeUpdate) -> torch.Tensor:
    """Return the matrix of a slab that the update changes, [d_out, d_in]."""
    d_out, d_in = update.pair.b.shape[0], update.pair.a.shape[1]
    return slab[update.offset : update.offset + d_out * d_in].view(d_out, d_in)
