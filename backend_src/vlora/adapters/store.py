"""Adapter store: the adapters of a server in three tiers, folders → host memory → page pool.

Other threads read folders, read weights and pack them; `apply` turns their results into transitions
of handles on the engine's thread, which owns all state (decision 47).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from vlora.adapters.catalog import (
    AdapterNames,
    FolderFailed,
    FolderRead,
    FolderReader,
    FolderRemoved,
    FolderResult,
    NameTable,
    error_of,
    stamp_of,
    stamps_of,
)
from vlora.adapters.errors import (
    MAX_ATTEMPTS,
    ErrorFactory,
    as_adapter_error,
    as_text,
    is_transient,
)
from vlora.adapters.files import MAX_ADAPTER_BYTES, Adapter, AdapterInfo, read_adapter
from vlora.adapters.handle import COPIED, AdapterHandle, AdapterState
from vlora.adapters.model_shape import ModelShape
from vlora.adapters.residency import AdapterTiers
from vlora.device.device import HOST, Device
from vlora.ids import BASE
from vlora.memory.pool import PageMemory, PagePool
from vlora.metrics import LoadedAdapter

log = logging.getLogger(__name__)

T = TypeVar("T")

# Maximum number of adapters that are loaded or packed at the same time. The adapters of older
# requests go first.
MAX_PREFETCHED = 8

# Maximum packed bytes of the adapters that one call of `advance` packs on the engine's thread. On
# the packer's thread, packing waits for the GIL once per group of matrices. For small adapters,
# this wait would delay the requests by some steps (decision 47). If steps run on a GPU, all
# adapters are packed on the packer's thread, because packing may wait for earlier copies to the
# GPU.
INLINE_PACK_BYTES = 4 << 20


class Workers:
    """Two threads, and the queue of the results of these and other threads.

    The loader reads files and the packer packs weights into pages, so that adapters in memory do
    not wait for the disk. Any thread may call `post` and read `pending`; the rest belongs to the
    engine's thread. `on_post` is called after each `post`, on the thread that posts.
    """

    def __init__(self) -> None:
        self.on_post: Callable[[], None] = lambda: None
        self._results: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._unfinished = 0
        self.loader = ThreadPoolExecutor(1, "adapter-loader")
        self.packer = ThreadPoolExecutor(1, "adapter-packer")
        for thread in (self.loader, self.packer):
            # This starts the thread, which may fail later, when the process has too many.
            thread.submit(lambda: None)

    def submit(
        self,
        thread: Executor,
        job: Callable[[], T],
        done: Callable[[T], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Run a job on the loader or the packer. Then the engine's thread calls `done` with its
        result, or `failed` with its exception.
        """

        def run() -> None:
            try:
                apply = partial(done, job())
            except BaseException as error:  # A panic of a Rust library is not an Exception.
                apply = partial(failed, error)
            self.post(partial(self._finish_job, apply))

        self._unfinished += 1
        thread.submit(run)

    def _finish_job(self, apply: Callable[[], None]) -> None:
        self._unfinished -= 1
        apply()

    def post(self, apply: Callable[[], None]) -> None:
        self._results.put(apply)
        self.on_post()

    @property
    def pending(self) -> bool:
        """True if there are results to apply."""
        return not self._results.empty()

    @property
    def busy(self) -> bool:
        """True if there are jobs whose results have not been applied."""
        return self._unfinished > 0

    def apply(self) -> None:
        while self.pending:
            self._results.get()()

    def finish(self) -> None:
        while self.busy:
            self._results.get()()

    def close(self) -> None:
        """Wait until the jobs end. Their results are not applied."""
        self.loader.shutdown()
        self.packer.shutdown()


class AdapterStore:
    """Adapters by name, and the tier that holds the weights of each.

    `names`, `table`, `handle`, `info`, `route`, `pinned`, `resident` and `loaded` may be called
    from any thread. Everything else belongs to the engine's thread.

    max_bytes: maximum size of one adapter's weights in fp32.
    dtype: dtype of the packed copies.
    host_bytes: maximum size of the host copies that may be evicted; None for no limit.
    device: device whose steps use the adapters.
    pinned: names of adapters that are loaded without requests, and never evicted.
    max_pinned_pages: maximum number of pages of these adapters together.
    """

    def __init__(
        self,
        model: ModelShape,
        max_bytes: int = MAX_ADAPTER_BYTES,
        dtype: torch.dtype = torch.float32,
        host_bytes: int | None = None,
        device: Device = HOST,
        pinned: Sequence[str] = (),
    ) -> None:
        self._pinned = dict.fromkeys(pinned)
        self.max_pinned_pages: float = math.inf
        self._attached = False
        self._names = AdapterNames()
        self.tiers = AdapterTiers(model, dtype, host_bytes, device)
        self.slots = self.tiers.slots
        self.workers = Workers()
        self.folders = FolderReader(model, max_bytes, self._allowed_bytes, self._post_folders)
        self._packs_inline = device.in_host_memory
        self._inline_bytes_left = 0
        # The last result of `loaded`, and the state of the tiers at that time.
        self._loaded: tuple[tuple[Any, ...], Sequence[LoadedAdapter]] = ((), ())
        # Size of all weights that the engine's thread has received from `folders` so far.
        self._taken_bytes = 0

    def load(self, folders: Mapping[str, Path]) -> None:
        """Read each named folder, in order of name. A failure is an error of that adapter only.

        Of adapters whose weights do not fit the host budget, only the declarations are read.
        """
        stamps = stamps_of([os.fsencode(folder) for folder in folders.values()])
        versions = zip(folders.values(), stamps, strict=True)
        self.folders.update(dict(zip(folders, versions, strict=True)))
        self.apply()

    def attach(self, pool: PagePool, memory: PageMemory, pages: int) -> None:
        """Store packed copies in the pool's pages from now on. Load the pinned adapters, and pack
        them and others that are in memory into at most `pages` pages. All groups must have been
        created.
        """
        self.tiers.attach(pool, memory)
        self._attached = True
        self.finish()
        pages -= pool.adapter
        for handle in self.table.current.values():
            if handle.state is AdapterState.IN_MEMORY:
                needed = self.tiers.pages_of(handle)
                if needed <= min(pages, pool.free) and self._pack(handle, between_steps=False):
                    pages -= needed
        self.finish()

    # -- names, for any thread -------------------------------------------------------------------

    @property
    def table(self) -> NameTable:
        """Table that maps each name to its handle or its error. It is immutable."""
        return self._names.table

    def names(self) -> tuple[str, ...]:
        return self.table.names

    def handle(self, name: str) -> AdapterHandle:
        """Return the present version of an adapter. Raises the errors of `NameTable.handle`."""
        return self.table.handle(name)

    def info(self, name: str) -> AdapterInfo:
        """Return the description of an adapter. Raises the errors of `handle`."""
        return self.handle(name).info

    def route(self, task: str, question: str) -> str | None:
        """Return the adapter whose skills fit a request best, or None if no skill fits."""
        table = self.table
        return table.router.choose(task, question, lambda name: table.current[name].resident)

    def slot(self, name: str | None) -> int:
        """Return the slot of a resident adapter; BASE if `name` is None. Raises the errors of
        `handle`, and ValueError if the adapter is not resident.
        """
        if name is None:
            return BASE
        handle = self.handle(name)
        if not handle.resident or handle.slot is None:
            raise ValueError(f"adapter '{name}' is not resident")
        return handle.slot

    @property
    def pinned(self) -> list[AdapterHandle]:
        """Present versions of the pinned adapters that can be loaded and are not too large."""
        current = self.table.current
        found = (current.get(name) for name in self._pinned)
        return [handle for handle in found if handle is not None and handle.stays_loaded]

    @property
    def resident(self) -> Mapping[int, AdapterHandle]:
        return self.tiers.residents.by_slot

    def loaded(self) -> Sequence[LoadedAdapter]:
        """Return the adapters whose present version is in the pool, or only in host memory.

        Those that are least likely to be evicted come first.
        """
        done = self.tiers.counters
        now = (done.loads, done.packs, done.evictions, done.host_evictions, self.table)
        if now != self._loaded[0]:  # With thousands of adapters, a list takes milliseconds.
            present = (h for h in self.tiers.host.handles if not h.retired and h.state in COPIED)
            kept = sorted(present, key=lambda h: (not h.resident, not h.stays_loaded, -h.last_used))
            self._loaded = now, [_as_loaded(handle) for handle in kept]
        return self._loaded[1]

    # -- results of other threads ----------------------------------------------------------------

    def apply(self) -> None:
        """Apply the results of reading, loading and packing that other threads have posted."""
        self.workers.apply()
        self.tiers.drop_obsolete()
        self._names.publish()
        if self._attached and self._pinned:
            self._load_pinned()

    def finish(self) -> None:
        """Wait until all requested adapters are loaded and packed, and apply all results."""
        self.apply()
        while self.loading:
            self.workers.finish()
            self.apply()

    @property
    def loading(self) -> bool:
        return self.workers.busy

    def close(self) -> None:
        """Wait for the workers, without applying their results."""
        self.workers.close()

    def _allowed_bytes(self) -> float:
        # The engine's thread first lowers `free_bytes` and then raises `_taken_bytes`. The folder
        # reader reads them in the opposite order, so its sum is never too large.
        return self._taken_bytes + self.tiers.host.free_bytes

    def _post_folders(self, results: Sequence[FolderResult]) -> None:
        self.workers.post(partial(self._apply_folders, results))

    def _apply_folders(self, results: Sequence[FolderResult]) -> None:
        for result in results:
            self._apply_folder(result)

    def _apply_folder(self, result: FolderResult) -> None:
        match result:
            case FolderRead(handle, adapter):
                handle.stays_loaded = self._may_stay(handle)
                self.tiers.retire(self._names.set(handle.name, handle))
                if not handle.description.ranks.keys() <= self.slots.matrices:
                    self.slots.matrices |= handle.description.ranks.keys()
                if adapter is not None:
                    size = handle.description.host_bytes
                    if self.tiers.host.free_bytes >= size:
                        self.tiers.host.add(handle, adapter)
                    self._taken_bytes += size
            case FolderFailed(name, error, transient):
                # If the new version cannot be read for the moment, the old one continues to serve.
                if not transient or self._names.current(name) is None:
                    self.tiers.retire(self._names.set(name, error))
            case FolderRemoved(name):
                self.tiers.retire(self._names.set(name, None))

    def _may_stay(self, handle: AdapterHandle) -> bool:
        """Return whether a new version is pinned, and is small enough to stay in the pool."""
        if handle.name not in self._pinned or not self._attached:
            return handle.name in self._pinned
        others = sum(self.tiers.pages_of(h) for h in self.pinned if h.name != handle.name)
        fits = others + self.tiers.pages_of(handle) <= self.max_pinned_pages
        if not fits:
            log.warning(
                "adapter '%s' is too large to stay pinned: all pinned ones may have %d pages;"
                " requests load it",
                as_text(handle.name),
                self.max_pinned_pages,
            )
        return fits

    # -- loading and packing ---------------------------------------------------------------------

    def _load_pinned(self) -> None:
        now = self.folders.clock()
        for handle in self.pinned:
            if handle.may_begin(now) and handle.state is AdapterState.ON_DISK:
                self._load(handle)
            elif handle.may_begin(now) and handle.state is AdapterState.IN_MEMORY:
                self._pack(handle, between_steps=False)

    def advance(self, wanted: Sequence[AdapterHandle], running: int = 0) -> AdapterHandle | None:
        """Apply all results. Then begin to load and pack the adapters that waiting requests need,
        as far as memory and pages allow. Return the first one in memory that lacks pages, or None.

        The adapter of an older request is never evicted for that of a newer request.

        wanted: adapters of waiting requests, in order of arrival.
        running: number of running requests, each of which will need another page.
        """
        self.apply()
        blocked = self._begin(wanted, running)
        self.slots.sweep()
        for handle in reversed(wanted):
            handle.last_used = self.tiers.pool.tick()
        self._names.publish()
        return blocked

    def _begin(self, wanted: Sequence[AdapterHandle], running: int) -> AdapterHandle | None:
        tiers, now = self.tiers, self.folders.clock()
        self._inline_bytes_left = INLINE_PACK_BYTES
        blocked: AdapterHandle | None = None
        missing, host_bytes_left = 0, 0.0
        for handle in wanted:
            if handle.may_begin(now):
                if not missing:
                    host_bytes_left = tiers.host.available_bytes
                missing += 1
                host_bytes_left -= handle.description.host_bytes
                # More copies than fit the host's budget would evict each other before packing.
                prefetch = missing == 1 or (missing <= MAX_PREFETCHED and host_bytes_left >= 0)
                if handle.state is AdapterState.ON_DISK and prefetch:
                    self._load(handle)
                # A newer adapter must not take the pages that an older one waits for.
                elif handle.state is AdapterState.IN_MEMORY and blocked is None:
                    blocked = self._reserve_and_pack(handle, running)
            tiers.residents.needed.add(handle)
        tiers.residents.needed.clear()
        return blocked

    def _load(self, handle: AdapterHandle) -> None:
        handle.enter(AdapterState.LOADING)
        self.workers.submit(
            self.workers.loader,
            partial(_read_weights, handle),
            partial(self._keep, handle, time.monotonic()),
            partial(self._fail, handle),
        )

    def _keep(self, handle: AdapterHandle, started: float, adapter: Adapter) -> None:
        seconds = time.monotonic() - started
        if handle.obsolete:
            handle.enter(AdapterState.ON_DISK)
        elif handle.info.digest not in ("", adapter.info.digest):
            invalid = ErrorFactory(handle.name, str(handle.folder))
            self._fail(handle, invalid("holds other weights than when it was first read"))
        else:
            self.tiers.keep(handle, adapter)
        self.tiers.count_load(seconds)  # Counts change after states, by which `loaded` sees both.

    def _reserve_and_pack(self, handle: AdapterHandle, running: int) -> AdapterHandle | None:
        size = self.tiers.packed_bytes(handle)
        between_steps = self._packs_inline and size <= self._inline_bytes_left
        if not self._pack(handle, running, between_steps=between_steps):
            return handle
        if between_steps:
            self._inline_bytes_left -= size
        return None

    def _pack(self, handle: AdapterHandle, running: int = 0, *, between_steps: bool) -> bool:
        failed = partial(self._fail, handle)

        def submit(job: Callable[[], None], done: Callable[[None], None]) -> None:
            if not between_steps:
                self.workers.submit(self.workers.packer, job, done, failed)
                return
            try:
                job()
            except Exception as error:
                failed(error)
            else:
                done(None)

        return self.tiers.pack(handle, submit, running)

    def _fail(self, handle: AdapterHandle, error: BaseException) -> None:
        transient = is_transient(error)
        if transient:  # The cause lies outside the adapter's files.
            handle.backoff.failed(self.folders.clock())
            if handle.backoff.attempts < MAX_ATTEMPTS:
                log.warning("loading adapter '%s' is tried again: %s", as_text(handle.name), error)
                self.tiers.undo(handle)
                return
        reason = as_adapter_error(handle.name, handle.folder, error).copy()
        self.tiers.fail(handle, reason)
        if self._names.current(handle.name) is handle:
            log.warning("%s", reason)
            self.tiers.retire(self._names.set(handle.name, reason))
            if transient:
                self.folders.read_again(handle.name)

    def check_integrity(self) -> None:
        """Raise AssertionError if the tiers are inconsistent. The workers must be idle."""
        self.tiers.check_integrity()


def _as_loaded(handle: AdapterHandle) -> LoadedAdapter:
    rank = max(handle.info.ranks, default=0)
    return LoadedAdapter(handle.name, handle.resident, handle.stays_loaded, rank)


def _read_weights(handle: AdapterHandle) -> Adapter:
    adapter = read_adapter(handle.folder, handle.description)
    stamp = stamp_of(handle.folder)
    if stamp != handle.stamp:
        invalid = ErrorFactory(handle.name, str(handle.folder))
        raise invalid("has changed while it was being loaded") from error_of(stamp)
    return adapter
