"""Adapter store: the adapters of a server in three tiers, folders → host memory → page pool.

The files of every known adapter are checked and described. The host tier holds the weights of as
many adapters as its byte budget allows. The page pool holds packed copies of as many as fit. An
adapter in the pool is *resident*: it has a slot of the LoRA operator, so steps can use it. A
request whose adapter is not resident waits in the scheduler. An adapter that cannot be loaded is an
error for its own requests only.

All state belongs to the engine's thread. Other threads read folders, read weights and pack them;
they return results, which `apply` turns into transitions of handles (decision 74).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from vlora.atmm.groups import HeadGroup, LoraGroup
from vlora.errors import InvalidArgument
from vlora.ids import BASE, MatrixId
from vlora.lora.adapter import MAX_ADAPTER_BYTES, Adapter, AdapterInfo
from vlora.lora.folder_reader import (
    FolderFailed,
    FolderRead,
    FolderReader,
    FolderRemoved,
    FolderResult,
)
from vlora.lora.folders import stamp_of
from vlora.lora.handle import AdapterHandle, AdapterState, Stamp
from vlora.lora.loads import AdapterLoads
from vlora.lora.model_shape import ModelShape
from vlora.lora.names import AdapterNames, NameTable
from vlora.lora.tiers import AdapterTiers
from vlora.lora.workers import Results
from vlora.memory.device import HOST, Device
from vlora.memory.pool import PageMemory, PagePool
from vlora.metrics import TierCounters

log = logging.getLogger(__name__)


class AdapterStore:
    """Adapters by name, and the tier that holds the weights of each.

    Names, `resident` and the counts may be read from any thread. `update` and `retry` belong to the
    thread that watches the folders. Everything else belongs to the engine's thread.
    """

    def __init__(
        self,
        model: ModelShape,
        max_bytes: int = MAX_ADAPTER_BYTES,
        dtype: torch.dtype = torch.float32,
        host_bytes: int | None = None,
        device: Device = HOST,
    ) -> None:
        """Create a store without adapters.

        max_bytes: maximum size of one adapter's weights in fp32.
        dtype: dtype of the packed copies.
        host_bytes: maximum size of the host copies that may be evicted; None for no limit.
        device: device whose steps use the adapters.
        """
        self._names = AdapterNames()
        self._tiers = AdapterTiers(
            model, dtype, host_bytes, lambda *evicted: self.on_evict(*evicted), device
        )
        self._results = Results(lambda: self.on_change())
        self._loads = AdapterLoads(
            self._tiers,
            self._results,
            model.hidden,
            lambda: self.clock(),
            self._give_up,
            packs_inline=device.in_host_memory,
        )
        self._reader = FolderReader(
            model,
            max_bytes,
            # The engine's thread first lowers `free_bytes` and then raises `_taken_bytes`. The
            # folder reader reads them in the opposite order, so its sum is never too large.
            allowed_bytes=lambda: self._taken_bytes + self._tiers.host.free_bytes,
            report=lambda result: self._results.post(partial(self._apply_folder, result)),
            clock=lambda: self.clock(),
        )
        self._taken_bytes = 0
        """Size in bytes of all weights that the engine's thread has received from the folder reader
        so far.
        """
        self.matrices: frozenset[MatrixId] = frozenset()
        """Matrices that any adapter seen so far changes. The set is replaced when it grows."""
        self.clock: Callable[[], float] = time.monotonic
        self.on_change: Callable[[], None] = lambda: None
        """Function that is called after a result for `apply` was posted, on the thread that posted
        the result.
        """
        self.on_evict: Callable[[int, AdapterHandle], None] = lambda slot, handle: None
        """Function that is called with slot and handle before a resident adapter is evicted."""

    def load(self, folders: Mapping[str, Path], *, make_resident: bool = True) -> None:
        """Read each named folder, in order of name. A failure is an error of that adapter only.

        Weights are read as long as they fit into the host budget. Of the other adapters, only the
        declarations are read.

        make_resident: whether to also pack each adapter into a slot, in memory that the compiled
            core allocates. Use it only without a page pool.
        """
        self.update({name: (folder, stamp_of(folder)) for name, folder in folders.items()})
        self.apply()
        if make_resident:
            for handle in self._loaded():
                self._tiers.take_slot(handle)
                self._loads.pack(handle, between_steps=True)
            self.apply()

    def _loaded(self) -> list[AdapterHandle]:
        handles = self._names.table.current.values()
        return [handle for handle in handles if handle.state is AdapterState.IN_MEMORY]

    # -- names, for any thread -------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of adapters that requests can use."""
        return len(self._names.table.current)

    @property
    def table(self) -> NameTable:
        """Table that maps each name to its handle or its error. It is immutable."""
        return self._names.table

    def names(self) -> tuple[str, ...]:
        """Return the sorted names of the adapters that requests can use."""
        return self._names.table.names

    @property
    def broken(self) -> Mapping[str, InvalidArgument]:
        """Errors of the adapters that cannot be loaded, by name of the adapter. Immutable."""
        return self._names.table.broken

    def handle(self, name: str) -> AdapterHandle:
        """Return the present version of an adapter.

        Raises NotFound, which lists known names, or InvalidArgument if the adapter cannot be
        loaded.
        """
        return self._names.table.handle(name)

    def info(self, name: str) -> AdapterInfo:
        """Return the description of an adapter. Raises the errors of `handle`."""
        return self.handle(name).info

    def route(self, task: str, question: str) -> str | None:
        """Return the adapter whose skills fit a request best, or None if no skill fits.

        task, question: task and text of the request.
        """
        table = self._names.table
        return table.router.choose(task, question, lambda name: table.current[name].resident)

    # -- folders, for the thread that watches them -----------------------------------------------

    def update(self, folders: Mapping[str, tuple[Path, Stamp]]) -> None:
        """Read folders as `FolderReader.update` does; `apply` makes the results available.

        Requests that have started finish with the version that they started with.
        """
        self._reader.update(folders)

    def retry(self) -> None:
        """Read folders again as `FolderReader.retry` does; `apply` makes the results available."""
        self._reader.retry()

    @property
    def stamps(self) -> Mapping[str, tuple[Path, Stamp]]:
        """Folder of each adapter, and its stamp when it was last read. The mapping is immutable."""
        return self._reader.stamps

    # -- results of other threads ----------------------------------------------------------------

    @property
    def has_results(self) -> bool:
        """True if there are results to `apply`. May be read from any thread."""
        return self._results.pending

    def apply(self) -> None:
        """Apply the results of reading, loading and packing that other threads have posted."""
        self._results.apply()
        self._tiers.drop_obsolete()
        self._names.publish()

    def finish(self) -> None:
        """Wait until all requested adapters are loaded and packed, and apply all results."""
        self._loads.finish()
        self.apply()

    @property
    def loading(self) -> bool:
        """True if an adapter is being loaded or packed."""
        return self._loads.busy

    def close(self) -> None:
        self._loads.close()

    def _apply_folder(self, result: FolderResult) -> None:
        match result:
            case FolderRead(handle, adapter):
                self._tiers.retire(self._names.set(handle))
                if not handle.description.ranks.keys() <= self.matrices:
                    self.matrices |= handle.description.ranks.keys()
                if adapter is not None:
                    size = handle.description.host_bytes
                    if self._tiers.host.free_bytes >= size:
                        self._tiers.host.add(handle, adapter)
                    self._taken_bytes += size
            case FolderFailed(name, error, transient):
                log.warning("%s", error)
                # If the new version cannot be read for the moment, the old one continues to serve.
                if not (transient and name in self._names):
                    self._tiers.retire(self._names.set_broken(name, error))
            case FolderRemoved(name):
                self._tiers.retire(self._names.remove(name))

    def _give_up(self, handle: AdapterHandle, error: InvalidArgument, transient: bool) -> None:
        """Mark an adapter as broken, unless its name refers to a newer version by now."""
        if self._names.is_current(handle):
            log.warning("%s", error)
            self._tiers.retire(self._names.set_broken(handle.name, error))
            if transient:
                self._reader.read_again(handle.name)

    # -- used by steps ---------------------------------------------------------------------------

    def group(self, matrices: Sequence[MatrixId]) -> LoraGroup:
        """Return the group of these matrices, which must share their input.

        The group holds A and B of every resident adapter, by slot.
        """
        return self._tiers.slots.group(matrices)

    @property
    def heads(self) -> HeadGroup:
        """Vision task heads by slot."""
        return self._tiers.slots.heads

    def adapter(self, slot: int) -> Adapter:
        return self._tiers.slots.adapter(slot)

    def slot(self, name: str | None) -> int:
        """Return the slot of a resident adapter; BASE if `name` is None.

        Raises the errors of `handle`, and ValueError if the adapter is not resident.
        """
        if name is None:
            return BASE
        handle = self.handle(name)
        if not handle.resident or handle.slot is None:
            raise ValueError(f"adapter '{name}' is not resident")
        return handle.slot

    @property
    def resident(self) -> Mapping[int, AdapterHandle]:
        """Resident adapters by slot."""
        return self._tiers.residents.by_slot

    @property
    def host_bytes(self) -> int:
        """Size of the host copies in bytes."""
        return self._tiers.host.used_bytes

    @property
    def counters(self) -> TierCounters:
        return self._tiers.counters

    @property
    def protected_slot(self) -> int:
        """Slot whose adapter is not evicted because it is live in the next step; BASE for none."""
        return self._tiers.residents.protected_slot

    @protected_slot.setter
    def protected_slot(self, slot: int) -> None:
        self._tiers.residents.protected_slot = slot

    def pages_of(self, handle: AdapterHandle) -> int:
        """Return the number of contiguous pages that the adapter needs; 0 without a pool."""
        return self._tiers.pages_of(handle)

    def packed_bytes(self, handle: AdapterHandle) -> int:
        """Return the size in bytes of the adapter's packed copies."""
        return self._tiers.packed_bytes(handle)

    def bytes_of(self, ranks: Mapping[MatrixId, int]) -> int:
        """Return the size in bytes of the packed copies of an adapter with these ranks.

        All groups must have been created.
        """
        return self._tiers.bytes_of(ranks)

    # -- loading and packing ---------------------------------------------------------------------

    def attach(self, pool: PagePool, memory: PageMemory, pages: int) -> None:
        """Store packed copies in the pool's pages from now on, and pack adapters that are in
        memory.

        All groups must have been created.

        pages: maximum number of pages to pack into now.
        """
        self._tiers.attach(pool, memory)
        for handle in self._loaded():
            needed = self.pages_of(handle)
            if needed <= min(pages, pool.free) and self._tiers.reserve(handle, 0):
                pages -= needed
                self._loads.pack(handle, between_steps=False)
        self.finish()

    def advance(self, wanted: Sequence[AdapterHandle], running: int = 0) -> AdapterHandle | None:
        """Apply all results, then load and pack what waiting requests need.

        Arguments and result are those of `AdapterLoads.advance`.
        """
        self.apply()
        blocked = self._loads.advance(wanted, running)
        self._names.publish()
        return blocked

    def count_request(self, handle: AdapterHandle) -> None:
        """Count a queued request by the tier that its adapter is in."""
        if handle.resident:
            self._tiers.count(hits=1)
        elif handle.adapter is not None:
            self._tiers.count(host_hits=1)
        else:
            self._tiers.count(misses=1)

    def check_integrity(self) -> None:
        """Raise AssertionError if slots, host copies or runs are inconsistent.

        Call it only while the workers are idle.
        """
        self._tiers.check_integrity()
