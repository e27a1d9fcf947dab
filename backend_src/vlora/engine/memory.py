"""The engine's memory: one region of pages for keys and values, cached prefixes and adapters.

Puts pool, bytes, prefix cache and adapter store together, and brings nearer what waiting requests
need. Knows sequences, not steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from vlora.config import AUTO, Options
from vlora.engine.sequence import Sequence as Live
from vlora.engine.sequence import scopes_of
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
"""Of pages for adapters, where their number is left to us."""

PATIENCE = 256
"""Steps that the oldest request waits for its adapter's run before newer ones have to wait too:
their adapters stay where they are as long as they run."""


class EngineMemory:
    """Owns the pool and its bytes. Belongs to the engine's thread."""

    def __init__(
        self,
        options: Options,
        config: DecoderConfig,
        dtype: torch.dtype,
        adapters: AdapterStore,
    ) -> None:
        """The adapters are loaded and not yet packed; `attach` does that."""
        self._adapters = adapters
        self._version = adapters.version
        self._starved = 0
        self._stuck: AdapterHandle | None = None
        self.block = options.block_size
        self.barrier = math.inf
        """Arrival after which no request begins to run."""
        for places in lora_groups(config.layers):
            adapters.group(places)
        layout = config.layers, self.block, config.kv_heads, config.head_dim
        self._page_bytes = page_bytes(*layout, dtype)
        self._adapter_pages = self._pages_for_adapters(options)
        kv_pages = options.kv_cache_tokens // self.block
        self.pool = self.make_pool(kv_pages, self._adapter_pages)
        self.store = KVCache(self.pool.total, *layout, dtype)
        self.pool.movers.append(self.store.move)
        self.prefix = PrefixCache(self.pool) if options.enable_prefix_caching else None

    def make_pool(self, kv: int, adapters: int) -> PagePool:
        """With so many pages meant for each."""
        return PagePool(kv + adapters)

    def _pages_for_adapters(self, options: Options) -> int:
        if options.adapter_pool_bytes != AUTO:
            return -(-options.adapter_pool_bytes // self._page_bytes)
        handles = (self._adapters.handle(name) for name in self._adapters.names())
        needed = sum(self._run_of(handle) for handle in handles)
        return min(needed, MAX_AUTO_BYTES // self._page_bytes)

    def _run_of(self, handle: AdapterHandle) -> int:
        """Pages of an adapter's run."""
        return Run.length(self._adapters.packed_bytes(handle), self._page_bytes)

    def attach(self) -> None:
        """Packs what is loaded, as far as the adapters' pages go."""
        self._adapters.attach(self.pool, self.store, self._adapter_pages)

    def table(self) -> BlockTable:
        return BlockTable(self.pool, self.block, self.prefix)

    def capacity(self, handle: AdapterHandle | None) -> int:
        """Tokens that one request of this adapter can have in all, alone in the pool.

        Raises InvalidArgument where not even the adapter fits."""
        pages = 0 if handle is None else self._run_of(handle)
        if pages >= self.pool.total:
            name = "" if handle is None else handle.name
            raise InvalidArgument(
                f"adapter '{name}' needs {pages} pages of {self._page_bytes} bytes;"
                f" the pool has {self.pool.total}, for keys and values as well"
            )
        return (self.pool.total - pages) * self.block

    # -- between steps -------------------------------------------------------------------------

    def advance(self, waiting: Sequence[Live], running: int = 0) -> list[tuple[str, VLoraError]]:
        """Loads, packs and makes room for what waits, in order of arrival. running: requests that
        hold pages. Requests whose adapter does not load, or is gone, with the reason: they cannot
        be served."""
        self._adapters.protected_slot = BASE
        failed = list(self._resolve(waiting))
        wanted: dict[AdapterHandle, Live] = {}
        for sequence in waiting:
            if sequence.adapter is not None:
                wanted.setdefault(sequence.adapter, sequence)
        stuck = self._adapters.advance(list(wanted), running)
        self._starved = self._starved + 1 if stuck is not None and stuck is self._stuck else 0
        self._stuck = stuck
        late = stuck is not None and self._starved > PATIENCE
        self.barrier = wanted[stuck].arrival if stuck is not None and late else math.inf
        return failed

    def _resolve(self, waiting: Sequence[Live]) -> Iterable[tuple[str, VLoraError]]:
        """Who has not started yet gets what its adapter's name means now."""
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
        """The adapter goes: what it computed goes next."""
        if self.prefix is not None:
            for scope in scopes_of(handle):
                self.prefix.evict_first(scope)

    def move(self, running: Iterable[Live], moves: Moves) -> None:
        """Pages have been relocated: block tables follow."""
        for sequence in running:
            sequence.table.relocate(moves)

    def check_integrity(self, running: Iterable[Live]) -> None:
        """Raises AssertionError where the books do not balance."""
        self.pool.check_integrity()
        if self.prefix is not None:
            self.prefix.check_integrity()
        held = {page for sequence in running for page in sequence.table.pages}
        assert all(self.pool.is_held(page) for page in held)
        assert len(held) == self.pool.kv, (len(held), self.pool.kv)
