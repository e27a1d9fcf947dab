"""Adapters in host memory: fp32 copies within a byte budget, the longest unused first to go.

Knows neither folders nor the pool. Not thread-safe: the store's lock guards it.
"""

from __future__ import annotations

import math

from vlora.lora.adapter import Adapter
from vlora.lora.handle import AdapterHandle


class HostTier:
    """A copy stays, whatever the budget, while its adapter is resident or being packed, and while a
    request has started with that version: its folder may hold another one by now."""

    def __init__(self, budget: int | None) -> None:
        """budget: bytes; None: any number."""
        self._budget = budget
        self._handles: set[AdapterHandle] = set()
        self.used = 0
        """Bytes of all copies."""

    def __contains__(self, handle: AdapterHandle) -> bool:
        return handle in self._handles

    def room_for(self, more: int) -> bool:
        return self._budget is None or self.used + more <= self._budget

    @property
    def spare(self) -> float:
        """Bytes that are free, or could be, whoever wants what is idle."""
        if self._budget is None:
            return math.inf
        fixed = (handle.description.host_bytes for handle in self._handles if not _may_go(handle))
        return self._budget - sum(fixed)

    def add(self, handle: AdapterHandle, adapter: Adapter) -> None:
        handle.adapter = adapter
        self._handles.add(handle)
        self.used += handle.description.host_bytes

    def drop(self, handle: AdapterHandle) -> bool:
        """Forgets its copy, if it may go; whether it did."""
        if handle not in self._handles or not _may_go(handle):
            return False
        self._handles.remove(handle)
        self.used -= handle.description.host_bytes
        handle.adapter = None
        return True

    def trim(self, more: int) -> int:
        """Makes room for so many bytes, as far as that can be; copies dropped."""
        dropped = 0
        while not self.room_for(more):
            idle = [handle for handle in self._handles if _may_go(handle)]
            if not idle:
                break
            dropped += self.drop(min(idle, key=lambda handle: handle.used))
        return dropped

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not balance."""
        assert self.used == sum(handle.description.host_bytes for handle in self._handles)
        assert all(handle.adapter is not None for handle in self._handles)


def _may_go(handle: AdapterHandle) -> bool:
    return not (handle.resident or handle.loading or handle.held or handle.run)
