"""Host tier: fp32 copies of adapters in host memory, within a byte budget.

Knows neither folders nor the pool. Not thread-safe: the adapter store's lock guards it.
`memory/eviction.py` states what is evicted first.
"""

from __future__ import annotations

import math

from vlora.lora.adapter import Adapter
from vlora.lora.handle import AdapterHandle
from vlora.memory.eviction import least_recently_used


class HostTier:
    """Host copies of adapters.

    A copy stays, whatever the budget, while `AdapterHandle.needs_host_copy`: its adapter is
    resident or being packed, or a request has started with this version, whose folder may hold
    another one by now.
    """

    def __init__(self, budget: int | None) -> None:
        """budget: maximum number of bytes; None for no limit."""
        self._budget = budget
        self._handles: set[AdapterHandle] = set()
        self.used_bytes = 0

    def __contains__(self, handle: AdapterHandle) -> bool:
        return handle in self._handles

    def fits(self, size: int) -> bool:
        """Return whether `size` more bytes fit into the budget without eviction."""
        return self._budget is None or self.used_bytes + size <= self._budget

    @property
    def available_bytes(self) -> float:
        """Bytes that are free or can be freed by eviction; negative if copies in use exceed the
        budget."""
        if self._budget is None:
            return math.inf
        in_use = (h.description.host_bytes for h in self._handles if h.needs_host_copy)
        return self._budget - sum(in_use)

    def add(self, handle: AdapterHandle, adapter: Adapter) -> None:
        handle.adapter, handle.loaded_info = adapter, adapter.info
        self._handles.add(handle)
        self.used_bytes += handle.description.host_bytes

    def drop(self, handle: AdapterHandle) -> bool:
        """Drop the copy unless it is needed; return whether it was dropped."""
        if handle not in self._handles or handle.needs_host_copy:
            return False
        self._handles.remove(handle)
        self.used_bytes -= handle.description.host_bytes
        handle.adapter = None
        return True

    def evict_until_fits(self, size: int) -> int:
        """Evict copies until `size` more bytes fit or all others are in use; return the number of
        evicted copies."""
        evicted = 0
        while not self.fits(size):
            idle = [handle for handle in self._handles if not handle.needs_host_copy]
            oldest = least_recently_used(idle)
            if oldest is None:
                break
            evicted += self.drop(oldest)
        return evicted

    def check_integrity(self) -> None:
        """Raise AssertionError if the byte count or a copy is wrong."""
        assert self.used_bytes == sum(handle.description.host_bytes for handle in self._handles)
        assert all(handle.adapter is not None for handle in self._handles)
