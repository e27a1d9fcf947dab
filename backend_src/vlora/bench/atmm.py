"""ATMM as the benches see it: the operator, its tile configurations, threads, microbenchmarks.

The only file of the bench that knows how the operator is called; where the compiled core is
missing the reference stands in, and the roofline is torch's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from vlora.atmm import backends, op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import LoraPair, MergeUpdate, Segments
from vlora.bench.cells import DTYPES, Cell
from vlora.bench.limits import Limits
from vlora.bench.operators import Baseline, Call

STATIC_CANDIDATES = 4
"""Configurations that are measured in every cell as single static tiles."""


class Atmm(Baseline):
    """The operator under test: its tile looked up in the table, or one `config` for all shapes."""

    name: ClassVar[str] = "atmm"

    def __init__(self, config: int | None = None) -> None:
        self._config = config

    def prepare(self, pairs: Sequence[LoraPair], cell: Cell) -> Call:
        group = LoraGroup.of(cell.width, pairs)
        segments, config = Segments(cell.segments), self._config

        def call(y: torch.Tensor, x: torch.Tensor) -> None:
            op.apply(y, x, segments, group, config=config)

        return call


class StaticTile(Atmm):
    """ATMM with one configuration for every shape."""

    prefix: ClassVar[str] = "static:"

    def __init__(self, config: int, name: str) -> None:
        super().__init__(config)
        self.name = self.prefix + name  # type: ignore[misc]


def compiled() -> bool:
    return backends.default() == "cpu"


def static_tiles(dtype: str) -> list[Baseline]:
    """The candidates for the best single static tile: those that the table names most often, since
    no other is best anywhere as often. Without a table, the first ones."""
    if not compiled():
        return []
    from vlora.atmm import tiles

    configs = [config["name"] for config in tiles.configs("apply", dtype)]
    counts = tiles.popular("apply", dtype) if hasattr(tiles, "popular") else {}
    ordered = sorted(configs, key=lambda name: -counts.get(name, 0))
    return [StaticTile(configs.index(name), name) for name in ordered[:STATIC_CANDIDATES]]


def prepare_merge(
    out: torch.Tensor, base: torch.Tensor, updates: Sequence[MergeUpdate]
) -> Callable[[], None]:
    """One call for all layers and targets."""
    return lambda: op.merge(out, base, updates)


def set_threads(count: int) -> None:
    """ATMM takes torch's number."""
    torch.set_num_threads(count)


def bf16_instructions() -> bool:
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text().split()


def describe() -> dict[str, Any]:
    """Which implementation the figures are of, and with how many tiles."""
    if not compiled():
        return {"atmm": "reference"}
    from vlora.atmm import tiles

    return {
        "atmm": "cpu",
        "isa": backends.native().isa(),
        "configs": {dtype: len(tiles.configs("apply", dtype)) for dtype in DTYPES},
    }


def counters() -> dict[str, int]:
    """Table hits and misses since the start; empty for the reference."""
    if not compiled():
        return {}
    from vlora.atmm import tiles

    return dict(tiles.counters())


class LimitsByThreads:
    """The roofline for each thread count of a run."""

    def __init__(self) -> None:
        self._limits: dict[int, Limits] = {}

    def __call__(self, threads: int) -> Limits:
        return self._limits.setdefault(threads, _limits(threads))

    def as_meta(self) -> dict[str, Any]:
        return {f"{count} threads": limits.as_meta() for count, limits in self._limits.items()}


def _limits(threads: int) -> Limits:
    if not compiled():
        return Limits(_torch_peak, _torch_bandwidth)
    from vlora.atmm import tiles

    return Limits(
        lambda dtype, seconds: float(tiles.peak(dtype, seconds, threads)),
        lambda size, seconds: float(tiles.bandwidth(size, seconds, threads)),
    )


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
