"""ATMM as the benches see it: the operator, its tile configurations, threads, microbenchmarks.

The only file of the bench that knows the compiled core; without it the reference stands in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from vlora.atmm import op
from vlora.atmm.types import LoraPair
from vlora.bench.cells import DTYPES, Cell
from vlora.bench.limits import Limits
from vlora.bench.operators import Baseline, Call


class Atmm(Baseline):
    """The operator under test, its tile looked up in the table."""

    name: ClassVar[str] = "atmm"

    def prepare(self, pairs: Sequence[LoraPair], cell: Cell) -> Call:
        own = [LoraPair(pair.a.clone(), pair.b.clone()) for pair in pairs]
        segments = cell.segments

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            op.apply(y, x, segments, own)

        return call


class StaticTile(Atmm):
    """ATMM with one configuration for every shape."""

    prefix: ClassVar[str] = "static:"


def static_tiles(dtype: str) -> list[Baseline]:
    return []


def prepare_merge(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Callable[[], None]:
    """One call for all matrices: target = source + B·A, from (A, B in fp32) packed at load."""

    def call() -> None:
        for source, target, (a, b) in zip(sources, targets, factors, strict=True):
            torch.add(source, (b @ a.float()).to(source.dtype), out=target)

    return call


def set_threads(count: int) -> None:
    torch.set_num_threads(count)


def bf16_instructions() -> bool:
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text()


def describe() -> dict[str, Any]:
    return {}


def _torch_peak(dtype: str, seconds: float) -> float:
    side = 768
    a = torch.randn(side, side).to(DTYPES[dtype])
    return 2 * side**3 * _rate(lambda: torch.mm(a, a), seconds)


def _torch_bandwidth(size: int, seconds: float) -> float:
    values = torch.zeros(max(1, size // 4))
    return size * _rate(lambda: values.sum(), seconds)


def _rate(call: Callable[[], object], seconds: float) -> float:
    """Calls a second, the best of several short spells."""
    best = 0.0
    call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        call()
        best = max(best, 1 / (time.perf_counter() - started))
    return best


class LimitsByThreads:
    """The roofline for each thread count of a run."""

    def __init__(self) -> None:
        self._limits: dict[int, Limits] = {}

    def __call__(self, threads: int) -> Limits:
        return self._limits.setdefault(threads, Limits(_torch_peak, _torch_bandwidth))

    def as_meta(self) -> dict[str, Any]:
        return {f"{count} threads": limits.as_meta() for count, limits in self._limits.items()}
