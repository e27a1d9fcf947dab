"""Adapter store: the adapters of a server in three tiers, folders → host memory → page pool.

Every adapter is described from its files. The host tier holds the weights of as many as its byte
budget allows, and the page pool the packed copies of as many as fit; these are resident, in slots
of the operator, where steps use them. `memory/eviction.py` states the order of eviction. Worker
threads load and pack; a request whose adapter is not resident waits in the scheduler. An adapter
that cannot be loaded is an error for its own requests only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from vlora.atmm.groups import HeadGroup, LoraGroup
from vlora.ids import BASE, MatrixId
from vlora.lora.adapter import MAX_ADAPTER_BYTES, Adapter, read_adapter
from vlora.lora.folders import error_of, stamp_of
from vlora.lora.handle import AdapterHandle
from vlora.lora.host import HostTier
from vlora.lora.model_shape import ModelShape
from vlora.lora.names import AdapterNames
from vlora.lora.peft_config import ErrorFactory
from vlora.lora.residents import Residents
from vlora.lora.slots import Slots
from vlora.lora.workers import Workers
from vlora.memory.pool import PageMemory, PagePool, Run
from vlora.metrics import TierCounters

MAX_PREFETCHED = 8
"""Maximum number of adapters, in the order of the requests that need them, that are on their way
into the pool at the same time."""

INLINE_PACK_BYTES = 4 << 20
"""Bytes of adapters that `advance` packs on the engine's thread between two steps. The packer's
thread takes the interpreter's lock once per group, which delays the waiting requests by some steps
(decision 57)."""


class AdapterStore(AdapterNames):
    """Adapters by name, and the tier that each one's weights are in.

    Methods that concern names may be called from any thread; `advance`, pins and the methods called
    by the pool belong to the engine's thread.
    """

    def __init__(
        self,
        model: ModelShape,
        max_bytes: int = MAX_ADAPTER_BYTES,
        dtype: torch.dtype = torch.float32,
        host_bytes: int | None = None,
    ) -> None:
        """Create a store without adapters.

        max_bytes: maximum size of one adapter's weights in fp32.
        dtype: of the operator's copies. Host copies stay fp32, as merging needs them.
        host_bytes: maximum size of all host copies that are not in use; None for no limit.
        """
        super().__init__(model, max_bytes, HostTier(host_bytes))
        self._slots = Slots(model, dtype)
        self._residents = Residents(self._lock, self._evict)
        self._inline_bytes_left = 0
        self._failed_packs: deque[tuple[AdapterHandle, int]] = deque()
        self._pool: PagePool | None = None
        self._memory: PageMemory | None = None
        self._workers = Workers()
        self.counters = TierCounters()
        self.on_evict: Callable[[int, AdapterHandle], None] = lambda slot, handle: None
        """Called on the engine's thread before a slot's adapter is evicted."""

    def load(self, folders: Mapping[str, Path], *, make_resident: bool = True) -> None:
        """Read each named folder, as `read` does.

        make_resident: also pack each adapter into a slot, in memory that the compiled core
            allocates; for a store without a pool.
        """
        self.read(folders)
        if make_resident:
            for handle in self._current.values():
                if handle.adapter is not None:
                    slot = self._slots.take(handle.adapter)
                    self._slots.pack(slot)
                    self._residents.add(slot, handle)

    # -- used by steps -------------------------------------------------------------------------

    def group(self, matrices: Sequence[MatrixId]) -> LoraGroup:
        """Return the present and future pairs of matrices that share their input, by slot."""
        return self._slots.group(matrices)

    @property
    def heads(self) -> HeadGroup:
        """Vision task heads by slot."""
        return self._slots.heads

    def adapter(self, slot: int) -> Adapter:
        return self._slots.adapter(slot)

    def slot(self, name: str | None) -> int:
        """Return the slot of a resident adapter, `BASE` for None. Raise as `handle` does, and
        ValueError if the adapter is not resident."""
        if name is None:
            return BASE
        slot = self.handle(name).slot
        if slot is None:
            raise ValueError(f"adapter '{name}' is not resident")
        return slot

    # -- the pool, on the engine's thread ------------------------------------------------------

    @property
    def protected_slot(self) -> int:
        """Slot that is never evicted: that of the adapter merged in the next step."""
        return self._residents.protected_slot

    @protected_slot.setter
    def protected_slot(self, slot: int) -> None:
        self._residents.protected_slot = slot

    def pages_of(self, handle: AdapterHandle) -> int:
        """Return the number of pages of the adapter's run; 0 without a pool."""
        if self._memory is None:
            return 0
        return Run.length(self.packed_bytes(handle), self._memory.page_bytes)

    def packed_bytes(self, handle: AdapterHandle) -> int:
        """Return the size of the adapter's packed copies."""
        if not handle.packed_bytes:
            handle.packed_bytes = self.bytes_of(handle.description.ranks)
        return handle.packed_bytes

    def bytes_of(self, ranks: Mapping[MatrixId, int]) -> int:
        """Return the size of the packed copies of an adapter with these ranks; all groups must have
        been created."""
        return self._slots.bytes_of(ranks)

    def attach(self, pool: PagePool, memory: PageMemory, pages: int) -> None:
        """Keep packed copies in the pool's pages from now on, and pack the loaded adapters as far
        as `pages` pages go. All groups must have been created."""
        self._pool, self._memory = pool, memory
        pool.evictors.append(self._residents)
        pool.run_evictor = self._residents
        for handle in list(self._current.values()):
            needed = self.pages_of(handle)
            if handle.adapter is not None and needed <= min(pages, pool.free):
                pages -= needed
                self._make_resident(handle)
        self.finish()

    def advance(self, wanted: Sequence[AdapterHandle], running: int = 0) -> AdapterHandle | None:
        """Load and pack the adapters that waiting requests need.

        A resident adapter that an older request needs is not evicted for a newer one's.

        wanted: adapters of waiting requests, in the order of arrival.
        running: number of running requests, each of which will need one more page.

        Returns the first adapter that is loaded but found too few pages, or None.
        """
        self._release_failed_packs()
        self._inline_bytes_left = INLINE_PACK_BYTES
        blocked: AdapterHandle | None = None
        missing, host_bytes_left, now = 0, None, self.clock()
        for handle in wanted:
            if not (handle.resident or handle.error or handle.backoff.due > now):
                missing += 1
                if host_bytes_left is None:
                    with self._lock:
                        host_bytes_left = self._host.available_bytes
                host_bytes_left -= handle.description.host_bytes
                # Copies beyond the host's budget would evict each other before they are packed.
                prefetch = missing == 1 or (missing <= MAX_PREFETCHED and host_bytes_left >= 0)
                if not handle.loading and handle.adapter is None and prefetch:
                    handle.loading = True
                    self._workers.load(partial(self._work, handle, self._load))
                # A newer adapter must not take the pages that an older one waits for.
                elif not handle.loading and handle.adapter is not None and blocked is None:
                    blocked = None if self._make_resident(handle, running) else handle
            self._residents.needed.add(handle)
        self._residents.needed.clear()
        self._slots.sweep()
        assert self._pool is not None
        for handle in reversed(wanted):
            handle.last_used = self._pool.tick()
        return blocked

    def count_request(self, handle: AdapterHandle) -> None:
        """Count a queued request by the tier that its adapter is in."""
        if handle.resident:
            self._count(hits=1)
        elif handle.adapter is not None:
            self._count(host_hits=1)
        else:
            self._count(misses=1)

    def _make_resident(self, handle: AdapterHandle, kv_pages: int = 0) -> bool:
        """Allocate a run and a slot and pack the adapter, or have it packed; return False if the
        pool has too few pages for it and `kv_pages` more."""
        assert self._pool is not None
        pages = self.pages_of(handle)
        if not self._pool.can_allocate_run(pages, kv_pages):
            return False
        with self._lock:  # Without it, another thread could drop the copy after this look at it.
            adapter = handle.adapter
            if adapter is None:
                return True
            handle.loading = True  # This keeps the host copy.
        run = self._pool.allocate_run(pages)
        if run is None:
            handle.loading = False
            return False
        handle.run = run
        slot = self._slots.take(adapter)
        job = partial(self._work, handle, lambda handle: self._pack(handle, slot))
        size = self.packed_bytes(handle)
        if size <= self._inline_bytes_left:
            self._inline_bytes_left -= size
            job()
        else:
            self._workers.pack(job)
        return True

    def _release_failed_packs(self) -> None:
        """Release the pages of adapters whose packing failed."""
        assert self._pool is not None
        assert self._memory is not None
        while self._failed_packs:
            handle, slot = self._failed_packs.popleft()
            assert handle.run is not None
            self._slots.clear(slot)
            self._memory.clear(handle.run.pages)
            self._pool.release_run(handle.run)
            handle.run = None

    def _detach(self, handle: AdapterHandle) -> None:
        self._residents.retire(handle)

    def _evict(self, handle: AdapterHandle) -> None:
        assert self._pool is not None
        assert self._memory is not None
        assert handle.slot is not None
        assert handle.run is not None
        self.on_evict(handle.slot, handle)
        with self._lock:
            self._slots.release(handle.slot)
            self._residents.remove(handle)
            self._memory.clear(handle.run.pages)
            self._pool.release_run(handle.run)
            handle.run = None
            if not self._is_current(handle):
                self._host.drop(handle)
            self._count(evictions=1, host_evictions=self._host.evict_until_fits(0))

    # -- on the workers' threads ---------------------------------------------------------------

    def finish(self) -> None:
        """Wait until all requested adapters are loaded and packed."""
        self._workers.finish()

    @property
    def loading(self) -> bool:
        """True if an adapter is being loaded or packed."""
        return self._workers.busy

    def close(self) -> None:
        self._workers.close()

    def _work(self, handle: AdapterHandle, job: Callable[[AdapterHandle], None]) -> None:
        """Run a job; any failure becomes the adapter's error."""
        try:
            job(handle)
        except Exception as error:
            self._fail(handle, error)
        finally:
            handle.loading = False
            self.on_change()

    def _load(self, handle: AdapterHandle) -> None:
        adapter = read_adapter(handle.name, handle.folder, handle.description, self._model.hidden)
        stamp = stamp_of(handle.folder)
        if stamp != handle.stamp:
            invalid = ErrorFactory(handle.name, str(handle.folder))
            raise invalid("has changed while it was being loaded") from error_of(stamp)
        with self._lock:
            evicted = self._host.evict_until_fits(handle.description.host_bytes)
            self._host.add(handle, adapter)
            self._count(loads=1, host_evictions=evicted)

    def _pack(self, handle: AdapterHandle, slot: int) -> None:
        assert self._memory is not None
        assert handle.run is not None
        size = handle.run.count * self._memory.page_bytes
        try:
            self._slots.pack(slot, self._memory.address(handle.run.first), size)
        except BaseException:
            self._failed_packs.append((handle, slot))
            raise
        self._residents.add(slot, handle)
        self._count(packs=1)

    @property
    def host_bytes(self) -> int:
        """Size of the fp32 copies in host memory."""
        return self._host.used_bytes

    @property
    def resident(self) -> Mapping[int, AdapterHandle]:
        """Adapters that steps can use now, by slot."""
        return self._residents.by_slot

    def _count(self, **increments: int) -> None:
        with self._lock:
            counts = {name: getattr(self.counters, name) + n for name, n in increments.items()}
            self.counters = replace(self.counters, **counts)

    def check_integrity(self) -> None:
        """Raise AssertionError if slots, host copies or runs disagree; call it while the workers
        are idle."""
        self._residents.check_integrity()
        for slot, handle in self.resident.items():
            assert handle.adapter is self._slots.adapter(slot), "not the weights that are packed"
        if self._pool is not None:
            runs = [handle.run for handle in self.resident.values() if handle.run is not None]
            pages = sum(run.count for run in runs)
            assert pages == self._pool.adapter, "a run belongs to no resident adapter"
        self._host.check_integrity()
