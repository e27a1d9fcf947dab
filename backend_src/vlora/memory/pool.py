"""Page pool: the pages of one region of memory, their owners, and the order of eviction.

KV pages are allocated from the end of the region. Adapters need contiguous pages, called a run, and
are allocated from the start of the region. So the two rarely fragment each other. If they do, keys
and values are moved. The pool holds no memory, only the owners of pages; `memory/kv_cache.py` holds
their memory.

**Invariant:** free + KV + adapter + cached = total, and each page has one owner.

The pool evicts cached blocks (`memory/prefix.py`) and resident adapters, and the host tier evicts
fp32 copies (both in `adapters/residency.py`). All of them follow these rules:

1. Only unused items are evicted: blocks that no sequence holds; resident adapters that are neither
   pinned nor protected nor needed by an older waiting request; host copies of adapters that are not
   resident, not being packed and not held by a request.
2. The least recently used item goes first. The time of a use is a tick of the pool's clock
   (`PagePool.tick`), which blocks and adapters share. If a block and an adapter were used at the
   same time, the block goes first.
3. An item marked EVICT_FIRST goes before all others. These are the blocks of an evicted adapter,
   and an outdated version of an adapter that no started request uses.
4. Of blocks that are released together, the later ones in the sequence go first, so that the
   remaining blocks are still a prefix.
5. To make room for an adapter, the pool first looks for contiguous pages without adapters. If there
   are none, it evicts all adapters in one window of pages: the one whose most recently used adapter
   was used longest ago.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count as counter
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

Moves = Mapping[int, int]  # Moves of content between pages: old page → new page.

# Time of last use of items that are evicted before all others. The clock's first tick is 1.
EVICT_FIRST = 0


class Owner(IntEnum):
    """Owner of a page. Several sequences may share a page in KV; prompts may reuse one in CACHE."""

    FREE = 0
    KV = 1
    CACHE = 2
    ADAPTER = 3


@dataclass(frozen=True)
class Run:
    """Contiguous pages `first … first + count - 1` of one adapter."""

    first: int
    count: int

    @staticmethod
    def length(packed_bytes: int, page_bytes: int) -> int:
        return max(1, -(-packed_bytes // page_bytes))

    @property
    def pages(self) -> range:
        return range(self.first, self.first + self.count)


class PageMemory(Protocol):
    """Memory of a pool's pages, such as `memory.kv_cache.KVCache`."""

    @property
    def page_bytes(self) -> int: ...
    def address(self, page: int) -> int | None: ...
    def clear(self, pages: range) -> None: ...


class Evictor(Protocol):
    """Owner of evictable items, which occupy pages: cached blocks or idle adapters."""

    def evictable_pages(self, enough: int) -> int:
        """Return the number of pages that eviction could free. Counting may stop at `enough`."""

    def oldest_use(self) -> int | None:
        """Return the time of last use of the item to evict next; None if there is none."""

    def evict_oldest(self) -> None:
        """Evict the least recently used item and free its pages."""


class RunEvictor(Evictor, Protocol):
    """Evictor whose items are adapters."""

    def idle_runs(self) -> list[range]:
        """Return the pages of each adapter that may be evicted, the least recently used first."""

    def evict_run(self, first: int) -> None:
        """Evict the idle adapter whose run begins at page `first`."""


class PagePool:
    """Pages 0 … total-1. An allocated page belongs to the caller until it is released.

    evictors: owners of evictable items, of which the least recently used one is evicted first.
    run_evictor: the evictor whose items are adapters.
    movers: functions that are called in order whenever content moves, before the pages change
        owners. Each copies the content, or updates page numbers that it stores.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool has {total} pages; it needs at least one")
        self.total = total
        self._owner = bytearray(total)
        self._refs = [0] * total
        self._counts = {Owner.FREE: total, Owner.KV: 0, Owner.CACHE: 0, Owner.ADAPTER: 0}
        self._ticks = 0
        self.pages_moved = 0  # Number of pages whose content was moved so far.
        self._runs: set[Run] = set()
        self.evictors: list[Evictor] = []
        self.run_evictor: RunEvictor | None = None
        self.movers: list[Callable[[Moves], None]] = []

    @property
    def free(self) -> int:
        return self._counts[Owner.FREE]

    @property
    def kv(self) -> int:
        """Number of pages with keys and values of running sequences."""
        return self._counts[Owner.KV]

    @property
    def cached(self) -> int:
        return self._counts[Owner.CACHE]

    @property
    def adapter(self) -> int:
        return self._counts[Owner.ADAPTER]

    def can_allocate(self, count: int) -> bool:
        """Return whether `count` pages are free or can be freed by eviction."""
        missing = count - self.free
        for evictor in self.evictors:
            if missing <= 0:
                break
            missing -= evictor.evictable_pages(missing)
        return missing <= 0

    def can_allocate_run(self, count: int, kv_pages: int = 0) -> bool:
        """Return whether `count` pages for an adapter and `kv_pages` for keys and values are free
        or can be freed by eviction; not whether they are contiguous.
        """
        return self.can_allocate(count + kv_pages)

    def tick(self) -> int:
        """Advance the clock that orders uses of items, and return its new time."""
        self._ticks += 1
        return self._ticks

    # -- keys and values -----------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages for keys and values, each with one holder. Return None, and allocate
        nothing, if eviction cannot free enough pages.
        """
        if not self._evict_until_free(count):
            return None
        pages = []
        end = self.total
        for _ in range(count):
            end = self._owner.rfind(Owner.FREE, 0, end)
            pages.append(end)
            self._set_owner(end, Owner.KV)
            self._refs[end] = 1
        return pages

    def share(self, page: int) -> None:
        """Add a holder to a page that is held or cached."""
        assert self._owner[page] in (Owner.KV, Owner.CACHE), f"page {page} holds no keys"
        self._set_owner(page, Owner.KV)
        self._refs[page] += 1

    def release(self, pages: Iterable[int], keep: Container[int] = ()) -> list[int]:
        """Remove one holder of each page. A page without holders becomes cached if it is in `keep`,
        else free. Return the pages that became cached.
        """
        cached = []
        for page in pages:
            assert self._refs[page] > 0, f"page {page} has no holder"
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._set_owner(page, Owner.CACHE if page in keep else Owner.FREE)
                if page in keep:
                    cached.append(page)
        return cached

    def drop(self, page: int) -> None:
        assert self._owner[page] == Owner.CACHE, f"page {page} is not cached"
        self._set_owner(page, Owner.FREE)

    def owner(self, page: int) -> Owner:
        return Owner(self._owner[page])

    # -- adapters --------------------------------------------------------------------------------

    def allocate_run(self, count: int) -> Run | None:
        """Return contiguous pages for an adapter. If free pages are scattered, keys and values are
        moved. Return None, and evict nothing, if no window of `count` pages can be freed.
        """
        if count < 1:
            raise ValueError(f"a run has {count} pages; it needs at least one")
        if not self.can_allocate(count) or not self._evict_runs_for(count):
            return None
        self._evict_until_free(count)
        first = self._owner.find(bytes(count))
        if first < 0:
            first = cheapest_window(self._owner, Owner.FREE, Owner.ADAPTER, count)
            self._vacate(range(first, first + count))
        return self._take_run(first, count)

    def _take_run(self, first: int, count: int) -> Run:
        run = Run(first, count)
        for page in run.pages:
            self._set_owner(page, Owner.ADAPTER)
        self._runs.add(run)
        return run

    def _evict_runs_for(self, count: int) -> bool:
        if self._owner.find(bytes(count)) >= 0:
            return True
        idle = [] if self.run_evictor is None else self.run_evictor.idle_runs()
        busy = {run.pages for run in self._runs}.difference(idle)
        victims = runs_to_evict(self.total, list(busy), idle, count)
        if victims is None:
            return False
        for run in victims:
            assert self.run_evictor is not None
            self.run_evictor.evict_run(run.start)
        return True

    def release_run(self, run: Run) -> None:
        self._runs.remove(run)
        for page in run.pages:
            assert self._owner[page] == Owner.ADAPTER, f"page {page} belongs to no adapter"
            self._set_owner(page, Owner.FREE)

    def _vacate(self, window: range) -> None:
        moves: dict[int, int] = {}
        end = self.total
        for page in window:
            if self._owner[page] == Owner.FREE:
                continue
            end = self._owner.rfind(Owner.FREE, 0, end)
            while end in window:
                end = self._owner.rfind(Owner.FREE, 0, window.start)
            moves[page] = end
        for mover in self.movers:
            mover(moves)
        for page, to in moves.items():
            self._set_owner(to, Owner(self._owner[page]))
            self._refs[to], self._refs[page] = self._refs[page], 0
            self._set_owner(page, Owner.FREE)
        self.pages_moved += len(moves)

    # -- bookkeeping -----------------------------------------------------------------------------

    def _evict_until_free(self, count: int) -> bool:
        if not self.can_allocate(count):
            return False
        while self.free < count:
            if not evict_oldest(self.evictors):
                return False
        return True

    def _set_owner(self, page: int, owner: Owner) -> None:
        self._counts[Owner(self._owner[page])] -= 1
        self._counts[owner] += 1
        self._owner[page] = owner

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, owners and holders are inconsistent."""
        for owner, count in self._counts.items():
            assert self._owner.count(owner) == count, f"{owner.name}: counted as {count}"
        assert self.free + self.kv + self.adapter + self.cached == self.total
        in_runs = {page for run in self._runs for page in run.pages}
        assert in_runs == {p for p, owner in enumerate(self._owner) if owner == Owner.ADAPTER}
        for page, refs in enumerate(self._refs):
            owner = Owner(self._owner[page])
            assert (refs > 0) == (owner == Owner.KV), f"page {page}: {refs} holders, {owner.name}"


def _gaps(total: int, runs: Iterable[range]) -> Iterator[range]:
    start = 0
    for run in sorted(runs, key=lambda run: run.start):
        if start < run.start:
            yield range(start, run.start)
        start = run.stop
    if start < total:
        yield range(start, total)


def runs_to_evict(
    total: int, busy: Sequence[range], idle: Sequence[range], count: int
) -> list[range] | None:
    """Return the idle runs to evict so that the pool has `count` contiguous pages without a run;
    None if evicting all would not suffice.

    They are those in the window of `count` pages whose most recently used run was used longest ago,
    and of equal windows in the one with the fewest pages to evict.

    total: number of pages of the pool.
    busy: runs that stay.
    idle: runs that may be evicted, the least recently used first.
    """

    def window_exists(evicted: int) -> bool:
        return any(len(gap) >= count for gap in _gaps(total, [*busy, *idle[evicted:]]))

    if not window_exists(len(idle)):
        return None
    evicted = bisect_left(range(len(idle)), True, key=window_exists)
    if not evicted:
        return []
    last = idle[evicted - 1].start
    gap = next(gap for gap in _gaps(total, [*busy, *idle[evicted:]]) if last in gap)
    inside = [run for run in idle[:evicted] if run.start in gap]
    starts = [gap.start, gap.stop - count]
    starts += [run.stop for run in inside] + [run.start - count for run in inside]
    victims = (
        [run for run in inside if run.start < start + count and start < run.stop]
        for start in starts
        if gap.start <= start <= gap.stop - count
    )
    return min(victims, key=lambda runs: sum(map(len, runs)))


def cheapest_window(owners: bytearray, free: int, adapter: int, count: int) -> int:
    """Return the first page of the window of `count` pages without an adapter that has the most
    free pages, so that the fewest are moved. There must be one.

    owners: owner of each page.
    free, adapter: values in `owners` of free pages and of pages of adapters.
    """
    pages = np.frombuffer(owners, np.uint8)
    used = _sums(pages != free, count)
    used[_sums(pages == adapter, count) > 0] = count + 1
    return int(used.argmin())


def _sums(values: Array, count: int) -> Array:
    sums: Array = np.concatenate([[0], np.cumsum(values)])
    windows: Array = sums[count:] - sums[:-count]
    return windows


class _HasLastUse(Protocol):
    @property
    def last_used(self) -> int: ...


Item = TypeVar("Item", bound=_HasLastUse)


def evict_oldest(evictors: Sequence[Evictor]) -> bool:
    """Evict the least recently used item of all evictors; return False if there is none."""
    uses = ((evictor.oldest_use(), index) for index, evictor in enumerate(evictors))
    candidates = [(last_used, index) for last_used, index in uses if last_used is not None]
    if not candidates:
        return False
    evictors[min(candidates)[1]].evict_oldest()
    return True


class UseOrder(Generic[Item]):
    """Items in the order of their last use.

    A use only changes the time that the item stores, which is cheap. Its position is corrected when
    `oldest_first` reaches it.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Item]] = []
        self._entry_of: dict[Item, tuple[int, int, Item]] = {}
        self._serial = counter()

    @property
    def items(self) -> list[Item]:
        """Copy of the items in no order; safe from any thread."""
        return list(self._entry_of)

    def add(self, item: Item) -> None:
        self._entry_of[item] = entry = (item.last_used, next(self._serial), item)
        insort(self._entries, entry)

    def remove(self, item: Item) -> None:
        del self._entries[bisect_left(self._entries, self._entry_of.pop(item))]

    def oldest_first(self) -> Iterator[Item]:
        """Yield the items, the oldest use first. None may be added or removed meanwhile."""
        index = 0
        while index < len(self._entries):
            last_used, _, item = self._entries[index]
            if item.last_used > last_used:
                self.remove(item)
                self.add(item)
            else:
                yield item
                index += 1
