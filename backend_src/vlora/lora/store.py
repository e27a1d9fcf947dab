"""The adapters of a server in three tiers: folders → host memory → the page pool.

Every known adapter is described; as many as the host's budget holds are loaded; as many as the pool
has room for are packed into slots of the operator, where steps use them. Both budgets give up the
longest unused first. Loading and packing are a loader thread's work; who needs an adapter waits in
the scheduler. One that does not load is an error for its own requests alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from vlora.atmm.groups import HeadGroup, LoraGroup
from vlora.errors import InvalidArgument
from vlora.ids import BASE, MatrixId
from vlora.lora.adapter import MAX_ADAPTER_BYTES, Adapter, ModelShape, read_adapter
from vlora.lora.folders import stamp_of
from vlora.lora.handle import AdapterHandle
from vlora.lora.host import HostTier
from vlora.lora.names import AdapterNames
from vlora.lora.peft_config import Refusal, as_text
from vlora.lora.slots import Slots
from vlora.lora.workers import Workers
from vlora.memory.pool import PagePool, Run
from vlora.metrics import TierCounters

log = logging.getLogger(__name__)

PREFETCH = 8
"""Adapters, from the oldest request's on, that may be on their way into the pool at once."""


AT_ONCE = 4 << 20
"""Bytes of adapters that a step packs by itself. The packer's thread takes the interpreter's lock
once for each group, and who waits begins some steps later (decision 57)."""


class Region(Protocol):
    """The pool's memory, as `memory/store.py` has it."""

    @property
    def page_bytes(self) -> int: ...
    def address(self, page: int) -> int: ...
    def clear(self, pages: range) -> None: ...


class AdapterStore(AdapterNames):
    """What names mean, and where each adapter's weights are.

    What concerns names may be called from any thread; `advance`, pins and what the pool asks belong
    to the engine's.
    """

    holds_runs = True

    def __init__(
        self,
        model: ModelShape,
        max_bytes: int = MAX_ADAPTER_BYTES,
        dtype: torch.dtype = torch.float32,
        host_bytes: int | None = None,
    ) -> None:
        """max_bytes: what one adapter's weights may need in fp32. dtype: in which the operator gets
        them; the host's copies stay fp32, as merging needs them. host_bytes: of these copies in
        all, but for what is in use; None: any number."""
        super().__init__(model, max_bytes, HostTier(host_bytes))
        self._slots = Slots(model, dtype)
        self._resident: dict[int, AdapterHandle] = {}
        self._older: set[AdapterHandle] = set()
        self._at_once = 0
        self._unpacked: deque[tuple[AdapterHandle, int]] = deque()
        self._pool: PagePool | None = None
        self._region: Region | None = None
        self._workers = Workers()
        self.keep = BASE
        """Slot that is not evicted, whoever asks: the one in the weights of the next step."""
        self.counters = TierCounters()
        self.on_evict: Callable[[int, AdapterHandle], None] = lambda slot, handle: None
        """Called on the engine's thread before a slot's adapter is gone."""

    def load(self, folders: Mapping[str, Path], *, place: bool = True) -> None:
        """Read each named folder, as `read` does. place: into slots, in memory of the core's own,
        for a store without a pool."""
        self.read(folders)
        if place:
            for handle in self._current.values():
                if handle.adapter is not None:
                    slot = self._slots.take(handle.adapter)
                    self._slots.pack(slot)
                    self._settle(handle, slot)

    # -- what steps use ------------------------------------------------------------------------

    def group(self, places: Sequence[MatrixId]) -> LoraGroup:
        """Pairs of matrices that share their input, by slot, now and later."""
        return self._slots.group(places)

    @property
    def heads(self) -> HeadGroup:
        """Vision task heads by slot."""
        return self._slots.heads

    def adapter(self, slot: int) -> Adapter:
        return self._slots.adapter(slot)

    def slot(self, name: str | None) -> int:
        """Slot of a resident adapter, `BASE` for None. Raises as `handle`, and ValueError for one
        that is not resident."""
        if name is None:
            return BASE
        slot = self.handle(name).slot
        if slot is None:
            raise ValueError(f"adapter '{name}' is not resident")
        return slot

    # -- the pool, on the engine's thread ------------------------------------------------------

    def pages_of(self, handle: AdapterHandle) -> int:
        """Pages of its run; 0 without a pool."""
        if self._region is None:
            return 0
        return Run.length(self.packed_bytes(handle), self._region.page_bytes)

    def packed_bytes(self, handle: AdapterHandle) -> int:
        if not handle.needed:
            handle.needed = self.bytes_of(handle.description.ranks)
        return handle.needed

    def bytes_of(self, ranks: Mapping[MatrixId, int]) -> int:
        """Of the packed copies of an adapter with these ranks; the groups have to be there."""
        return self._slots.bytes_of(ranks)

    def attach(self, pool: PagePool, region: Region, pages: int) -> None:
        """From now on slots lie in the pool's pages. What is loaded is packed now, as far as it
        fits `pages`: the groups have to be there."""
        self._pool, self._region = pool, region
        pool.reclaimers.append(self)
        for handle in list(self._current.values()):
            needed = self.pages_of(handle)
            if handle.adapter is not None and needed <= min(pages, pool.free):
                pages -= needed
                self._place(handle)
        self.finish()

    def advance(self, wanted: Sequence[AdapterHandle], running: int = 0) -> AdapterHandle | None:
        """Brings what waiting requests need nearer. wanted: their adapters, the oldest request's
        first. running: requests that will need a page each, which nobody who waits may take. The
        first that is loaded and found no room in the pool; None: all did.

        A resident adapter that an older request waits for makes no room for a newer one's.
        """
        self._give_back()
        self._at_once = AT_ONCE
        stuck: AdapterHandle | None = None
        coming, room = 0, None
        for handle in wanted:
            if not (handle.resident or handle.error):
                coming += 1
                if room is None:
                    with self._lock:
                        room = self._host.spare
                room -= handle.description.host_bytes
                # More than the host has room for would push each other out before they are packed.
                ahead = coming == 1 or (coming <= PREFETCH and room >= 0)
                if not handle.loading and handle.adapter is None and ahead:
                    handle.loading = True
                    self._workers.load(partial(self._work, handle, self._load))
                # Nobody newer takes the room that an older one waits for.
                elif not handle.loading and handle.adapter is not None and stuck is None:
                    stuck = None if self._place(handle, running) else handle
            self._older.add(handle)
        self._older.clear()
        self._slots.sweep()
        assert self._pool is not None
        for handle in reversed(wanted):
            handle.used = self._pool.tick()
        return stuck

    def asked(self, handle: AdapterHandle) -> None:
        """A request for it has been queued; counted by where it is."""
        if handle.resident:
            self._count(hits=1)
        elif handle.adapter is not None:
            self._count(host_hits=1)
        else:
            self._count(misses=1)

    def _place(self, handle: AdapterHandle, beside: int = 0) -> bool:
        """Takes a run and a slot and has it packed; False where there is no room for it and so many
        pages beside it."""
        assert self._pool is not None
        pages = self.pages_of(handle)
        if not self._pool.has_room_for_run(pages, beside):
            return False
        handle.loading = True  # so that its host copy stays
        adapter = handle.adapter
        run = None if adapter is None else self._pool.allocate_run(pages)
        if adapter is None or run is None:
            handle.loading = False
            return adapter is None
        handle.run = run
        slot = self._slots.take(adapter)
        job = partial(self._work, handle, lambda one: self._pack(one, slot))
        size = self.packed_bytes(handle)
        if size <= self._at_once:
            self._at_once -= size
            job()
        else:
            self._workers.pack(job)
        return True

    def _give_back(self) -> None:
        """What could not be packed holds its run no longer."""
        assert self._pool is not None
        while self._unpacked:
            handle, slot = self._unpacked.popleft()
            assert handle.run is not None
            self._slots.clear(slot)
            self._pool.release_run(handle.run)
            handle.run = None

    def _evict(self, handle: AdapterHandle) -> None:
        assert self._pool is not None
        assert self._region is not None
        assert handle.slot is not None
        assert handle.run is not None
        self.on_evict(handle.slot, handle)
        with self._lock:
            self._slots.give_up(handle.slot)
            del self._resident[handle.slot]
            self._region.clear(handle.run.pages)
            self._pool.release_run(handle.run)
            handle.slot = handle.run = None
            if not self._means(handle):
                self._host.drop(handle)
            self._count(evictions=1, host_evictions=self._host.trim(0))

    def _idle(self) -> list[AdapterHandle]:
        return [
            handle
            for slot, handle in self.resident.items()
            if handle.run and not handle.pinned and slot != self.keep and handle not in self._older
        ]

    @property
    def spare(self) -> int:
        return sum(handle.run.count for handle in self._idle() if handle.run)

    def oldest(self) -> float | None:
        return min((handle.used for handle in self._idle()), default=None)

    def give_up(self) -> None:
        self._evict(min(self._idle(), key=lambda handle: handle.used))

    # -- on the workers' threads ---------------------------------------------------------------

    def finish(self) -> None:
        """Waits until all that was asked for is loaded and packed."""
        self._workers.finish()

    @property
    def loading(self) -> bool:
        """Whether something is being loaded or packed."""
        return self._workers.busy

    def close(self) -> None:
        self._workers.close()

    def _work(self, handle: AdapterHandle, job: Callable[[AdapterHandle], None]) -> None:
        """Whatever fails is the adapter's error."""
        try:
            job(handle)
        except InvalidArgument as error:
            self._fail(handle, error)
        except Exception as error:
            log.exception("while an adapter was loaded")
            refuse = Refusal(handle.name, str(handle.folder))
            self._fail(handle, refuse(f"does not load: {error!r}"))
        finally:
            handle.loading = False
            self.on_news()

    def _fail(self, handle: AdapterHandle, error: InvalidArgument) -> None:
        with self._lock:
            handle.error = error
            if self._means(handle):
                self._refuse(as_text(handle.name), error)
            self.version += 1

    def _load(self, handle: AdapterHandle) -> None:
        adapter = read_adapter(handle.name, handle.folder, handle.description, self._model.hidden)
        if stamp_of(handle.folder) != handle.stamp:
            raise Refusal(handle.name, str(handle.folder))("has changed while it was being loaded")
        with self._lock:
            dropped = self._host.trim(handle.description.host_bytes)
            self._host.add(handle, adapter)
            self._count(loads=1, host_evictions=dropped)

    def _pack(self, handle: AdapterHandle, slot: int) -> None:
        assert self._region is not None
        assert handle.run is not None
        room = handle.run.count * self._region.page_bytes
        try:
            self._slots.pack(slot, self._region.address(handle.run.first), room)
        except BaseException:
            self._unpacked.append((handle, slot))
            raise
        self._settle(handle, slot)
        self._count(packs=1)

    def _settle(self, handle: AdapterHandle, slot: int) -> None:
        with self._lock:
            self._resident[slot] = handle
            handle.slot = slot

    @property
    def host_bytes(self) -> int:
        """Of the fp32 copies in host memory."""
        return self._host.used

    @property
    def resident(self) -> Mapping[int, AdapterHandle]:
        """Adapters that steps can use now, by slot."""
        with self._lock:
            return dict(self._resident)

    def _count(self, **more: int) -> None:
        with self._lock:
            found = {name: getattr(self.counters, name) + n for name, n in more.items()}
            self.counters = replace(self.counters, **found)

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not balance; with the loader at rest."""
        for slot, handle in self._resident.items():
            assert handle.slot == slot
            assert handle.adapter is self._slots.adapter(slot), "resident without its host copy"
        if self._pool is not None:
            runs = [handle.run for handle in self._resident.values() if handle.run is not None]
            assert sum(run.count for run in runs) == self._pool.adapter, "a run is nobody's"
        self._host.check_integrity()
