"""The engine's memory: one pool of pages for keys and values, cached prefixes and adapters.

It also loads and packs the adapters that waiting requests need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from vlora.adapters.catalog import NameTable
from vlora.adapters.handle import AdapterHandle
from vlora.adapters.store import AdapterStore
from vlora.config import AUTO, Options
from vlora.device.device import HOST, Device
from vlora.engine.checks import admissible
from vlora.engine.scheduler import WaitingQueue
from vlora.engine.sequence import Sequence, scopes_of
from vlora.errors import InvalidArgument, VLoraError
from vlora.ids import BASE
from vlora.memory.kv_cache import BlockTable, KVCache, page_bytes
from vlora.memory.pool import Moves, Owner, PagePool, Run
from vlora.memory.prefix import PrefixCache
from vlora.model.decoder import lora_groups
from vlora.model.decoder_config import DecoderConfig

MAX_AUTO_BYTES = 1 << 30  # The adapters' pages if `adapter_pool_bytes` is "auto".
# A request's wait for its adapter's pages, after which newer ones must wait for it, because they
# could take every page that becomes free.
PATIENCE_SECONDS = 2.0


def pages_for_adapters(options: Options, page_bytes: int, needed: int) -> int:
    """Return the number of pages to add for adapters, of which all known ones need `needed`."""
    if options.adapter_pool_bytes != AUTO:
        return -(-options.adapter_pool_bytes // page_bytes)
    return min(needed, MAX_AUTO_BYTES // page_bytes)


class EngineMemory:
    """Owner of the page pool and its memory. Only the engine's thread may use it."""

    def __init__(
        self,
        options: Options,
        config: DecoderConfig,
        dtype: torch.dtype,
        adapters: AdapterStore,
        max_model_len: int,
        device: Device = HOST,
    ) -> None:
        """Allocate the pages on `device`. The adapters are not packed until `attach`."""
        self._adapters = adapters
        self._max_model_len = max_model_len
        self._stuck: Sequence | None = None  # Oldest waiting request whose adapter got no pages.
        self._stuck_since = 0.0
        self.block_size = options.block_size
        self._context_pages = -(-max_model_len // options.block_size)
        # `adapters_that_fit`, and the table of adapters for which it was computed.
        # The last `adapters_that_fit`, and the table of adapters for which it was computed.
        self._fitting: tuple[NameTable | None, int] = (None, 0)
        # Time of arrival; requests that arrived later may not begin.
        self.arrival_cutoff = math.inf
        for matrices in lora_groups(config.layers):
            adapters.slots.group(matrices)  # Creates the group. An adapter's size needs all groups.
        layout = config.layers, self.block_size, config.kv_heads, config.head_dim
        self._page_bytes = page_bytes(*layout, dtype, device.page_layout)
        handles = (adapters.handle(name) for name in adapters.names())
        needed = sum(self._run_length(handle) for handle in handles)
        self._adapter_pages = pages_for_adapters(options, self._page_bytes, needed)
        self.pool = PagePool(options.kv_cache_tokens // self.block_size + self._adapter_pages)
        self.kv_cache = KVCache(self.pool.total, *layout, dtype, device)
        self.pool.movers.append(self.kv_cache.move)
        self.prefix = None
        if options.enable_prefix_caching:
            self.prefix = PrefixCache(self.pool, self.kv_cache.is_finite)

    def _run_length(self, handle: AdapterHandle) -> int:
        return Run.length(self._adapters.tiers.packed_bytes(handle), self._page_bytes)

    def attach(self) -> None:
        """Load the pinned adapters, and pack as many others as fit into the pages for adapters.

        Raises InvalidArgument if the pinned ones leave too few pages for a request.
        """
        others = (h for h in self._adapters.table.current.values() if not h.stays_loaded)
        largest = max(map(self._run_length, others), default=0)
        limit = max(0, self.pool.total - self._context_pages - largest)
        if self._pinned_pages > limit:
            raise InvalidArgument(
                f"'pinned_adapters' need {self._pinned_pages} pages of {self._page_bytes} bytes;"
                f" beside a context and another adapter, the pool has {limit} of {self.pool.total}."
                " Pin fewer, or raise 'adapter_pool_bytes'"
            )
        self._adapters.max_pinned_pages = limit
        self._adapters.attach(self.pool, self.kv_cache, self._adapter_pages)

    @property
    def _pinned_pages(self) -> int:
        return sum(map(self._run_length, self._adapters.pinned))

    @property
    def adapters_that_fit(self) -> int:
        """Number of adapters, of the mean size of all known ones, that fit into the pool beside one
        request of the maximum length. Any thread may read it.
        """
        table, number = self._fitting
        if table is not self._adapters.table:
            table = self._adapters.table
            lengths = [self._run_length(handle) for handle in table.current.values()]
            pages = (self.pool.total - self._context_pages) * len(lengths)
            number = max(0, pages // sum(lengths)) if lengths else 0
            self._fitting = table, number
        return number

    def table(self) -> BlockTable:
        return BlockTable(self.pool, self.block_size, self.prefix)

    def context(self, handle: AdapterHandle | None) -> int:
        """Return the maximum number of tokens of a request with this adapter in the pool.

        Raises InvalidArgument if the adapter leaves no page for keys and values.
        """
        pages = self._pinned_pages
        if handle is not None and not handle.stays_loaded:
            pages += self._run_length(handle)
        if pages >= self.pool.total:
            name = "" if handle is None else handle.name
            raise InvalidArgument(
                f"adapter '{name}' needs {pages} pages of {self._page_bytes} bytes;"
                f" the pool has {self.pool.total} for adapters, keys and values"
            )
        return min(self._max_model_len, (self.pool.total - pages) * self.block_size)

    # -- between steps -------------------------------------------------------------------------

    def advance(
        self, queue: WaitingQueue, running: int = 0, now: float = 0.0
    ) -> list[tuple[str, VLoraError]]:
        """Load and pack the adapters of waiting requests, in order of arrival.

        Requests whose adapter was replaced get its present version. Returns (request id, error) of
        those whose adapter was removed or cannot be loaded.
        """
        self._adapters.tiers.residents.protected_slot = BASE
        self._adapters.apply()
        failed: list[tuple[str, VLoraError]] = []
        first_of = queue.first_of_each_adapter()
        if any(handle.retired or handle.error is not None for handle in first_of):
            failed = list(self._resolve(queue))
            first_of = queue.first_of_each_adapter()
        stuck = self._adapters.advance(list(first_of), running)
        self._update_cutoff(queue, None if stuck is None else first_of[stuck], now)
        return failed

    def _update_cutoff(self, queue: WaitingQueue, stuck: Sequence | None, now: float) -> None:
        """Hold back newer requests if the oldest stuck one has waited PATIENCE_SECONDS.

        A request is stuck until it begins, even if its adapter gets pages earlier: until it gets
        pages for its prompt, its adapter may be evicted again.
        """
        known = (s for s in (self._stuck, stuck) if s is not None and s in queue.by_arrival)
        oldest = min(known, key=lambda s: s.arrival, default=None)
        if oldest is not self._stuck:
            self._stuck, self._stuck_since = oldest, now
        patient = oldest is None or now - self._stuck_since <= PATIENCE_SECONDS
        self.arrival_cutoff = math.inf if oldest is None or patient else oldest.arrival

    def _resolve(self, queue: WaitingQueue) -> Iterable[tuple[str, VLoraError]]:
        """Set each waiting request's adapter to its present version, unless it holds an older one.

        Yields (request id, error) where this fails.
        """
        for sequence in queue.by_arrival:
            adapter = sequence.adapter
            if adapter is None:
                continue
            try:
                if adapter.retired and sequence.held_adapter is None:
                    self._use_present_version(queue, sequence, adapter.name)
                elif adapter.error is not None:
                    raise adapter.error.copy()
            except VLoraError as error:
                yield sequence.id, error

    def _use_present_version(self, queue: WaitingQueue, sequence: Sequence, name: str) -> None:
        handle = self._adapters.handle(name)
        sequence.max_tokens = admissible(
            sequence.request,
            handle,
            self.context(handle),
            sequence.prompt_length,
            sequence.longest_choice,
        )
        queue.use_adapter(sequence, handle)

    def evicted(self, handle: AdapterHandle) -> None:
        """Mark an evicted adapter's prefix blocks as the first to evict."""
        if self.prefix is not None:
            for scope in scopes_of(handle):
                self.prefix.evict_first(scope)

    def move(self, running: Iterable[Sequence], moves: Moves) -> None:
        """Update the block tables after pages were moved."""
        for sequence in running:
            sequence.table.relocate(moves)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless all pages are accounted for; running sequences hold KV's."""
        self.pool.check_integrity()
        if self.prefix is not None:
            self.prefix.check_integrity()
        held = {page for sequence in running for page in sequence.table.pages}
        assert all(self.pool.owner(page) is Owner.KV for page in held)
        assert len(held) == self.pool.kv, (len(held), self.pool.kv)
