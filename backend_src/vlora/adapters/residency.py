"""Memory of adapters: host copies, slots of the operator, and pages of the pool.

This module belongs to the engine's thread, except for `Slots.pack` and `Residents.by_slot`.
`memory/pool.py` describes the order of eviction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vlora.adapters.files import Adapter
from vlora.adapters.handle import COPIED, AdapterHandle, AdapterState
from vlora.adapters.model_shape import ModelShape
from vlora.atmm.cuda.tables import padded
from vlora.atmm.groups import HeadGroup, LoraGroup
from vlora.atmm.types import HeadMatrix, LoraPair
from vlora.device.device import HOST, Device
from vlora.errors import InvalidArgument
from vlora.ids import BASE, MatrixId
from vlora.memory.pool import PageMemory, PagePool, Run, UseOrder
from vlora.metrics import MAX_LOAD_TIMES, TierCounters

# Runs a job, and then passes its result to a function on the engine's thread.
SubmitJob = Callable[[Callable[[], None], Callable[[None], None]], None]


class HostTier:
    """Host copies of adapters: their weights in fp32, within a byte budget (None for no limit),
    which copies with `AdapterHandle.needs_host_copy` may exceed.
    """

    def __init__(self, budget: int | None) -> None:
        self._budget = math.inf if budget is None else budget
        self._order: UseOrder[AdapterHandle] = UseOrder()
        # Handles whose copies were packed. All copies that may not be evicted are among them.
        self._in_use: set[AdapterHandle] = set()
        self.used_bytes = 0

    @property
    def free_bytes(self) -> float:
        """Bytes that are free without eviction; negative if the budget is exceeded."""
        return self._budget - self.used_bytes

    @property
    def handles(self) -> list[AdapterHandle]:
        """Adapters with a copy, in no order; safe from any thread."""
        return self._order.items

    @property
    def available_bytes(self) -> float:
        """Bytes that are free or can be freed; negative if copies in use exceed the budget."""
        self._in_use = {handle for handle in self._in_use if handle.needs_host_copy}
        return self._budget - sum(handle.description.host_bytes for handle in self._in_use)

    def add(self, handle: AdapterHandle, adapter: Adapter) -> None:
        """Store the copy of an adapter that was just read."""
        assert adapter.info.digest, "weights have a digest"
        assert handle.info.digest in ("", adapter.info.digest), "a version has one digest"
        handle.enter(AdapterState.IN_MEMORY)
        handle.adapter, handle.info = adapter, adapter.info
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
        self.remove(handle)
        handle.enter(AdapterState.ON_DISK)

    def evict_until_fits(self, size: int) -> int:
        """Evict copies until `size` more bytes fit or all are needed. Return the number."""
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


class Slots:
    """Slots of the LoRA operator: indices into all groups of projections, and into the heads.

    `take` assigns a slot to an adapter, and `pack` writes its weights. Then steps may use the slot.

    dtype: dtype of the packed copies; host copies are fp32.
    device: device whose steps use the adapters.
    heads: vision task heads by slot.
    matrices: matrices that any adapter seen so far changes. The set is replaced when it grows.
    """

    def __init__(self, model: ModelShape, dtype: torch.dtype, device: Device = HOST) -> None:
        self._model = model
        self._dtype = dtype
        self._device = device
        self._groups: dict[tuple[MatrixId, ...], LoraGroup] = {}
        self.matrices: frozenset[MatrixId] = frozenset()
        self.heads = HeadGroup(model.hidden, device.torch_device.type)
        self._adapters: list[Adapter | None] = []
        self._released: set[int] = set()
        self._empty: set[int] = set()  # Slots without an adapter that are not released.

    def group(self, matrices: Sequence[MatrixId]) -> LoraGroup:
        """Return the group of these matrices, which share their input: A and B of each, by slot."""
        key = tuple(matrices)
        if key not in self._groups:
            shapes = [self._model.shape_of(matrix) for matrix in key]
            d_outs = [d_out for d_out, _ in shapes]
            device_type = self._device.torch_device.type
            group = LoraGroup(shapes[0][1], d_outs, self._dtype, device_type)
            for adapter in self._adapters:
                pairs = {} if adapter is None else adapter.pairs
                group.append([pairs.get(matrix) for matrix in key])
            self._groups[key] = group
        return self._groups[key]

    def bytes_of(self, ranks: Mapping[MatrixId, int]) -> int:
        """Return the size in bytes of the packed copies of an adapter with these ranks by matrix,
        without its vision task head, which the compiled core allocates outside the pool.
        """
        return sum(
            group.slot_bytes([ranks.get(matrix, 0) for matrix in matrices])
            for matrices, group in self._groups.items()
        )

    def take(self, adapter: Adapter) -> int:
        """Assign a slot to the adapter, and return the slot."""
        if self._released:
            slot = self._released.pop()
        elif self._empty:
            slot = self._empty.pop()
        else:
            slot = len(self._adapters)
            for group in self._groups.values():
                group.append([None] * len(group.d_outs))
            self.heads.append(None)
            self._adapters.append(None)
        self._adapters[slot] = adapter
        return slot

    def pack(self, slot: int, address: int | None = None, size: int = 0) -> None:
        """Pack the slot's adapter into all groups, in the order in which steps use them.

        Any thread may call this, because no step uses the slot yet. If the CPU cannot write to the
        device's memory, the call only starts the copies, and a step waits for those that it uses.

        address, size: memory to write to; allocated by the compiled core if the address is None.
        """
        adapter = self._adapters[slot]
        assert adapter is not None, f"slot {slot} is empty"
        for matrices, group in list(self._groups.items()):
            row = [adapter.pairs.get(matrix) for matrix in matrices]
            if address is None:
                self._put(group, slot, row)
                continue
            used = group.slot_bytes([0 if pair is None else pair.rank for pair in row])
            group.put(slot, row, (address, size))
            address, size = address + used, size - used
        head = adapter.head
        if head is None or self._device.in_host_memory:
            self.heads.put(slot, head)
        else:
            load = self._device.load(head)
            self.heads.put(slot, HeadMatrix(*load.tensors), load.wait)

    def _put(self, group: LoraGroup, slot: int, row: Sequence[LoraPair | None]) -> None:
        device, pairs = self._device, [pair for pair in row if pair is not None]
        if device.in_host_memory or not pairs or pairs[0].a.device == device.torch_device:
            group.put(slot, row)
            return
        rounded = [padded(LoraPair(*(f.to(group.dtype) for f in pair))) for pair in pairs]
        load = device.load([factor for pair in rounded for factor in pair])
        copies = iter(load.tensors)
        placed = [pair and LoraPair(next(copies), next(copies)) for pair in row]
        group.put(slot, placed, wait=load.wait)

    def clear(self, slot: int) -> None:
        """Free the memory of a slot at once. The slot can be assigned again."""
        for group in self._groups.values():
            group.clear(slot)
        self.heads.put(slot, None)
        self._adapters[slot] = None
        self._empty.add(slot)

    def release(self, slot: int) -> None:
        """Release a slot that nothing uses any more. Its weights stay in memory until `sweep` frees
        them or `pack` replaces them.
        """
        self._adapters[slot] = None
        self._released.add(slot)

    def sweep(self) -> None:
        """Free the memory of all released slots."""
        while self._released:
            self.clear(self._released.pop())

    def adapter(self, slot: int) -> Adapter:
        adapter = self._adapters[slot]
        if adapter is None:
            raise KeyError(f"slot {slot} is empty")
        return adapter


class Residents:
    """Resident adapters by slot, and the order in which the page pool evicts unused ones.

    evict: function that releases the slot and the pages of an adapter, and calls `remove`.
    protected_slot: slot of the next step's live adapter, which is never evicted; BASE for none.
    needed: adapters that older waiting requests need. They are not evicted.
    """

    def __init__(self, evict: Callable[[AdapterHandle], None]) -> None:
        self._evict = evict
        self._handles: dict[int, AdapterHandle] = {}
        self._order: UseOrder[AdapterHandle] = UseOrder()
        self._retired: set[AdapterHandle] = set()
        self.protected_slot = BASE
        self.needed: set[AdapterHandle] = set()

    def add(self, handle: AdapterHandle) -> None:
        assert handle.slot is not None
        self._handles[handle.slot] = handle
        self._order.add(handle)
        if handle.retired:
            self._retired.add(handle)

    def remove(self, handle: AdapterHandle) -> None:
        assert handle.slot is not None
        del self._handles[handle.slot]
        self._order.remove(handle)
        self._retired.discard(handle)

    def retire(self, handle: AdapterHandle) -> None:
        self._retired.add(handle)

    @property
    def by_slot(self) -> dict[int, AdapterHandle]:
        """Copy of the adapters by slot; safe from any thread."""
        return dict(self._handles)

    # -- called by the pool ----------------------------------------------------------------------

    def _idle(self) -> Iterator[AdapterHandle]:
        # Adapters in use are skipped, so the time to the first result grows with their number.
        yield from (handle for handle in self._retired if handle.obsolete and self._unused(handle))
        for handle in self._order.oldest_first():
            if not handle.obsolete and self._unused(handle):
                yield handle

    def _unused(self, handle: AdapterHandle) -> bool:
        in_use = handle.pinned or handle.slot == self.protected_slot
        in_use = in_use or (handle.stays_loaded and not handle.retired)
        return not in_use and handle not in self.needed

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
        for slot, handle in self._handles.items():
            handle.check_integrity()
            assert handle.resident
            assert handle.slot == slot
        assert set(self._order.oldest_first()) == set(self._handles.values())
        assert self._retired == {h for h in self._handles.values() if h.retired}


class AdapterTiers:
    """Owner of the host copies and packed copies. Its methods move adapters between the tiers.

    counters: counts of all transitions. The object itself never changes; `count` replaces it.
    on_evict: called with slot and handle before a resident adapter is evicted.
    pool, memory: pages of the packed copies, set by `attach`.
    """

    def __init__(
        self, model: ModelShape, dtype: torch.dtype, host_bytes: int | None, device: Device
    ) -> None:
        self.host = HostTier(host_bytes)
        self.slots = Slots(model, dtype, device)
        self.residents = Residents(self.evict)
        self.counters = TierCounters()
        self.on_evict: Callable[[int, AdapterHandle], None] = lambda slot, handle: None
        self.pool: PagePool
        self.memory: PageMemory
        # Retired versions that may still have weights in host memory or in the pool.
        self._obsolete: set[AdapterHandle] = set()

    def attach(self, pool: PagePool, memory: PageMemory) -> None:
        """Store packed copies in the pool's pages from now on."""
        self.pool, self.memory = pool, memory
        pool.evictors.append(self.residents)
        pool.run_evictor = self.residents

    def pages_of(self, handle: AdapterHandle) -> int:
        """Return the number of contiguous pages that the adapter needs."""
        return Run.length(self.packed_bytes(handle), self.memory.page_bytes)

    def packed_bytes(self, handle: AdapterHandle) -> int:
        if not handle.packed_bytes:
            handle.packed_bytes = self.slots.bytes_of(handle.description.ranks)
        return handle.packed_bytes

    def count(self, **increments: int) -> None:
        """Add to counts. The keyword of each increment is a field of `TierCounters`."""
        counts: dict[str, Any] = {n: getattr(self.counters, n) + i for n, i in increments.items()}
        self.counters = replace(self.counters, **counts)

    def count_load(self, seconds: float) -> None:
        """Count an adapter whose weights were read in so many seconds."""
        recent = (*self.counters.load_seconds, seconds)[-MAX_LOAD_TIMES:]
        loads = self.counters.loads + 1
        self.counters = replace(self.counters, loads=loads, load_seconds=recent)

    def count_request(self, handle: AdapterHandle) -> None:
        """Count a queued request by the tier that its adapter is in."""
        tier = "hits" if handle.resident else "host_hits" if handle.adapter else "misses"
        self.count(**{tier: 1})

    # -- transitions -----------------------------------------------------------------------------

    def keep(self, handle: AdapterHandle, adapter: Adapter) -> None:
        """Store weights that have been read. If they do not fit, evict other host copies."""
        evicted = self.host.evict_until_fits(handle.description.host_bytes)
        self.host.add(handle, adapter)
        self.count(host_evictions=evicted)

    def pack(self, handle: AdapterHandle, submit: SubmitJob, kv_pages: int = 0) -> bool:
        """Give an adapter in host memory a slot and pages, and begin to pack it into them.

        submit: runs its first argument, which writes the packed copy, on any thread, and then calls
            its second on the engine's thread. If the first fails, the caller of `pack` must call
            `undo` or `fail` instead.

        Returns False if the pool has too few pages for the adapter and `kv_pages` pages of keys and
        values.
        """
        assert handle.adapter is not None
        pages = self.pages_of(handle)
        if not self.pool.can_allocate_run(pages, kv_pages):
            return False
        self.host.use(handle)
        # Allocating may evict other adapters, which must not drop this one's host copy.
        handle.hold()
        run = self.pool.allocate_run(pages)
        handle.release()
        if run is None:
            return False
        handle.enter(AdapterState.PACKING)
        slot = self.slots.take(handle.adapter)
        handle.slot, handle.run = slot, run
        address, size = self.memory.address(run.first), run.count * self.memory.page_bytes
        submit(partial(self.slots.pack, slot, address, size), lambda _: self._packed(handle))
        return True

    def _packed(self, handle: AdapterHandle) -> None:
        handle.enter(AdapterState.RESIDENT)
        self.residents.add(handle)
        self.count(packs=1)

    def undo(self, handle: AdapterHandle) -> None:
        """Reset an adapter to its state before a load or a packing that failed."""
        if handle.state is AdapterState.LOADING:
            handle.enter(AdapterState.ON_DISK)
        else:
            self._clear_slot(handle)
            handle.enter(AdapterState.IN_MEMORY)

    def fail(self, handle: AdapterHandle, error: InvalidArgument) -> None:
        """Record why an adapter could not be loaded or packed, and release its slot and pages."""
        if handle.state is AdapterState.PACKING:
            self._clear_slot(handle)
            self.host.remove(handle)
        handle.enter(AdapterState.FAILED)
        handle.error = error

    def _clear_slot(self, handle: AdapterHandle) -> None:
        assert handle.slot is not None
        self.slots.clear(handle.slot)
        self._release_run(handle)

    def evict(self, handle: AdapterHandle) -> None:
        """Release slot and pages of a resident adapter."""
        assert handle.slot is not None, f"adapter {handle.name!r} is not resident"
        self.on_evict(handle.slot, handle)
        self.slots.release(handle.slot)
        self.residents.remove(handle)
        self._release_run(handle)
        handle.enter(AdapterState.IN_MEMORY)
        self.drop_obsolete()
        self.count(evictions=1, host_evictions=self.host.evict_until_fits(0))

    def _release_run(self, handle: AdapterHandle) -> None:
        assert handle.run is not None
        self.memory.clear(handle.run.pages)
        self.pool.release_run(handle.run)

    def retire(self, handle: AdapterHandle | None) -> None:
        """Record that no name refers to a version any more. No new request can use it, and once no
        started one does, it is the first to be evicted. None is ignored.
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
        """Raise AssertionError if the tables are inconsistent. Nothing may be being packed."""
        self.host.check_integrity()
        self.residents.check_integrity()
        resident = self.residents.by_slot
        for slot, handle in resident.items():
            assert handle.adapter is self.slots.adapter(slot), "not the weights that are packed"
        runs = [handle.run for handle in resident.values() if handle.run is not None]
        assert sum(run.count for run in runs) == self.pool.adapter, "a run has no resident adapter"
