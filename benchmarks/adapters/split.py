"""Comparison of one page pool with a static split of the same bytes.

The same requests run on two engines. In the first, adapters, keys and values share one pool. In the
second, a wall separates the pages of adapters from those of keys and values (KV pages). The
benchmark counts the KV pages whose adapter is not resident: they occupy memory and no step can use
them. The paper on ExpertWeave reports up to 46.5 % of such pages under a static partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

from benchmarks.adapters.measurement import (
    BLOCK,
    CONCURRENT_REQUESTS,
    AdaptersResult,
    ManyAdapters,
    tier_figures,
)
from benchmarks.adapters.requests import draw_names
from benchmarks.driver import Driver, Outcome
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.sequence import scopes_of
from vlora.memory.pool import Evictor, Owner, PagePool, Run, evict_oldest
from vlora.memory.prefix import PrefixCache


class SplitPool(PagePool):
    """Pool with a wall: adapters use the first `wall` pages, keys and values the other pages.

    Each side makes space by evicting its own pages only.
    """

    def __init__(self, wall: int, above: int) -> None:
        super().__init__(wall + above)
        self.wall = wall

    def can_allocate(self, count: int) -> bool:
        """Return whether `count` pages for keys and values are free or can be evicted."""
        free = self._owner.count(Owner.FREE, self.wall)
        return count <= free + sum(e.evictable_pages(count) for e in self._side(runs=False))

    def can_allocate_run(self, count: int, kv_pages: int = 0) -> bool:
        """Return whether `count` pages for an adapter are free or can be evicted.

        The pages may not be adjacent. Then `allocate_run` returns None.

        kv_pages: ignored, because keys and values use the other side of the wall.
        """
        free = self._owner.count(Owner.FREE, 0, self.wall)
        return count <= free + sum(e.evictable_pages(count) for e in self._side(runs=True))

    def allocate(self, count: int) -> list[int] | None:
        if not self.can_allocate(count):
            return None
        while self._owner.count(Owner.FREE, self.wall) < count:
            evict_oldest(self._side(runs=False))
        return super().allocate(count)

    def allocate_run(self, count: int) -> Run | None:
        if not self.can_allocate_run(count):
            return None
        while (first := self._owner.find(bytes(count), 0, self.wall)) < 0:
            if not evict_oldest(self._side(runs=True)):
                return None
        return self._take_run(first, count)

    def _side(self, *, runs: bool) -> list[Evictor]:
        """Return the evictors of adapters if `runs`, otherwise those of keys and values."""
        return [evictor for evictor in self.evictors if (evictor is self.run_evictor) == runs]

    def check_integrity(self) -> None:
        super().check_integrity()
        below, above = self._owner[: self.wall], self._owner[self.wall :]
        assert set(below) <= {Owner.FREE, Owner.ADAPTER}, "keys and values below the wall"
        assert Owner.ADAPTER not in above, "an adapter above the wall"


class SplitPrefixCache(PrefixCache):
    """Prefix cache that does not prefer to evict the blocks of evicted adapters."""

    def evict_first(self, scope: str) -> None:
        """Leave the order of eviction as it is."""


def split_engine(options: Options) -> Engine:
    """Return an engine whose memory has a wall between KV pages and adapter pages."""
    kv_pages = options.kv_cache_tokens // options.block_size

    def split_pool(total: int) -> SplitPool:
        return SplitPool(total - kv_pages, kv_pages)

    with (
        patch("vlora.engine.memory.PagePool", split_pool),
        patch("vlora.engine.memory.PrefixCache", SplitPrefixCache),
    ):
        return Engine(options)


ONE_POOL, SPLIT = "one pool", "static split"
SIDES: Mapping[str, Callable[[Options], Engine]] = {ONE_POOL: Engine, SPLIT: split_engine}


def cached_pages_by_scope(cache: PrefixCache) -> Counter[str]:
    """Return the number of cached pages that no request holds, by the scope of their blocks.

    The scope in a block's key names the adapter that the block was computed with.
    """
    return Counter(cache._keys[page].scope for page in cache._idle)


@dataclass
class UnpairedPages:
    """Number of unpaired pages after each step.

    An unpaired page is a KV page whose adapter is not resident. Every request of this benchmark has
    an adapter.

    held: for each step, number of unpaired pages that running requests hold.
    cached: for each step, number of unpaired pages that only the prefix cache holds, divided by the
        number of KV pages that requests or the prefix cache hold.
    """

    held: list[int] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)

    def count(self, engine: Engine) -> None:
        """Count an engine's pages and append the results to `held` and `cached`."""
        assert engine.memory.prefix is not None
        resident = set(engine.adapters.resident.values())
        unpaired = (s for s in engine.scheduler.running if s.adapter not in resident)
        self.held.append(len({page for sequence in unpaired for page in sequence.table.pages}))
        scopes = {scope for handle in resident for scope in scopes_of(handle)}
        cached = cached_pages_by_scope(engine.memory.prefix).items()
        pages = sum(count for scope, count in cached if scope not in scopes)
        self.cached.append(pages / max(1, engine.pool.kv + engine.pool.cached))

    def as_row(self) -> dict[str, Any]:
        return {
            "kv_without_adapter": max(self.held),
            "cached_without_adapter": round(mean(self.cached), 4),
            "cached_without_adapter_most": round(max(self.cached), 4),
        }


def run_split(
    adapters: ManyAdapters, grid: Mapping[str, Any], status: Callable[[str], None]
) -> list[AdaptersResult]:
    """Measure each trace on an engine with one pool and on one with a split pool.

    All adapters are in host memory. All requests for one adapter share the start of their prompt.
    """
    names = adapters.names[: grid["traces"]["registered"]]
    root = adapters.link_folders("split", names)
    results = []
    for kind in grid["split"]["kinds"]:
        status(f"split: {kind}")
        order = draw_names(kind, names, grid["split"]["requests"])
        results += _run_trace(adapters, root, grid, kind, order)
    return results


def _run_trace(
    adapters: ManyAdapters, root: Path, grid: Mapping[str, Any], kind: str, order: Sequence[str]
) -> list[AdaptersResult]:
    """Measure one trace on both engines, which take turns in running first."""
    split = grid["split"]
    length = split["shared"] + grid["prompt"] + grid["output"] + BLOCK
    options = adapters.options(
        root,
        adapter_pool_bytes=split["room"] * adapters.pool_bytes,
        kv_cache_tokens=split["kv_requests"] * length,
        max_model_len=length,
        enable_prefix_caching=True,
    )
    unpaired = {side: UnpairedPages() for side in SIDES}
    drivers = {
        side: Driver(make_engine(options), unpaired[side].count)
        for side, make_engine in SIDES.items()
    }
    outcomes: dict[str, list[Outcome]] = {side: [] for side in SIDES}
    for number, start in enumerate(range(0, len(order), CONCURRENT_REQUESTS)):
        names = order[start : start + CONCURRENT_REQUESTS]
        requests = adapters.requests(names, number, split["shared"])
        for side in list(SIDES)[:: 1 if number % 2 else -1]:
            outcomes[side].append(drivers[side].run(requests, watch=False))
    results = []
    for side, driver in drivers.items():
        driver.engine.check_integrity()
        driver.close()
        over = median(
            outcome.throughput / split_outcome.throughput
            for outcome, split_outcome in zip(outcomes[side], outcomes[SPLIT], strict=True)
        )
        figures = tier_figures(driver.engine) | unpaired[side].as_row()
        figures |= _cached_tokens(driver.engine) | {"throughput_over_split": round(over, 3)}
        outcome = Outcome.joined(outcomes[side])
        results.append(AdaptersResult("split", f"{kind}, {side}", outcome, figures))
    assert results[0].figures["kv_without_adapter"] == 0, "one pool holds KV without its adapter"
    return results


def _cached_tokens(engine: Engine) -> dict[str, float]:
    """Return the share of prompt tokens that came from the prefix cache."""
    stats = engine.stats()
    return {
        "cached_tokens": round(stats.cached_tokens / (stats.cached_tokens + stats.prompt_tokens), 3)
    }


def summarize(results: Sequence[AdaptersResult]) -> dict[str, Any]:
    """Return means over the traces, and the maximum of `kv_without_adapter`.

    All figures are None if this part was not run.
    """

    def figures(side: str, key: str) -> list[Any]:
        return [
            result.figures[key]
            for result in results
            if result.part == "split" and result.setting.endswith(side)
        ]

    def average(side: str, key: str, digits: int) -> float | None:
        values = figures(side, key)
        return round(mean(values), digits) if values else None

    return {
        "kv_without_adapter": max(figures(ONE_POOL, "kv_without_adapter"), default=None),
        "cached_without_adapter": average(ONE_POOL, "cached_without_adapter", 4),
        "cached_without_adapter_split": average(SPLIT, "cached_without_adapter", 4),
        "cached_tokens": average(ONE_POOL, "cached_tokens", 3),
        "cached_tokens_split": average(SPLIT, "cached_tokens", 3),
        "throughput_over_split": average(ONE_POOL, "throughput_over_split", 3),
    }
