"""The page pool, its block tables and cached prefixes: the books balance whatever is asked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from vlora.ids import NO_IMAGE
from vlora.memory.block_table import BlockTable
from vlora.memory.kv_cache import KVCache, page_bytes
from vlora.memory.pool import Moves, PagePool, Run
from vlora.memory.prefix import BlockDigests, BlockKey, PrefixCache


class Idle:
    """Adapters that nobody uses, to be given up oldest first."""

    holds_runs = True

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.runs: dict[Run, int] = {}
        pool.evictors.append(self)

    def add(self, run: Run) -> None:
        self.runs[run] = self._pool.tick()

    @property
    def evictable_pages(self) -> int:
        return sum(run.count for run in self.runs)

    def oldest_use(self) -> int | None:
        return min(self.runs.values(), default=None)

    def evict_oldest(self) -> None:
        run = min(self.runs, key=lambda one: self.runs[one])
        del self.runs[run]
        self._pool.release_run(run)


class Held:
    """A sequence as far as its pages go: what each of its tokens' blocks should hold."""

    def __init__(self, table: BlockTable, scope: str, tokens: list[int]) -> None:
        self.table = table
        self.tokens = tokens
        digests = BlockDigests(2, torch.full((len(tokens),), NO_IMAGE), None)
        self.keys = [BlockKey(scope, d) for d in digests.up_to(tokens, len(tokens))]


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share, grow and end; adapters come, go idle and leave. Each page's content is
    followed through every relocation."""

    sequences: Bundle[Held] = Bundle("sequences")
    runs: Bundle[Run] = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(24)
        self.prefix = PrefixCache(self.pool)
        self.idle = Idle(self.pool)
        self.store = KVCache(24, 1, 2, 1, 1)
        self.live: list[Held] = []
        self.busy: list[Run] = []
        self.pool.movers += [self.store.move, self._moved]

    def _moved(self, moves: Moves) -> None:
        for held in self.live:
            held.table.relocate(moves)

    def _write(self, held: Held) -> None:
        for key, page in zip(held.keys, held.table.pages, strict=False):
            self.store.cache[page] = _mark(key)

    @rule(
        target=sequences,
        scope=st.sampled_from(["", "a"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    )
    def admit(self, scope: str, tokens: list[int]) -> Held:
        held = Held(BlockTable(self.pool, 2, self.prefix), scope, tokens)
        shared = held.table.reuse_prefix(held.keys[: (len(tokens) - 1) // 2])
        assert shared < len(tokens)
        for key, page in zip(held.keys, held.table.pages, strict=False):
            assert self.store.cache[page].eq(_mark(key)).all(), "a stale block"
        if held.table.grow(len(tokens)):
            self.live.append(held)
            self._write(held)
            held.table.share(held.keys)
        else:
            held.table.clear()
        return held

    @rule(held=consumes(sequences))
    def end(self, held: Held) -> None:
        if held in self.live:
            self.live.remove(held)
        held.table.clear()

    @rule(target=runs, count=st.integers(1, 9))
    def place(self, count: int) -> Run:
        run = self.pool.allocate_run(count)
        if run is None:
            return Run(0, 0)
        self.busy.append(run)
        for page in run.pages:
            self.store.cache[page] = -1.0
        return run

    @rule(run=consumes(runs), idle=st.booleans())
    def finish(self, run: Run, idle: bool) -> None:
        if run.count:
            self.busy.remove(run)
            if idle:
                self.idle.add(run)
            else:
                self.pool.release_run(run)

    @rule(scope=st.sampled_from(["", "a"]))
    def forget(self, scope: str) -> None:
        self.prefix.evict_first(scope)

    @invariant()
    def the_books_balance(self) -> None:
        self.pool.check_integrity()
        self.prefix.check_integrity()
        assert {p for held in self.live for p in held.table.pages} == {
            page for page in range(24) if self.pool.is_held(page)
        }
        assert sum(run.count for run in (*self.busy, *self.idle.runs)) == self.pool.adapter
        for run in (*self.busy, *self.idle.runs):
            assert all(self.store.cache[page].eq(-1).all() for page in run.pages), "run over"
        for held in self.live:
            for key, page in zip(held.keys, held.table.pages, strict=False):
                assert self.store.cache[page].eq(_mark(key)).all(), "a block went astray"


def _mark(key: BlockKey) -> int:
    return hash(key) % 65521


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_an_adapter_without_a_run_moves_keys_and_values() -> None:
    pool = PagePool(8)
    tables = [BlockTable(pool, 1) for _ in range(8)]
    for table in tables:
        assert table.grow(1)
    for table in tables[::2]:
        table.clear()  # every other page is free
    pool.movers.append(lambda moves: [table.relocate(moves) for table in tables])  # type: ignore[arg-type, func-returns-value]
    run = pool.allocate_run(4)
    assert run is not None
    assert pool.pages_moved == 2
    held = {page for table in tables for page in table.pages}
    assert len(held) == 4
    assert held.isdisjoint(run.pages)
    pool.check_integrity()


def test_what_is_longest_unused_goes_first_and_keys_of_an_evicted_adapter_before_all() -> None:
    pool = PagePool(6)
    prefix, idle = PrefixCache(pool), Idle(pool)
    keys = {scope: Held(BlockTable(pool, 2, prefix), scope, [1, 2]) for scope in ("a", "b")}
    for held in keys.values():
        assert held.table.grow(2)
        held.table.share(held.keys)
        held.table.clear()
    run = pool.allocate_run(1)
    assert run is not None
    idle.add(run)
    assert (pool.free, pool.cached, pool.adapter) == (3, 2, 1)
    prefix.evict_first("b")
    assert pool.allocate(4) is not None
    assert prefix.count_matching(keys["a"].keys) == 1
    assert prefix.count_matching(keys["b"].keys) == 0
    assert pool.allocate(1) is not None
    assert prefix.count_matching(keys["a"].keys) == 0
    assert idle.runs
    assert pool.allocate(2) is None, "more than there is, and nothing taken for it"
    assert idle.runs


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    pool = PagePool(4)
    prefix = PrefixCache(pool)
    held = Held(BlockTable(pool, 2, prefix), "", [1, 2, 3, 4, 5, 6])
    assert held.table.grow(6)
    held.table.share(held.keys)
    held.table.clear()
    assert pool.allocate(2) is not None
    assert prefix.count_matching(held.keys) == 2


@pytest.fixture
def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3), torch.tensor([NO_IMAGE, 0, 1, 2, 3, NO_IMAGE])


def test_keys_are_what_a_block_and_all_before_it_hold(
    pictures: tuple[torch.Tensor, torch.Tensor],
) -> None:
    features, rows = pictures
    tokens = [7, 9, 9, 9, 9, 8]
    keys = BlockDigests(2, rows, features).up_to(tokens, 6)
    assert BlockDigests(2, rows, features.clone()).up_to(tokens, 5) == keys[:2]
    other = features.clone()
    other[2] += 1e-3
    changed = BlockDigests(2, rows, other).up_to(tokens, 6)
    assert [a == b for a, b in zip(keys, changed, strict=True)] == [True, False, False]
    plain = BlockDigests(2, torch.full((6,), NO_IMAGE), None).up_to(tokens, 6)
    assert not set(plain) & set(keys)
    grown = BlockDigests(2, rows, features)
    assert grown.up_to([*tokens, 1, 2], 8)[:3] == keys


def test_a_page_is_as_large_as_its_arithmetic_says() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        store = KVCache(3, 2, 20, 4, 24, dtype)
        assert store.page_bytes == page_bytes(2, 20, 4, 24, dtype)
        assert store.address(2) - store.address(0) == 2 * store.page_bytes
        assert store.address(1) % 64 == 0
