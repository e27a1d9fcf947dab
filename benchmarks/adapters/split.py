"""The `split` part of `vlora bench adapters`: one pool beside a static split of the same bytes.

The same requests on two engines: with adapters, keys and values in one pool, and with a wall
between them. What is counted is what the split leaves behind: keys and values without their adapter
("up to 46.5 %" of them under a static partition, as ExpertWeave measured it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

from benchmarks.adapters.measurement import BLOCK, TOGETHER, Bench, Row, draw, joined, tiers
from benchmarks.driver import Driver, Outcome
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.sequence import scopes_of
from vlora.memory.eviction import Evictor, evict_oldest
from vlora.memory.pool import Owner, PagePool, Run
from vlora.memory.prefix import PrefixCache


class SplitPool(PagePool):
    """A pool with a wall: runs lie in the first `wall` pages, keys and values in the others, and
    each side makes room by giving up its own."""

    def __init__(self, wall: int, above: int) -> None:
        super().__init__(wall + above)
        self.wall = wall

    def can_allocate(self, count: int) -> bool:
        """For keys and values."""
        free = self._owner.count(Owner.FREE, self.wall)
        return count <= free + sum(one.evictable_pages for one in self._side(runs=False))

    def can_allocate_run(self, count: int, kv_pages: int = 0) -> bool:
        """Keys and values have a side of their own, whatever `beside`."""
        free = self._owner.count(Owner.FREE, 0, self.wall)
        return count <= free + sum(one.evictable_pages for one in self._side(runs=True))

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
        run = Run(first, count)
        for page in run.pages:
            self._set_owner(page, Owner.ADAPTER)
        return run

    def _side(self, *, runs: bool) -> list[Evictor]:
        return [one for one in self.evictors if one.holds_runs == runs]

    def check_integrity(self) -> None:
        super().check_integrity()
        below, above = self._owner[: self.wall], self._owner[self.wall :]
        assert set(below) <= {Owner.FREE, Owner.ADAPTER}, "keys and values below the wall"
        assert Owner.ADAPTER not in above, "an adapter above the wall"


class SplitPrefixCache(PrefixCache):
    """A prefix cache that ignores the eviction of adapters, which the other side manages."""

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


OURS, SPLIT = "one pool", "static split"
SIDES: Mapping[str, Callable[[Options], Engine]] = {OURS: Engine, SPLIT: split_engine}


def cached_pages_by_scope(cache: PrefixCache) -> Counter[str]:
    """Return the number of cached pages that no request holds, by the scope of their blocks."""
    return Counter(cache._keys[page].scope for page in cache._idle)


@dataclass
class Unpaired:
    """Pages of keys and values whose adapter is not resident, step by step; every request has an
    adapter.

    held: of running and paused requests. cached: of nobody, as a share of all keys and values.
    """

    held: list[int] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)

    def count(self, engine: Engine) -> None:
        assert engine.memory.prefix is not None
        resident = set(engine.adapters.resident.values())
        without = (s for s in engine.scheduler.running if s.adapter not in resident)
        self.held.append(len({page for sequence in without for page in sequence.table.pages}))
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


def run(bench: Bench, grid: Mapping[str, Any], told: Callable[[str], None]) -> list[Row]:
    """Each trace on both sides, which take turns; all adapters in host memory, each with a prompt
    of its own that its requests begin with."""
    given = grid["split"]
    names = bench.names[: grid["traces"]["registered"]]
    root = bench.linked("split", names)
    rows = []
    for kind in given["kinds"]:
        told(f"split: {kind}")
        rows += _side_by_side(bench, root, grid, kind, draw(kind, names, given["requests"]))
    return rows


def _side_by_side(
    bench: Bench, root: Path, grid: Mapping[str, Any], kind: str, asked: Sequence[str]
) -> list[Row]:
    given = grid["split"]
    length = given["shared"] + grid["prompt"] + grid["output"] + BLOCK
    options = bench.options(
        root,
        adapter_pool_bytes=given["room"] * bench.run_bytes,
        kv_cache_tokens=given["kv_requests"] * length,
        max_model_len=length,
        enable_prefix_caching=True,
    )
    counts = {side: Unpaired() for side in SIDES}
    drivers = {
        side: Driver(make_engine(options), counts[side].count)
        for side, make_engine in SIDES.items()
    }
    found: dict[str, list[Outcome]] = {side: [] for side in SIDES}
    for number, start in enumerate(range(0, len(asked), TOGETHER)):
        asks = bench.asks(asked[start : start + TOGETHER], number, given["shared"])
        for side in list(SIDES)[:: 1 if number % 2 else -1]:
            found[side].append(drivers[side].run(asks, watch=False))
    rows = []
    for side, driver in drivers.items():
        driver.engine.check_integrity()
        driver.close()
        over = median(
            one.throughput / other.throughput
            for one, other in zip(found[side], found[SPLIT], strict=True)
        )
        more = tiers(driver.engine) | counts[side].as_row() | _reused(driver.engine)
        more["throughput_over_split"] = round(over, 3)
        rows.append(Row("split", f"{kind}, {side}", joined(found[side]), more))
    assert rows[0].more["kv_without_adapter"] == 0, "keys and values stand without their adapter"
    return rows


def _reused(engine: Engine) -> dict[str, float]:
    """Tokens of prompts that were found computed, as a share of all."""
    stats = engine.stats()
    return {
        "cached_tokens": round(stats.cached_tokens / (stats.cached_tokens + stats.prompt_tokens), 3)
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The keys of the issue: the worst over the traces of what is held, the mean of all else."""

    def of(side: str, key: str) -> list[Any]:
        return [r.more[key] for r in rows if r.what == "split" and r.setting.endswith(side)]

    return {
        "kv_without_adapter": max(of(OURS, "kv_without_adapter")),
        "cached_without_adapter": round(mean(of(OURS, "cached_without_adapter")), 4),
        "cached_without_adapter_split": round(mean(of(SPLIT, "cached_without_adapter")), 4),
        "cached_tokens": round(mean(of(OURS, "cached_tokens")), 3),
        "cached_tokens_split": round(mean(of(SPLIT, "cached_tokens")), 3),
        "throughput_over_split": round(mean(of(OURS, "throughput_over_split")), 3),
    }
