"""Loading and packing of the adapters that waiting requests need.

This module decides what is loaded and packed next. Two worker threads load and pack. All state
belongs to the engine's thread, which applies the results of the workers to the tiers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from vlora.errors import InvalidArgument
from vlora.lora.adapter import Adapter, read_adapter
from vlora.lora.folders import error_of, stamp_of
from vlora.lora.handle import AdapterHandle, AdapterState
from vlora.lora.peft_config import ErrorFactory, as_text
from vlora.lora.tiers import AdapterTiers
from vlora.lora.transient import MAX_ATTEMPTS, as_adapter_error, is_transient
from vlora.lora.workers import Results, Workers

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
        hidden: int,
        clock: Callable[[], float],
        on_failure: Callable[[AdapterHandle, InvalidArgument, bool], None],
        packs_inline: bool,
    ) -> None:
        """Start the workers.

        hidden: width of the model.
        clock: returns seconds.
        on_failure: called with an adapter that cannot be loaded or packed, the error, and whether
            the cause lies outside its files.
        packs_inline: whether `advance` packs small adapters on the engine's thread.
        """
        self._tiers = tiers
        self._workers = Workers(results)
        self._hidden = hidden
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
            partial(_read_weights, handle, self._hidden),
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


def _read_weights(handle: AdapterHandle, hidden: int) -> Adapter:
    """Return the weights of a version. The loader's thread calls this.

    Raises the errors of `read_adapter`, and InvalidArgument if the folder has changed.
    """
    adapter = read_adapter(handle.name, handle.folder, handle.description, hidden)
    stamp = stamp_of(handle.folder)
    if stamp != handle.stamp:
        invalid = ErrorFactory(handle.name, str(handle.folder))
        raise invalid("has changed while it was being loaded") from error_of(stamp)
    return adapter
