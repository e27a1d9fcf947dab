"""Host tier: fp32 copies of adapters in host memory, within a byte budget.

This module handles neither folders nor the page pool. Only the engine's thread uses it.
`memory/eviction.py` describes the order of eviction.
"""

from __future__ import annotations

import math

from vlora.lora.adapter import Adapter
from vlora.lora.handle import COPIED, AdapterHandle
from vlora.memory.eviction import UseOrder


class HostTier:
    """Host copies of adapters.

    A copy is not evicted while `AdapterHandle.needs_host_copy` is true, even if the budget is
    exceeded. This property is true while the adapter is resident or being packed. It is also true
    while a started request uses this version, since the folder may no longer contain it.
    """

    def __init__(self, budget: int | None) -> None:
        """Create an empty tier.

        budget: maximum number of bytes; None for no limit.
        """
        self._budget = math.inf if budget is None else budget
        self._order: UseOrder[AdapterHandle] = UseOrder()
        self._in_use: set[AdapterHandle] = set()
        """Handles whose copies were packed. All copies that may not be evicted are among them."""
        self.used_bytes = 0

    @property
    def free_bytes(self) -> float:
        """Bytes that are free without eviction; negative if the budget is exceeded."""
        return self._budget - self.used_bytes

    @property
    def available_bytes(self) -> float:
        """Bytes that are free or can be freed by eviction.

        Negative if the copies that may not be evicted exceed the budget.
        """
        self._in_use = {handle for handle in self._in_use if handle.needs_host_copy}
        return self._budget - sum(handle.description.host_bytes for handle in self._in_use)

    def add(self, handle: AdapterHandle, adapter: Adapter) -> None:
        """Store the copy of an adapter that was just read."""
        handle.loaded(adapter)
        self._order.add(handle)
        self.used_bytes += handle.description.host_bytes

    def use(self, handle: AdapterHandle) -> None:
        """Count a copy that is about to be packed among those that may not be evicted."""
        self._in_use.add(handle)

    def remove(self, handle: AdapterHandle) -> None:
        """Stop counting a copy. The caller drops it."""
        self._order.remove(handle)
        self._in_use.discard(handle)
        self.used_bytes -= handle.description.host_bytes

    def drop(self, handle: AdapterHandle) -> None:
        """Drop a copy that is not needed."""
        self.remove(handle)
        handle.drop()

    def evict_until_fits(self, size: int) -> int:
        """Evict copies until `size` more bytes fit or no copy can be evicted.

        Returns the number of evicted copies.
        """
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
