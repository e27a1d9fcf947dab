"""Host tier: fp32 copies of adapters in host memory, within a byte budget.

Knows neither folders nor the pool. Belongs to the engine's thread. `memory/eviction.py` states what
is evicted first.
"""

from __future__ import annotations

import math

from vlora.lora.adapter import Adapter
from vlora.lora.handle import COPIED, AdapterHandle
from vlora.memory.eviction import UseOrder


class HostTier:
    """Host copies of adapters.

    A copy stays, whatever the budget, while `AdapterHandle.needs_host_copy`: its adapter is
    resident or being packed, or a request has started with this version, whose folder may hold
    another one by now.
    """

    def __init__(self, budget: int | None) -> None:
        """budget: maximum number of bytes; None for no limit."""
        self._budget = math.inf if budget is None else budget
        self._order: UseOrder[AdapterHandle] = UseOrder()
        self._in_use: set[AdapterHandle] = set()
        """Copies that have been packed. All that are in use are among them."""
        self.used_bytes = 0

    @property
    def free_bytes(self) -> float:
        """Bytes that are free without eviction; negative if copies in use exceed the budget."""
        return self._budget - self.used_bytes

    @property
    def available_bytes(self) -> float:
        """Bytes that are free or can be freed by eviction; negative if copies in use exceed the
        budget."""
        self._in_use = {handle for handle in self._in_use if handle.needs_host_copy}
        return self._budget - sum(handle.description.host_bytes for handle in self._in_use)

    def add(self, handle: AdapterHandle, adapter: Adapter) -> None:
        """Keep the copy of an adapter that has just been read."""
        handle.loaded(adapter)
        self._order.add(handle)
        self.used_bytes += handle.description.host_bytes

    def use(self, handle: AdapterHandle) -> None:
        """Note that a copy is about to be packed, and thereby in use."""
        self._in_use.add(handle)

    def remove(self, handle: AdapterHandle) -> None:
        """Stop counting a copy. The caller drops it."""
        self._order.remove(handle)
        self._in_use.discard(handle)
        self.used_bytes -= handle.description.host_bytes

    def drop(self, handle: AdapterHandle) -> None:
        """Drop a copy that is not in use."""
        self.remove(handle)
        handle.drop()

    def evict_until_fits(self, size: int) -> int:
        """Evict copies until `size` more bytes fit or all others are in use; return the number of
        evicted copies."""
        evicted = 0
        while self.free_bytes < size:
            idle = (handle for handle in self._order.oldest_first() if not handle.needs_host_copy)
            oldest = next(idle, None)
            if oldest is None:
                break
            self.drop(oldest)
            evicted += 1
        return evicted

    def check_integrity(self) -> None:
        """Raise AssertionError if the byte count or a copy is wrong."""
        handles = set(self._order.oldest_first())
        assert self.used_bytes == sum(handle.description.host_bytes for handle in handles)
        assert all(handle.state in COPIED for handle in handles)
        assert {handle for handle in handles if handle.needs_host_copy} <= self._in_use
        for handle in handles:
            handle.check_integrity()
