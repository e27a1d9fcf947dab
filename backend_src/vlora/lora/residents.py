"""Resident adapters by slot, and the order in which the page pool evicts those that are idle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from vlora.ids import BASE
from vlora.lora.handle import AdapterHandle
from vlora.memory.eviction import UseOrder


class Residents:
    """Adapters that steps can use. `memory/eviction.py` states which of them may be evicted.

    `add` and `retire` may be called from any thread; everything else belongs to the engine's
    thread.

    lock: guards what other threads change.
    evict: frees the slot and the pages of an adapter, and calls `remove`.
    """

    holds_runs = True

    def __init__(self, lock: threading.RLock, evict: Callable[[AdapterHandle], None]) -> None:
        self._lock = lock
        self._evict = evict
        self._handles: dict[int, AdapterHandle] = {}
        self._order: UseOrder[AdapterHandle] = UseOrder()
        self._retired: set[AdapterHandle] = set()
        self.protected_slot = BASE
        """Slot that is never evicted."""
        self.needed: set[AdapterHandle] = set()
        """Adapters that older waiting requests need, which are not evicted either."""

    def add(self, slot: int, handle: AdapterHandle) -> None:
        with self._lock:
            self._handles[slot] = handle
            self._order.add(handle)
            if handle.retired:
                self._retired.add(handle)
            handle.slot = slot

    def remove(self, handle: AdapterHandle) -> None:
        with self._lock:
            assert handle.slot is not None, f"adapter {handle.name!r} is not resident"
            del self._handles[handle.slot]
            self._order.remove(handle)
            self._retired.discard(handle)
            handle.slot = None

    def retire(self, handle: AdapterHandle) -> None:
        """Note that the adapter's name no longer means this version."""
        with self._lock:
            handle.retired = True
            if handle.resident:
                self._retired.add(handle)

    @property
    def by_slot(self) -> dict[int, AdapterHandle]:
        with self._lock:
            return dict(self._handles)

    # -- called by the pool ----------------------------------------------------------------------

    def _idle(self) -> Iterator[AdapterHandle]:
        """Return the adapters that can be evicted, the next one first. The lock must be held.

        Takes time for those that are in use and were used before the ones that are asked for.
        """
        yield from (handle for handle in self._retired if not handle.held and self._unused(handle))
        for handle in self._order.oldest_first():
            if (handle.held or not handle.retired) and self._unused(handle):
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
        with self._lock:
            for handle in self._idle():
                assert handle.run is not None
                pages += handle.run.count
                if pages >= enough:
                    break
        return pages

    def oldest_use(self) -> int | None:
        with self._lock:
            oldest = next(self._idle(), None)
        return None if oldest is None else oldest.last_used

    def evict_oldest(self) -> None:
        with self._lock:
            oldest = next(self._idle())
        self._evict(oldest)

    def idle_runs(self) -> list[range]:
        with self._lock:
            return [handle.run.pages for handle in self._idle() if handle.run is not None]

    def evict_run(self, first: int) -> None:
        with self._lock:
            (handle,) = (h for h in self._idle() if h.run is not None and h.run.first == first)
        self._evict(handle)

    def check_integrity(self) -> None:
        """Raise AssertionError if slots and handles disagree."""
        for slot, handle in self._handles.items():
            assert handle.slot == slot
            assert handle.adapter is not None, "resident without its host copy"
            assert handle.info.digest, "resident without its digest"
        assert set(self._order.oldest_first()) == set(self._handles.values())
        assert self._retired == {h for h in self._handles.values() if h.retired}
