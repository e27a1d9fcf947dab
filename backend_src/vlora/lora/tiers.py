"""Memory of adapters: host copies, slots of the operator, and pages of the pool.

This module handles neither names nor threads. It belongs to the engine's thread, except for
`AdapterTiers.write`. `memory/eviction.py` describes the order of eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from vlora.errors import InvalidArgument
from vlora.ids import MatrixId
from vlora.lora.adapter import Adapter
from vlora.lora.handle import AdapterHandle, AdapterState
from vlora.lora.host import HostTier
from vlora.lora.model_shape import ModelShape
from vlora.lora.residents import Residents
from vlora.lora.slots import Slots
from vlora.memory.device import Device
from vlora.memory.pool import PageMemory, PagePool, Run
from vlora.metrics import TierCounters


class AdapterTiers:
    """Owner of the host copies and packed copies. Its methods move adapters between the tiers."""

    def __init__(
        self,
        model: ModelShape,
        dtype: torch.dtype,
        host_bytes: int | None,
        on_evict: Callable[[int, AdapterHandle], None],
        device: Device,
    ) -> None:
        """Create empty tiers without a pool.

        dtype: dtype of the packed copies. Host copies stay fp32, as merging needs them.
        host_bytes: maximum size of the host copies that may be evicted; None for no limit.
        on_evict: called with slot and handle before a resident adapter is evicted.
        device: device whose steps use the adapters.
        """
        self.host = HostTier(host_bytes)
        self.slots = Slots(model, dtype, device)
        self.residents = Residents(self.evict)
        self.counters = TierCounters()
        """Counts of all transitions. The object itself never changes; `count` replaces it."""
        self._on_evict = on_evict
        self._obsolete: set[AdapterHandle] = set()
        """Retired versions that may still have weights in host memory or in the pool."""
        self._pool: PagePool | None = None
        self._memory: PageMemory | None = None

    def attach(self, pool: PagePool, memory: PageMemory) -> None:
        """Store packed copies in the pool's pages from now on."""
        self._pool, self._memory = pool, memory
        pool.evictors.append(self.residents)
        pool.run_evictor = self.residents

    @property
    def pool(self) -> PagePool:
        assert self._pool is not None, "no pool is attached"
        return self._pool

    @property
    def memory(self) -> PageMemory:
        assert self._memory is not None, "no pool is attached"
        return self._memory

    def pages_of(self, handle: AdapterHandle) -> int:
        """Return the number of contiguous pages that the adapter needs; 0 without a pool."""
        if self._memory is None:
            return 0
        return Run.length(self.packed_bytes(handle), self._memory.page_bytes)

    def packed_bytes(self, handle: AdapterHandle) -> int:
        """Return the size in bytes of the adapter's packed copies."""
        if not handle.packed_bytes:
            handle.packed_bytes = self.bytes_of(handle.description.ranks)
        return handle.packed_bytes

    def bytes_of(self, ranks: Mapping[MatrixId, int]) -> int:
        """Return the size in bytes of the packed copies of an adapter with these ranks.

        All groups must have been created.
        """
        return self.slots.bytes_of(ranks)

    def count(self, **increments: int) -> None:
        """Add to counts. The keyword of each increment is a field of `TierCounters`."""
        counts: dict[str, Any] = {n: getattr(self.counters, n) + i for n, i in increments.items()}
        self.counters = replace(self.counters, **counts)

    # -- transitions -----------------------------------------------------------------------------

    def keep(self, handle: AdapterHandle, adapter: Adapter) -> None:
        """Store weights that have been read. If they do not fit, evict other host copies."""
        evicted = self.host.evict_until_fits(handle.description.host_bytes)
        self.host.add(handle, adapter)
        self.count(host_evictions=evicted)

    def reserve(self, handle: AdapterHandle, kv_pages: int) -> bool:
        """Assign pages and a slot to the adapter, so that it can be packed.

        Returns False if the pool has too few pages for it and for `kv_pages` pages of keys and
        values.
        """
        pages = self.pages_of(handle)
        if not self.pool.can_allocate_run(pages, kv_pages):
            return False
        self.host.use(handle)
        # If the run evicts an adapter, the host copy that is to be packed must not be dropped.
        handle.hold()
        run = self.pool.allocate_run(pages)
        handle.release()
        if run is None:
            return False
        self.take_slot(handle, run)
        return True

    def take_slot(self, handle: AdapterHandle, run: Run | None = None) -> None:
        """Assign a slot to the adapter, so that it can be packed.

        run: pages for the packed copies. If None, the compiled core allocates their memory.
        """
        assert handle.adapter is not None
        self.host.use(handle)
        handle.pack(self.slots.take(handle.adapter), run)

    def write(self, slot: int, run: Run | None) -> None:
        """Write the packed copies of a slot's adapter.

        Any thread may call this, since nothing else uses the slot and the pages meanwhile.
        """
        if run is None:
            self.slots.pack(slot)
        else:
            size = run.count * self.memory.page_bytes
            self.slots.pack(slot, self.memory.address(run.first), size)

    def packed(self, handle: AdapterHandle) -> None:
        """Make an adapter resident whose packed copies have been written."""
        self.residents.add(handle)
        self.count(packs=1)

    def undo(self, handle: AdapterHandle) -> None:
        """Reset an adapter to its state before a load or a packing that failed."""
        if handle.state is AdapterState.LOADING:
            handle.load_later()
        else:
            self._release_pages(handle)
            handle.unpack()

    def fail(self, handle: AdapterHandle, error: InvalidArgument) -> None:
        """Record why an adapter could not be loaded or packed, and release its slot and pages."""
        if handle.state is AdapterState.PACKING:
            self._release_pages(handle)
            self.host.remove(handle)
        handle.fail(error)

    def _release_pages(self, handle: AdapterHandle) -> None:
        """Release slot and pages of an adapter that could not be packed."""
        assert handle.slot is not None
        self.slots.clear(handle.slot)
        self._release_run(handle.run)

    def evict(self, handle: AdapterHandle) -> None:
        """Release slot and pages of a resident adapter."""
        assert handle.slot is not None
        self._on_evict(handle.slot, handle)
        self.slots.release(handle.slot)
        run = handle.run
        self.residents.remove(handle)
        self._release_run(run)
        self.drop_obsolete()
        self.count(evictions=1, host_evictions=self.host.evict_until_fits(0))

    def _release_run(self, run: Run | None) -> None:
        if run is not None:
            self.memory.clear(run.pages)
            self.pool.release_run(run)

    def retire(self, handle: AdapterHandle | None) -> None:
        """Record that no name refers to a version any more, so that no new request can use it.

        As soon as no started request uses the version, it is the first to be evicted.

        handle: the version. With None, the method does nothing.
        """
        if handle is not None:
            handle.retired = True
            self._obsolete.add(handle)
            if handle.resident:
                self.residents.retire(handle)

    def drop_obsolete(self) -> None:
        """Drop the host copies of versions that no request can use again."""
        for handle in [handle for handle in self._obsolete if not handle.held]:
            if handle.state is AdapterState.IN_MEMORY:
                self.host.drop(handle)
            if handle.state in (AdapterState.ON_DISK, AdapterState.FAILED):
                self._obsolete.remove(handle)

    def check_integrity(self) -> None:
        """Raise AssertionError if slots, host copies or runs are inconsistent.

        Call it only while nothing is being packed.
        """
        self.host.check_integrity()
        self.residents.check_integrity()
        resident = self.residents.by_slot
        for slot, handle in resident.items():
            assert handle.adapter is self.slots.adapter(slot), "not the weights that are packed"
        if self._pool is not None:
            runs = [handle.run for handle in resident.values() if handle.run is not None]
            assert sum(run.count for run in runs) == self._pool.adapter, (
                "a run belongs to no resident adapter"
            )
