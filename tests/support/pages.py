"""Fake owners of pages, for tests of the page pool."""

from __future__ import annotations

import torch

from vlora.ids import NO_IMAGE
from vlora.memory.kv_cache import BlockTable
from vlora.memory.pool import PagePool, Run
from vlora.memory.prefix import BlockDigests, BlockKey


class IdleAdapters:
    """Contiguous pages of unused adapters, which the pool may evict, the oldest first."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.runs: dict[Run, int] = {}
        pool.evictors.append(self)
        pool.run_evictor = self

    def add(self, run: Run) -> None:
        self.runs[run] = self._pool.tick()

    def evictable_pages(self, enough: int) -> int:
        return sum(run.count for run in self.runs)

    def oldest_use(self) -> int | None:
        return min(self.runs.values(), default=None)

    def evict_oldest(self) -> None:
        run = min(self.runs, key=lambda run: self.runs[run])
        self.evict_run(run.first)

    def idle_runs(self) -> list[range]:
        return [run.pages for run in sorted(self.runs, key=lambda run: self.runs[run])]

    def evict_run(self, first: int) -> None:
        (run,) = (run for run in self.runs if run.first == first)
        del self.runs[run]
        self._pool.release_run(run)


class BlocksOfTokens:
    """Block table of a token sequence, in blocks of two, with the keys of its full blocks."""

    def __init__(self, table: BlockTable, scope: str, tokens: list[int]) -> None:
        self.table = table
        self.tokens = tokens
        digests = BlockDigests(2, torch.full((len(tokens),), NO_IMAGE))
        self.keys = [BlockKey(scope, d) for d in digests.up_to(tokens, len(tokens))]
