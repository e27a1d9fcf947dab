"""Order of eviction of cached blocks, resident adapters and host copies.

The page pool evicts cached blocks (`memory/prefix.py`) and resident adapters (`lora/residents.py`).
The host tier evicts fp32 copies (`lora/host.py`). All of them follow these rules:

1. Only unused items are evicted: blocks that no sequence holds; resident adapters that are neither
pinned nor protected nor needed by an older waiting request; host copies of adapters that are not
resident, not being packed and not held by a request.
2. The least recently used item goes first. The time of a use is a tick of the pool's clock
(`PagePool.tick`), which blocks and adapters share. If a block and an adapter were used at the same
time, the block goes first.
3. An item marked EVICT_FIRST goes before all others. These are the blocks of an evicted adapter,
and an outdated version of an adapter that no started request uses.
4. Of blocks that are released together, the later ones in the sequence go first, so that the
remaining blocks are still a prefix.
5. To make room for an adapter, the pool first looks for contiguous pages without adapters. If there
are none, it evicts all adapters in one window of pages. The pool chooses the window whose most
recently used adapter was used longest ago (`memory/windows.py`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count as counter
from typing import Generic, Protocol, TypeVar

EVICT_FIRST = 0
"""Time of last use of items that are evicted before all others. The clock's first tick is 1."""


class HasLastUse(Protocol):
    """Item with the time of its last use on the pool's clock."""

    @property
    def last_used(self) -> int: ...


Item = TypeVar("Item", bound=HasLastUse)


class Evictor(Protocol):
    """Owner of evictable items, which occupy pages: cached blocks or idle adapters."""

    @property
    def holds_runs(self) -> bool:
        """True if the items are adapters, each in a run of contiguous pages."""
        ...

    def evictable_pages(self, enough: int) -> int:
        """Return the number of pages that eviction could free. Counting may stop at `enough`."""
        ...

    def oldest_use(self) -> int | None:
        """Return the time of last use of the item to evict next; None if there is none."""
        ...

    def evict_oldest(self) -> None:
        """Evict the least recently used item and free its pages."""
        ...


class RunEvictor(Evictor, Protocol):
    """Evictor whose items are adapters."""

    def idle_runs(self) -> list[range]:
        """Return the pages of each adapter that may be evicted, the least recently used first."""
        ...

    def evict_run(self, first: int) -> None:
        """Evict the idle adapter whose run begins at page `first`."""
        ...


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

    A use only changes the time that the item stores, which is cheap. The item's position in this
    order is corrected later, when `oldest_first` reaches it.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Item]] = []
        self._entry_of: dict[Item, tuple[int, int, Item]] = {}
        self._serial = counter()

    def add(self, item: Item) -> None:
        self._entry_of[item] = entry = (item.last_used, next(self._serial), item)
        insort(self._entries, entry)

    def remove(self, item: Item) -> None:
        entry = self._entry_of.pop(item)
        del self._entries[bisect_left(self._entries, entry)]

    def oldest_first(self) -> Iterator[Item]:
        """Yield the items, the least recently used first.

        No item may be added or removed during the iteration.
        """
        index = 0
        while index < len(self._entries):
            last_used, _, item = self._entries[index]
            if item.last_used > last_used:
                self.remove(item)
                self.add(item)
            else:
                yield item
                index += 1


class IdlePages:
    """Pages that can be evicted, least recently used first."""

    def __init__(self) -> None:
        self._last_used: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last_used)

    def __iter__(self) -> Iterator[int]:
        return iter(self._last_used)

    def __contains__(self, page: int) -> bool:
        return page in self._last_used

    def add(self, chain: Sequence[int], now: int) -> None:
        """Add pages that were released together; the last one is evicted first."""
        for page in reversed(chain):
            self._last_used[page] = now

    def remove(self, page: int) -> None:
        """Remove a page that is in use again. Do nothing if it is missing."""
        self._last_used.pop(page, None)

    def evict_first(self, pages: Iterable[int]) -> None:
        """Mark the pages that are idle among `pages` as the first to evict."""
        for page in pages:
            if page in self._last_used:
                self._last_used[page] = EVICT_FIRST
                self._last_used.move_to_end(page, last=False)

    def oldest_use(self) -> int | None:
        return next(iter(self._last_used.values()), None)

    def pop(self) -> int:
        """Remove and return the page to evict next."""
        return self._last_used.popitem(last=False)[0]

    def relocate(self, moves: Mapping[int, int]) -> None:
        """Update the page numbers after the content of pages was moved.

        moves: page → new page.
        """
        if any(page in self._last_used for page in moves):
            renamed = ((moves.get(page, page), used) for page, used in self._last_used.items())
            self._last_used = OrderedDict(renamed)
