"""Resident adapters by slot, and the order in which the page pool evicts unused ones.

Only the engine's thread may use this module, but any thread may call `by_slot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vlora.ids import BASE
from vlora.lora.handle import AdapterHandle
from vlora.memory.eviction import UseOrder


class Residents:
    """Adapters that steps can use. `memory/eviction.py` describes the order of eviction.

    evict: function that releases the slot and the pages of an adapter, and calls `remove`.
    """

    holds_runs = True

    def __init__(self, evict: Callable[[AdapterHandle], None]) -> None:
        self._evict = evict
        self._handles: dict[int, AdapterHandle] = {}
        self._order: UseOrder[AdapterHandle] = UseOrder()
        self._retired: set[AdapterHandle] = set()
        self.protected_slot = BASE
        """Slot whose adapter is never evicted."""
        self.needed: set[AdapterHandle] = set()
        """Adapters that older waiting requests need. They are not evicted."""

    def add(self, handle: AdapterHandle) -> None:
        assert handle.slot is not None
        handle.packed()
        self._handles[handle.slot] = handle
        self._order.add(handle)
        if handle.retired:
            self._retired.add(handle)

    def remove(self, handle: AdapterHandle) -> None:
        """Remove an adapter whose slot and pages have been released."""
        assert handle.slot is not None, f"adapter {handle.name!r} is not resident"
        del self._handles[handle.slot]
        self._order.remove(handle)
        self._retired.discard(handle)
        handle.unpack()

    def retire(self, handle: AdapterHandle) -> None:
        """Record that the adapter's name refers to another version than this one.

        As soon as no started request uses this version, it is first in the order of eviction.
        """
        self._retired.add(handle)

    @property
    def by_slot(self) -> dict[int, AdapterHandle]:
        """Copy of the adapters by slot; safe from any thread."""
        return dict(self._handles)

    # -- called by the pool ----------------------------------------------------------------------

    def _idle(self) -> Iterator[AdapterHandle]:
        """Yield the adapters that may be evicted, the next one to evict first.

        The method skips adapters in use, so the time to the first result grows with their number.
        """
        yield from (handle for handle in self._retired if handle.obsolete and self._unused(handle))
        for handle in self._order.oldest_first():
            if not handle.obsolete and self._unused(handle):
                yield handle

    def _unused(self, handle: AdapterHandle) -> bool:
        return (
            handle.run is not None
            and not handle.pinned
            and handle.slot != self.protected_slot
            and handle not in self.needed
        )

    def evictable_pages(self, enough: int) -> int:
        pages = 0
        for handle in self._idle():
            assert handle.run is not None
            pages += handle.run.count
            if pages >= enough:
                break
        return pages

    def oldest_use(self) -> int | None:
        oldest = next(self._idle(), None)
        return None if oldest is None else oldest.last_used

    def evict_oldest(self) -> None:
        self._evict(next(self._idle()))

    def idle_runs(self) -> list[range]:
        return [handle.run.pages for handle in self._idle() if handle.run is not None]

    def evict_run(self, first: int) -> None:
        (handle,) = (h for h in self._idle() if h.run is not None and h.run.first == first)
        self._evict(handle)

    def check_integrity(self) -> None:
        """Raise AssertionError if slots and handles are inconsistent."""
        for slot, handle in self._handles.items():
            handle.check_integrity()
            assert handle.resident
            assert handle.slot == slot
        assert set(self._order.oldest_first()) == set(self._handles.values())
        assert self._retired == {h for h in self._handles.values() if h.retired}
