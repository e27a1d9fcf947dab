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
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

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
)
from vlora.adapters.errors import (
    MAX_ATTEMPTS,
    ErrorFactory,
    as_adapter_error,
    as_text,
    is_transient,
)
from vlora.adapters.files import MAX_ADAPTER_BYTES, Adapter, AdapterInfo, read_adapter
from vlora.adapters.handle import AdapterHandle, AdapterState, Stamp
from vlora.adapters.model_shape import ModelShape
from vlora.adapters.residency import AdapterTiers
from vlora.atmm.groups import HeadGroup, LoraGroup
from vlora.device.device import HOST, Device
from vlora.errors import InvalidArgument
from vlora.ids import BASE, MatrixId
from vlora.memory.pool import PageMemory, PagePool
from vlora.metrics import TierCounters

# Threads that load and pack adapters, and the queue that carries results to the engine's thread.
#
# One thread reads files and another packs weights into pages, so that adapters in memory do not
# wait for the disk. The threads change no shared state. The engine's thread applies their results
# in the order in which they arrive. This module does not depend on adapters.


T = TypeVar("T")

Failed = Callable[[BaseException], None]
"""Function that is called with the exception of a job."""


class Results:
    """Queue of results of other threads.

    Any thread may call `post`. Only one thread may call `apply` and `apply_next`.
    """

    def __init__(self, on_post: Callable[[], None]) -> None:
        """Create an empty queue.

        on_post: called after each `post`, on the thread that posts.
        """
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._on_post = on_post

    def post(self, apply: Callable[[], None]) -> None:
        """Queue a function that applies a result. The thread that calls `Results.apply` or
        `apply_next` runs the function.
        """
        self._queue.put(apply)
        self._on_post()

    @property
    def pending(self) -> bool:
        """True if there are results to apply."""
        return not self._queue.empty()

    def apply(self) -> None:
        """Apply all results that are queued."""
        while self.pending:
            self._queue.get()()

    def apply_next(self) -> None:
        """Wait for a result and apply it."""
        self._queue.get()()


class Workers:
    """Two threads, the loader and the packer. Each runs its jobs in the order of submission.

    A job is a function that returns a result. When it ends, the engine's thread calls `done` with
    the result or `failed` with the exception. Only the engine's thread submits jobs.
    """

    def __init__(self, results: Results) -> None:
        self._results = results
        self._loader = ThreadPoolExecutor(1, "adapter-loader")
        self._packer = ThreadPoolExecutor(1, "adapter-packer")
        for thread in (self._loader, self._packer):
            # This starts the thread, which may fail later, when the process has too many.
            thread.submit(lambda: None)
        self._unfinished = 0

    def load(self, job: Callable[[], T], done: Callable[[T], None], failed: Failed) -> None:
        """Run a job on the loader's thread."""
        self._submit(self._loader, job, done, failed)

    def pack(self, job: Callable[[], T], done: Callable[[T], None], failed: Failed) -> None:
        """Run a job on the packer's thread."""
        self._submit(self._packer, job, done, failed)

    def _submit(
        self,
        thread: Executor,
        job: Callable[[], T],
        done: Callable[[T], None],
        failed: Failed,
    ) -> None:
        def run() -> None:
            try:
                apply = partial(done, job())
            except BaseException as error:  # A panic of a Rust library is not an Exception.
                apply = partial(failed, error)
            self._results.post(partial(self._finish_job, apply))

        self._unfinished += 1
        thread.submit(run)

    def _finish_job(self, apply: Callable[[], None]) -> None:
        self._unfinished -= 1
        apply()

    @property
    def busy(self) -> bool:
        """True if there are jobs whose results have not been applied."""
        return self._unfinished > 0

    def finish(self) -> None:
        """Wait for the results of all jobs submitted so far, and apply them."""
        while self.busy:
            self._results.apply_next()

    def close(self) -> None:
        """Wait until the jobs end. Their results are not applied."""
        for thread in (self._loader, self._packer):
            thread.shutdown()


# Loading and packing of the adapters that waiting requests need.
#
# This module decides what is loaded and packed next. Two worker threads load and pack. All state
# belongs to the engine's thread, which applies the results of the workers to the tiers.


log = logging.getLogger(__name__)

MAX_PREFETCHED = 8
"""Maximum number of adapters that are loaded or packed at the same time.

The adapters of older requests go first.
"""

INLINE_PACK_BYTES = 4 << 20
"""Maximum packed bytes of the adapters that one call of `advance` packs on the engine's thread.

On the packer's thread, packing waits for the GIL once per group of matrices. For small adapters,
this wait would delay the requests by some steps (decision 57). If steps run on a GPU, all adapters
are packed on the packer's thread, because packing may wait for earlier copies to the GPU.
"""


class AdapterLoads:
    """Loads adapters from their folders into host memory, and packs them into the pool."""

    def __init__(
        self,
        tiers: AdapterTiers,
        results: Results,
        clock: Callable[[], float],
        on_failure: Callable[[AdapterHandle, InvalidArgument, bool], None],
        packs_inline: bool,
    ) -> None:
        """Start the workers.

        clock: returns seconds.
        on_failure: called with an adapter that cannot be loaded or packed, the error, and whether
            the cause lies outside its files.
        packs_inline: whether `advance` packs small adapters on the engine's thread.
        """
        self._tiers = tiers
        self._workers = Workers(results)
        self._clock = clock
        self._on_failure = on_failure
        self._packs_inline = packs_inline
        self._inline_bytes_left = 0

    @property
    def busy(self) -> bool:
        """True if an adapter is being loaded or packed."""
        return self._workers.busy

    def finish(self) -> None:
        """Wait until all requested adapters are loaded and packed."""
        self._workers.finish()

    def close(self) -> None:
        """Wait for the workers, without applying their results."""
        self._workers.close()

    def advance(self, wanted: Sequence[AdapterHandle], running: int = 0) -> AdapterHandle | None:
        """Begin to load and pack the adapters that waiting requests need, as far as memory and
        pages allow.

        The adapter of an older request is never evicted for that of a newer request.

        wanted: adapters of waiting requests, in order of arrival.
        running: number of running requests, each of which will need another page.

        Returns the first adapter that is in memory but lacks pages, or None.
        """
        self._inline_bytes_left = INLINE_PACK_BYTES
        blocked: AdapterHandle | None = None
        missing, host_bytes_left, now = 0, 0.0, self._clock()
        for handle in wanted:
            if (
                not handle.resident
                and handle.state is not AdapterState.FAILED
                and handle.backoff.due <= now
            ):
                if not missing:
                    host_bytes_left = self._tiers.host.available_bytes
                missing += 1
                host_bytes_left -= handle.description.host_bytes
                # More copies than fit the host's budget would evict each other before packing.
                prefetch = missing == 1 or (missing <= MAX_PREFETCHED and host_bytes_left >= 0)
                if handle.state is AdapterState.ON_DISK and prefetch:
                    self._load(handle)
                # A newer adapter must not take the pages that an older one waits for.
                elif handle.state is AdapterState.IN_MEMORY and blocked is None:
                    if self._tiers.reserve(handle, running):
                        is_small = self._tiers.packed_bytes(handle) <= self._inline_bytes_left
                        self.pack(handle, between_steps=is_small and self._packs_inline)
                    else:
                        blocked = handle
            self._tiers.residents.needed.add(handle)
        self._tiers.residents.needed.clear()
        self._tiers.slots.sweep()
        for handle in reversed(wanted):
            handle.last_used = self._tiers.pool.tick()
        return blocked

    def _load(self, handle: AdapterHandle) -> None:
        """Let the loader's thread read the weights of an adapter."""
        handle.load()
        self._workers.load(
            partial(_read_weights, handle),
            partial(self._keep, handle),
            partial(self._fail, handle),
        )

    def _keep(self, handle: AdapterHandle, adapter: Adapter) -> None:
        """Store weights that the loader has read as the host copy of the adapter."""
        self._tiers.count(loads=1)
        if handle.obsolete:
            handle.load_later()
        elif handle.info.digest not in ("", adapter.info.digest):
            invalid = ErrorFactory(handle.name, str(handle.folder))
            self._fail(handle, invalid("holds other weights than when it was first read"))
        else:
            self._tiers.keep(handle, adapter)

    def pack(self, handle: AdapterHandle, *, between_steps: bool) -> None:
        """Pack an adapter that has its slot and pages.

        between_steps: whether to pack it now, on the engine's thread. Otherwise, the packer's
            thread packs it.
        """
        assert handle.slot is not None
        job = partial(self._tiers.write, handle.slot, handle.run)
        if not between_steps:
            done = partial(self._tiers.packed, handle)
            self._workers.pack(job, lambda _: done(), partial(self._fail, handle))
            return
        self._inline_bytes_left -= self._tiers.packed_bytes(handle)
        try:
            job()
        except Exception as error:
            self._fail(handle, error)
        else:
            self._tiers.packed(handle)

    def _fail(self, handle: AdapterHandle, error: BaseException) -> None:
        """Handle a failed load or packing.

        If the cause lies outside the adapter's files, there is another attempt after a delay. Any
        other failure, or the last allowed attempt, becomes the error of the handle.
        """
        transient = is_transient(error)
        if transient:
            handle.backoff.failed(self._clock())
            if handle.backoff.attempts < MAX_ATTEMPTS:
                log.warning("loading adapter '%s' is tried again: %s", as_text(handle.name), error)
                self._tiers.undo(handle)
                return
        reason = as_adapter_error(handle.name, handle.folder, error)
        self._tiers.fail(handle, reason)
        self._on_failure(handle, reason, transient)


def _read_weights(handle: AdapterHandle) -> Adapter:
    """Return the weights of a version. The loader's thread calls this.

    Raises the errors of `read_adapter`, and InvalidArgument if the folder has changed.
    """
    adapter = read_adapter(handle.folder, handle.description)
    stamp = stamp_of(handle.folder)
    if stamp != handle.stamp:
        invalid = ErrorFactory(handle.name, str(handle.folder))
        raise invalid("has changed while it was being loaded") from error_of(stamp)
    return adapter


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
