"""Adapter store: the adapters of a server in three tiers, folders → host memory → page pool.

Every adapter is described from its files. The host tier holds the weights of as many as its byte
budget allows, and the page pool the packed copies of as many as fit; these are resident, in slots
of the operator, where steps use them. A request whose adapter is not resident waits in the
scheduler. An adapter that cannot be loaded is an error for its own requests only.

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
from vlora.lora.handle import AdapterHandle, Stamp, State
from vlora.lora.loads import AdapterLoads
from vlora.lora.model_shape import ModelShape
from vlora.lora.names import AdapterNames
from vlora.lora.tiers import AdapterTiers
from vlora.lora.workers import Results
from vlora.memory.pool import PageMemory, PagePool
from vlora.metrics import TierCounters

log = logging.getLogger(__name__)


class AdapterStore:
    """Adapters by name, and the tier that each one's weights are in.

    Names, `resident`, and counts may be read from any thread. `update` and `retry` belong to the
    thread that watches the folders, and everything else to the engine's.
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
        dtype, host_bytes: as of `AdapterTiers`.
        """
        self._names = AdapterNames()
        self._tiers = AdapterTiers(
            model, dtype, host_bytes, lambda *evicted: self.on_evict(*evicted)
        )
        self._results = Results(lambda: self.on_change())
        self._loads = AdapterLoads(
            self._tiers, self._results, model.hidden, lambda: self.clock(), self._give_up
        )
        self._reader = FolderReader(
            model,
            max_bytes,
            # Read in the opposite order of their changes: never too much, on any thread.
            allowed_bytes=lambda: self._taken_bytes + self._tiers.host.free_bytes,
            report=lambda result: self._results.post(partial(self._apply_folder, result)),
            clock=lambda: self.clock(),
        )
        self._taken_bytes = 0
        """Size of all weights that the reader of folders has handed over so far."""
        self.matrices: frozenset[MatrixId] = frozenset()
        """Matrices that any adapter seen so far changes; replaced as a whole when it grows."""
        self.clock: Callable[[], float] = time.monotonic
        self.on_change: Callable[[], None] = lambda: None
        """Called when another thread has a result to `apply`, on that thread."""
        self.on_evict: Callable[[int, AdapterHandle], None] = lambda slot, handle: None
        """Called before a slot's adapter is evicted."""

    def load(self, folders: Mapping[str, Path], *, make_resident: bool = True) -> None:
        """Read each named folder, in order of name: with its weights while the host's budget lasts,
        otherwise its declarations only. Any failure is an error of that adapter only.

        make_resident: also pack each adapter into a slot, in memory that the compiled core
            allocates; for a store without a pool.
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
        return [handle for handle in handles if handle.state is State.IN_MEMORY]

    # -- names, for any thread -------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of adapters that requests can use."""
        return len(self._names.table.current)

    def names(self) -> tuple[str, ...]:
        """Return the names of the adapters that requests can use, in order."""
        return self._names.table.names

    @property
    def broken(self) -> Mapping[str, InvalidArgument]:
        """Adapters that exist but do not load, with the error of each. Never changes."""
        return self._names.table.broken

    def handle(self, name: str) -> AdapterHandle:
        """Return the present version. Raise NotFound, which lists the known names, or the
        InvalidArgument of an adapter that does not load."""
        return self._names.table.handle(name)

    def info(self, name: str) -> AdapterInfo:
        """Return the description of an adapter. Raise as `handle` does."""
        return self.handle(name).info

    # -- folders, for the thread that watches them -----------------------------------------------

    def update(self, folders: Mapping[str, tuple[Path, Stamp]]) -> None:
        """Read folders as `FolderReader.update` does; `apply` makes the result available.

        Requests that have started finish with the version that they started with.
        """
        self._reader.update(folders)

    def retry(self) -> None:
        """Read folders as `FolderReader.retry` does; `apply` makes the result available."""
        self._reader.retry()

    @property
    def stamps(self) -> Mapping[str, tuple[Path, Stamp]]:
        """Folder and stamp of each name, as last read. Never changes."""
        return self._reader.stamps

    # -- results of other threads ----------------------------------------------------------------

    @property
    def has_results(self) -> bool:
        """True if there are results to `apply`; safe from any thread."""
        return self._results.pending

    def apply(self) -> None:
        """Apply the results of reading folders, loading and packing that have come so far."""
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
                # A version that serves stays if the new one cannot be read for now.
                if not (transient and name in self._names):
                    self._tiers.retire(self._names.set_broken(name, error))
            case FolderRemoved(name):
                self._tiers.retire(self._names.remove(name))

    def _give_up(self, handle: AdapterHandle, error: InvalidArgument, transient: bool) -> None:
        """Make the error of a version that of its name, if the name still means this version."""
        if self._names.is_current(handle):
            log.warning("%s", error)
            self._tiers.retire(self._names.set_broken(handle.name, error))
            if transient:
                self._reader.read_again(handle.name)

    # -- used by steps ---------------------------------------------------------------------------

    def group(self, matrices: Sequence[MatrixId]) -> LoraGroup:
        """Return the present and future pairs of matrices that share their input, by slot."""
        return self._tiers.slots.group(matrices)

    @property
    def heads(self) -> HeadGroup:
        """Vision task heads by slot."""
        return self._tiers.slots.heads

    def adapter(self, slot: int) -> Adapter:
        return self._tiers.slots.adapter(slot)

    def slot(self, name: str | None) -> int:
        """Return the slot of a resident adapter, `BASE` for None. Raise as `handle` does, and
        ValueError if the adapter is not resident."""
        if name is None:
            return BASE
        handle = self.handle(name)
        if not handle.resident or handle.slot is None:
            raise ValueError(f"adapter '{name}' is not resident")
        return handle.slot

    @property
    def resident(self) -> Mapping[int, AdapterHandle]:
        """Adapters that steps can use now, by slot."""
        return self._tiers.residents.by_slot

    @property
    def host_bytes(self) -> int:
        """Size of the host copies."""
        return self._tiers.host.used_bytes

    @property
    def counters(self) -> TierCounters:
        return self._tiers.counters

    @property
    def protected_slot(self) -> int:
        """Slot that is never evicted: that of the adapter merged in the next step."""
        return self._tiers.residents.protected_slot

    @protected_slot.setter
    def protected_slot(self, slot: int) -> None:
        self._tiers.residents.protected_slot = slot

    def pages_of(self, handle: AdapterHandle) -> int:
        """Return the number of pages of the adapter's run; 0 without a pool."""
        return self._tiers.pages_of(handle)

    def packed_bytes(self, handle: AdapterHandle) -> int:
        """Return the size of the adapter's packed copies."""
        return self._tiers.packed_bytes(handle)

    def bytes_of(self, ranks: Mapping[MatrixId, int]) -> int:
        """Return the size of the packed copies of an adapter with these ranks; all groups must have
        been created."""
        return self._tiers.bytes_of(ranks)

    # -- loading and packing ---------------------------------------------------------------------

    def attach(self, pool: PagePool, memory: PageMemory, pages: int) -> None:
        """Keep packed copies in the pool's pages from now on, and pack the loaded adapters as far
        as `pages` pages go. All groups must have been created."""
        self._tiers.attach(pool, memory)
        for handle in self._loaded():
            needed = self.pages_of(handle)
            if needed <= min(pages, pool.free) and self._tiers.reserve(handle, 0):
                pages -= needed
                self._loads.pack(handle, between_steps=False)
        self.finish()

    def advance(self, wanted: Sequence[AdapterHandle], running: int = 0) -> AdapterHandle | None:
        """Apply all results, and load and pack what waiting requests need; see
        `AdapterLoads.advance`."""
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
        """Raise AssertionError if slots, host copies or runs disagree; call it while the workers
        are idle."""
        self._tiers.check_integrity()
