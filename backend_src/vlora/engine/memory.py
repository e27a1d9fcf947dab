"""The engine's memory: one region of pages for keys and values, cached prefixes and adapters.

Connects pool, KV storage, prefix cache and adapter store, and loads what waiting requests need.
Knows sequences, not steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from vlora.config import AUTO, Options
from vlora.engine.sequence import Sequence, scopes_of
from vlora.errors import InvalidArgument, VLoraError
from vlora.ids import BASE
from vlora.lora.handle import AdapterHandle
from vlora.lora.store import AdapterStore
from vlora.memory.block_table import BlockTable
from vlora.memory.kv_cache import KVCache, page_bytes
from vlora.memory.pool import Moves, PagePool, Run
from vlora.memory.prefix import PrefixCache
from vlora.model.decoder import lora_groups
from vlora.model.decoder_config import DecoderConfig

MAX_AUTO_BYTES = 1 << 30
"""Maximum size of the adapters' pages if `adapter_pool_bytes` is "auto"."""

PATIENCE_STEPS = 256
"""Number of steps that the oldest request waits for its adapter's pages before newer requests are
held back too: the adapters of requests that run stay resident."""


class EngineMemory:
    """Owner of the pool and its bytes. Belongs to the engine's thread."""

    def __init__(
        self,
        options: Options,
        config: DecoderConfig,
        dtype: torch.dtype,
        adapters: AdapterStore,
    ) -> None:
        """Allocate the pages. The adapters are loaded already; `attach` packs them."""
        self._adapters = adapters
        self._version = adapters.version
        self._stuck_steps = 0
        self._stuck: AdapterHandle | None = None
        self.block_size = options.block_size
        self.arrival_cutoff = math.inf
        """Latest arrival of requests that may begin to run."""
        for matrices in lora_groups(config.layers):
            adapters.group(matrices)
        layout = config.layers, self.block_size, config.kv_heads, config.head_dim
        self._page_bytes = page_bytes(*layout, dtype)
        self._adapter_pages = self._pages_for_adapters(options)
        kv_pages = options.kv_cache_tokens // self.block_size
        self.pool = PagePool(kv_pages + self._adapter_pages)
        self.kv_cache = KVCache(self.pool.total, *layout, dtype)
        self.pool.movers.append(self.kv_cache.move)
        self.prefix = PrefixCache(self.pool) if options.enable_prefix_caching else None

    def _pages_for_adapters(self, options: Options) -> int:
        if options.adapter_pool_bytes != AUTO:
            return -(-options.adapter_pool_bytes // self._page_bytes)
        handles = (self._adapters.handle(name) for name in self._adapters.names())
        needed = sum(self._run_length(handle) for handle in handles)
        return min(needed, MAX_AUTO_BYTES // self._page_bytes)

    def _run_length(self, handle: AdapterHandle) -> int:
        """Return the number of contiguous pages that an adapter needs."""
        return Run.length(self._adapters.packed_bytes(handle), self._page_bytes)

    def attach(self) -> None:
        """Pack the loaded adapters, as many as fit the adapters' pages."""
        self._adapters.attach(self.pool, self.kv_cache, self._adapter_pages)

    def table(self) -> BlockTable:
        """Return a new block table for one sequence."""
        return BlockTable(self.pool, self.block_size, self.prefix)

    def capacity(self, handle: AdapterHandle | None) -> int:
        """Return the maximum number of tokens of a request with this adapter.

        It is reached when the pool holds this adapter and this request only. Raises
        InvalidArgument if the adapter leaves no page for keys and values.
        """
        pages = 0 if handle is None else self._run_length(handle)
        if pages >= self.pool.total:
            name = "" if handle is None else handle.name
            raise InvalidArgument(
                f"adapter '{name}' needs {pages} pages of {self._page_bytes} bytes;"
                f" the pool has {self.pool.total}, for keys and values as well"
            )
        return (self.pool.total - pages) * self.block_size

    # -- between steps -------------------------------------------------------------------------

    def advance(self, waiting: list[Sequence], running: int = 0) -> list[tuple[str, VLoraError]]:
        """Load and pack the adapters of waiting requests, in order of arrival.

        running: number of requests that hold pages.
        Returns (request id, reason) of requests whose adapter is gone or does not load.
        """
        self._adapters.protected_slot = BASE
        failed = list(self._resolve(waiting))
        first_of: dict[AdapterHandle, Sequence] = {}
        for sequence in waiting:
            if sequence.adapter is not None:
                first_of.setdefault(sequence.adapter, sequence)
        stuck = self._adapters.advance(list(first_of), running)
        same = stuck is not None and stuck is self._stuck
        self._stuck_steps = self._stuck_steps + 1 if same else 0
        self._stuck = stuck
        hold_back = stuck is not None and self._stuck_steps > PATIENCE_STEPS
        self.arrival_cutoff = (
            first_of[stuck].arrival if stuck is not None and hold_back else math.inf
        )
        return failed

    def _resolve(self, waiting: list[Sequence]) -> Iterable[tuple[str, VLoraError]]:
        """Point requests that have not started to the present version of their adapter."""
        changed = self._version != self._adapters.version
        self._version = self._adapters.version
        for sequence in waiting:
            if sequence.adapter is None:
                continue
            if changed and not sequence.holds_adapter:
                try:
                    sequence.adapter = self._adapters.handle(sequence.adapter.name)
                except VLoraError as error:
                    yield sequence.id, error
                    continue
            if sequence.adapter.error is not None:
                yield sequence.id, sequence.adapter.error

    def evicted(self, handle: AdapterHandle) -> None:
        """Make the prefix blocks of an evicted adapter the next to be evicted."""
        if self.prefix is not None:
            for scope in scopes_of(handle):
                self.prefix.evict_first(scope)

    def move(self, running: Iterable[Sequence], moves: Moves) -> None:
        """Update the block tables after pages were relocated."""
        for sequence in running:
            sequence.table.relocate(moves)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the pages add up and belong to running sequences."""
        self.pool.check_integrity()
        if self.prefix is not None:
            self.prefix.check_integrity()
        held = {page for sequence in running for page in sequence.table.pages}
        assert all(self.pool.is_held(page) for page in held)
        assert len(held) == self.pool.kv, (len(held), self.pool.kv)
