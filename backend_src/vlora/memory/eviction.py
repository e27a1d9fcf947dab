"""Order of eviction, for cached blocks, resident adapters and their copies in host memory.

The page pool evicts cached blocks (`memory/prefix.py`) and resident adapters (`lora/store.py`); the
host tier evicts fp32 copies (`lora/host.py`). All of them follow these rules:

1. Only an item that nothing uses is evicted. Its owner decides that: a block without a sequence; a
   resident adapter that is neither pinned nor protected, and that no older waiting request needs; a
   host copy whose adapter is neither resident, nor being loaded, nor held by a request.
2. The least recently used item goes first. The time of a use is a tick of the pool's clock
   (`PagePool.tick`), which blocks and adapters share. Of two items of one age, a block goes before
   an adapter, since the prefix cache is the pool's first evictor.
3. An item marked EVICT_FIRST goes before all others: the blocks of an evicted adapter, and a
   version of an adapter that its name no longer means.
4. Of blocks released together, the end of a chain goes before its beginning, so that the remaining
   blocks are still a prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

EVICT_FIRST = 0
"""Time of last use of items that go before all others; the clock's first tick is 1."""


class HasLastUse(Protocol):
    """Item with the time of its last use, on the pool's clock."""

    @property
    def last_used(self) -> int: ...


Item = TypeVar("Item", bound=HasLastUse)


class Evictor(Protocol):
    """Holder of pages that it can free: cached blocks, or idle adapters."""

    @property
    def holds_runs(self) -> bool:
        """True if it holds adapters, in runs of contiguous pages."""
        ...

    @property
    def evictable_pages(self) -> int:
        """Number of pages that it could free in all."""
        ...

    def oldest_use(self) -> int | None:
        """Return when the item that it would evict next was last used; None if it has none."""
        ...

    def evict_oldest(self) -> None:
        """Evict that item and free its pages."""
        ...


def least_recently_used(items: Iterable[Item]) -> Item | None:
    """Return the item to evict next, or None if there are none."""
    return min(items, key=lambda item: item.last_used, default=None)


def evict_oldest(evictors: Sequence[Evictor]) -> bool:
    """Evict the least recently used item of all evictors; return False if none has any."""
    uses = ((evictor.oldest_use(), index) for index, evictor in enumerate(evictors))
    candidates = [(last_used, index) for last_used, index in uses if last_used is not None]
    if not candidates:
        return False
    evictors[min(candidates)[1]].evict_oldest()
    return True


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
        """Remove a page that is in use again; do nothing for another page."""
        self._last_used.pop(page, None)

    def evict_first(self, pages: Iterable[int]) -> None:
        """Mark those of `pages` that are idle as the first to evict."""
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
        """Rename pages whose content has moved: page → new page."""
        if any(page in self._last_used for page in moves):
            renamed = ((moves.get(page, page), used) for page, used in self._last_used.items())
            self._last_used = OrderedDict(renamed)
