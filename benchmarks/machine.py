"""ATMM as the benches see it: the operator, its tile configurations, threads, microbenchmarks.

The only file of the bench that knows how the operator is called; where the compiled core is
missing the reference stands in, and the roofline is torch's own.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

import vlora.atmm as atmm_package
from benchmarks.kernels.cells import DTYPES, Cell
from benchmarks.kernels.operators import Baseline, Call
from benchmarks.roofline import Limits
from benchmarks.timing import Timing
from vlora import backends, native
from vlora.atmm import op
from vlora.atmm.device import Device
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import LoraPair, Merges, MergeUpdate, Segments
from vlora.memory import hugepages

READ, MULTIPLY = "read", "multiply"


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
    return backends.backend_of("atmm") == "cpu"


def static_tiles(dtype: str) -> list[Baseline]:
    """The candidates for the best single static tile: what the table names most often, and the
    built-in choices; some that stream adapters and some that block them. The best of all tiles may
    be another one: what adaptive choice gains over these is an upper bound."""
    if not compiled():
        return []
    from vlora.atmm import tiles

    configs = tiles.configs("apply", dtype)
    index = {config["name"]: i for i, config in enumerate(configs)}
    counts = _table_counts(dtype)
    names = sorted(counts.keys() & index.keys(), key=lambda name: -counts[name])
    streaming = [name for name in names if not configs[index[name]]["depth_block"]]
    blocking = [name for name in names if configs[index[name]]["depth_block"]]
    built_in = (
        tiles.built_in("apply", dtype, rows=rows, d_in=1024, d_out=1024, rank=64, segments=1)
        for rows in (1, 64)
    )
    chosen = dict.fromkeys((*streaming[:2], *blocking[:2], *built_in))
    return [StaticTile(index[name], name) for name in chosen if name in index]


def _table_counts(dtype: str) -> dict[str, int]:
    """How often the tables of the current instruction set name each configuration."""
    counts: dict[str, int] = {}
    for path in (Path(atmm_package.__file__).parent / "tables").glob("*.json"):
        table = json.loads(path.read_text())
        if (table["isa"], table["dtype"]) == (native.kernels().runtime.isa(dtype), dtype):
            for name, count in table["configs"].items():
                counts[name] = counts.get(name, 0) + count
    return counts


def prepare_merge(
    out: torch.Tensor, base: torch.Tensor, updates: Sequence[MergeUpdate]
) -> Callable[[], None]:
    """One call for all layers and targets, its work list made before."""
    merges = Merges.of(updates)
    return lambda: op.merge(out, base, merges)


@dataclass(frozen=True)
class Beside:
    """Microbenchmarks that run in the same rounds as the work, with torch's number of threads: what
    the memory and the cores gave at the time. Without the compiled core there are none.

    read_bytes: read in one call, of memory that no call before it has left in the caches; 0: not
    read. rounds: of the loop at the peak, in one call.
    """

    dtype: str
    rounds: int
    read_bytes: int

    @property
    def _bytes(self) -> int:
        return min(self.read_bytes, _cold_bytes() // 2)

    def calls(self) -> dict[str, Callable[[], None]]:
        if not compiled():
            return {}
        from vlora.atmm import tiles

        def multiply() -> None:
            tiles.multiply(self.dtype, self.rounds, torch.get_num_threads())

        found: dict[str, Callable[[], None]] = {}
        if self.read_bytes:
            values, size = _cold_memory(), self._bytes
            parts = itertools.cycle(
                range(values.data_ptr(), values.data_ptr() + _cold_bytes() - size + 1, size)
            )

            def read() -> None:
                tiles.read(next(parts), size, torch.get_num_threads())

            found[READ] = read
        return found | {MULTIPLY: multiply}

    def rates(self, timings: Mapping[str, Timing]) -> tuple[float | None, float | None]:
        """(bytes/s, flop/s), the medians of the rounds; None for what was not run."""
        if MULTIPLY not in timings:
            return None, None
        from vlora.atmm import tiles

        flops = tiles.multiply(self.dtype, self.rounds, torch.get_num_threads())
        read = self._bytes / timings[READ].median if READ in timings else None
        return read, flops / timings[MULTIPLY].median


def _cold_bytes() -> int:
    return 2 * Device.here().cold_bytes


@cache
def _cold_memory() -> torch.Tensor:
    """So many bytes, for all cells of a run."""
    return hugepages.hugepage_zeros(_cold_bytes() // 4, dtype=torch.float32).fill_(1.0)


def set_threads(count: int) -> None:
    """ATMM takes torch's number."""
    torch.set_num_threads(count)


def use_isa(name: str) -> None:
    """One instruction set for the rest of the process; ValueError for one this CPU lacks."""
    native.kernels().runtime.request_isa(name)


def bf16_instructions() -> bool:
    """Whether the instruction set in use multiplies bf16."""
    if compiled():
        return native.kernels().runtime.isa("bf16") in ("amx", "avx512_bf16")
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text().split()


def describe() -> dict[str, Any]:
    """Which implementation the figures are of, and with how many tiles."""
    if not compiled():
        return {"atmm": "reference"}
    from vlora.atmm import tiles

    return {
        "atmm": "cpu",
        "isa": {dtype: tiles.current_isa(dtype) for dtype in DTYPES},
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
