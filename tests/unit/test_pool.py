"""Tests of the page pool, block tables and the prefix cache: after any sequence of calls the page
counts are consistent."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.support.calls import calls_of
from tests.support.pages import BlocksOfTokens, IdleAdapters
from vlora.ids import NO_IMAGE
from vlora.memory.kv_cache import BlockTable, KVCache, page_bytes
from vlora.memory.pool import Moves, Owner, PagePool, Run, UseOrder, cheapest_window, runs_to_evict
from vlora.memory.prefix import BlockDigests, BlockKey, PrefixCache


@dataclass(eq=False)
class Used:
    """A named object with the time of its last use."""

    name: str
    last_used: int = 0


class PoolMachine(RuleBasedStateMachine):
    """Random operations of sequences and adapters on a pool.

    Sequences start, share blocks, grow and end; adapters are allocated, become idle and are
    released. Each page's content is checked after every relocation.
    """

    sequences: Bundle[BlocksOfTokens] = Bundle("sequences")
    runs: Bundle[Run] = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(24)
        self.prefix = PrefixCache(self.pool)
        self.idle = IdleAdapters(self.pool)
        self.store = KVCache(24, 1, 2, 1, 1)
        self.live: list[BlocksOfTokens] = []
        self.busy: list[Run] = []
        self.pool.movers += [self.store.move, self._moved]

    def _moved(self, moves: Moves) -> None:
        for blocks in self.live:
            blocks.table.relocate(moves)

    def _write(self, blocks: BlocksOfTokens) -> None:
        for key, page in zip(blocks.keys, blocks.table.pages, strict=False):
            self.store.cache[page] = _mark(key)

    @rule(
        target=sequences,
        scope=st.sampled_from(["", "a"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    )
    def admit(self, scope: str, tokens: list[int]) -> BlocksOfTokens:
        blocks = BlocksOfTokens(BlockTable(self.pool, 2, self.prefix), scope, tokens)
        shared = blocks.table.reuse_prefix(blocks.keys[: (len(tokens) - 1) // 2])
        assert shared < len(tokens)
        for key, page in zip(blocks.keys, blocks.table.pages, strict=False):
            assert self.store.cache[page].eq(_mark(key)).all(), "a stale block"
        if blocks.table.grow(len(tokens)):
            self.live.append(blocks)
            self._write(blocks)
            blocks.table.share(blocks.keys)
        else:
            blocks.table.clear()
        return blocks

    @rule(blocks=consumes(sequences))
    def end(self, blocks: BlocksOfTokens) -> None:
        if blocks in self.live:
            self.live.remove(blocks)
        blocks.table.clear()

    @rule(target=runs, count=st.integers(1, 9))
    def allocate_run(self, count: int) -> Run:
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

    @rule(page=st.integers(0, 23))
    def discard(self, page: int) -> None:
        self.prefix.discard([page])

    @rule(scope=st.sampled_from(["", "a"]))
    def evict_first(self, scope: str) -> None:
        self.prefix.evict_first(scope)

    @invariant()
    def pages_add_up(self) -> None:
        self.pool.check_integrity()
        self.prefix.check_integrity()
        assert {p for blocks in self.live for p in blocks.table.pages} == {
            page for page in range(24) if self.pool.owner(page) is Owner.KV
        }
        assert sum(run.count for run in (*self.busy, *self.idle.runs)) == self.pool.adapter
        for run in (*self.busy, *self.idle.runs):
            assert all(self.store.cache[page].eq(-1).all() for page in run.pages), (
                "an adapter was overwritten"
            )
        for blocks in self.live:
            for key, page in zip(blocks.keys, blocks.table.pages, strict=False):
                assert self.store.cache[page].eq(_mark(key)).all(), (
                    "a block was overwritten or lost"
                )


def _mark(key: BlockKey) -> int:
    return hash(key) % 65521


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_the_least_recently_used_is_evicted_first_but_for_blocks_of_an_evicted_adapter() -> None:
    pool = PagePool(6)
    prefix, idle = PrefixCache(pool), IdleAdapters(pool)
    keys = {
        scope: BlocksOfTokens(BlockTable(pool, 2, prefix), scope, [1, 2]) for scope in ("a", "b")
    }
    for blocks in keys.values():
        assert blocks.table.grow(2)
        blocks.table.share(blocks.keys)
        blocks.table.clear()
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
    assert pool.allocate(2) is None, "there are too few pages, and nothing is evicted"
    assert idle.runs


def test_nothing_is_evicted_for_a_run_that_a_pinned_one_leaves_no_space_for() -> None:
    pool = PagePool(9)
    idle = IdleAdapters(pool)
    runs = [pool.allocate_run(1) for _ in range(9)]
    for index, run in enumerate(runs):
        assert run is not None
        if index != 4:
            idle.add(run)
    assert pool.can_allocate_run(5), "the pages would suffice if they were contiguous"
    assert pool.allocate_run(5) is None
    assert len(idle.runs) == 8
    taken = pool.allocate_run(3)
    assert taken == Run(0, 3)
    assert sorted(run.first for run in idle.runs) == [3, 5, 6, 7, 8]
    pool.check_integrity()


def test_the_search_for_contiguous_pages_calls_no_function_for_each_page() -> None:
    calls = []
    for total in (512, 8192):
        pool = PagePool(total)
        pages = pool.allocate(total)
        assert pages is not None
        pool.release(pages[::2])
        calls.append(calls_of(lambda pool=pool: pool.allocate_run(8)).total())
        assert pool.adapter == 8
        pool.check_integrity()
    assert calls[0] == calls[1]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_runs_to_evict_are_the_oldest_that_leave_a_window(data: st.DataObject) -> None:
    total, runs, start = 30, [], 0
    while start < total:
        length = data.draw(st.integers(1, 6))
        if data.draw(st.booleans()):
            runs.append(range(start, min(start + length, total)))
        start += length
    idle = [run for run in data.draw(st.permutations(runs)) if data.draw(st.booleans())]
    busy = [run for run in runs if run not in idle]
    count = data.draw(st.integers(1, 20))

    def newest(window: range) -> int | None:
        """Return the age rank of the newest run in a window, -1 without any; None if one stays."""
        if any(set(window) & set(run) for run in busy):
            return None
        return max((i for i, run in enumerate(idle) if set(window) & set(run)), default=-1)

    windows = [range(first, first + count) for first in range(total - count + 1)]
    ranks = [rank for rank in map(newest, windows) if rank is not None]
    victims = runs_to_evict(total, busy, idle, count)
    if not ranks:
        assert victims is None
        return
    assert victims is not None
    assert max(map(idle.index, victims), default=-1) == min(ranks)
    left = [run for run in runs if run not in victims]
    assert any(not any(set(window) & set(run) for run in left) for window in windows)
    fewest = min(
        sum(len(run) for run in idle if set(window) & set(run))
        for window in windows
        if newest(window) == min(ranks)
    )
    assert sum(map(len, victims)) == fewest


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0, 0, 1, 2, 3]), min_size=1, max_size=40), st.integers(1, 12))
def test_the_window_with_the_most_free_pages_is_found(owners: list[int], count: int) -> None:
    windows = [owners[first : first + count] for first in range(len(owners) - count + 1)]
    allowed = [index for index, window in enumerate(windows) if Owner.ADAPTER not in window]
    assume(allowed)
    expected = max(allowed, key=lambda index: windows[index].count(Owner.FREE))
    assert cheapest_window(bytearray(owners), Owner.FREE, Owner.ADAPTER, count) == expected


def test_uses_are_ordered_by_time() -> None:
    items = [Used(name) for name in "abcdef"]
    order: UseOrder[Used] = UseOrder()
    for item in items:
        order.add(item)
    for now, index in enumerate((3, 0, 5, 0, 1, 4), 1):
        items[index].last_used = now
    order.remove(items[5])
    assert [item.name for item in order.oldest_first()] == list("cdabe")


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    pool = PagePool(4)
    prefix = PrefixCache(pool)
    blocks = BlocksOfTokens(BlockTable(pool, 2, prefix), "", [1, 2, 3, 4, 5, 6])
    assert blocks.table.grow(6)
    blocks.table.share(blocks.keys)
    blocks.table.clear()
    assert pool.allocate(2) is not None
    assert prefix.count_matching(blocks.keys) == 2


def test_discarded_blocks_are_found_no_more_and_their_idle_pages_are_free() -> None:
    pool = PagePool(4)
    prefix = PrefixCache(pool)
    first, second = (BlocksOfTokens(BlockTable(pool, 2, prefix), "", [1, 2, 3, 4]) for _ in "ab")
    assert first.table.grow(4)
    first.table.share(first.keys)
    assert second.table.reuse_prefix(second.keys[:1]) == 2
    first.table.clear()
    assert (pool.kv, pool.cached) == (1, 1)
    prefix.discard([0, 1, 2, 3])
    assert prefix.count_matching(first.keys) == 0
    assert (pool.kv, pool.cached) == (1, 0)
    prefix.check_integrity()
    second.table.clear()
    assert pool.free == 4
    pool.check_integrity()


def test_blocks_that_are_not_finite_are_not_shared() -> None:
    pool, store = PagePool(8), KVCache(8, 3, 2, 1, 16)
    prefix = PrefixCache(pool, store.is_finite)
    blocks = BlocksOfTokens(BlockTable(pool, 2, prefix), "", [1, 2, 3, 4, 5, 6])
    assert blocks.table.grow(6)
    blocks.table.share(blocks.keys[:1])
    store.values(2)[blocks.table.pages[1], 0, 0, 0, 1, 3] = float("inf")
    blocks.table.share(blocks.keys)
    assert prefix.count_matching(blocks.keys) == 1
    store.cache.zero_()
    blocks.table.share(blocks.keys)
    assert prefix.count_matching(blocks.keys) == 3


def test_a_key_depends_on_the_block_and_all_blocks_before_it() -> None:
    rows, tokens = torch.tensor([NO_IMAGE, 0, 1, 2, 3, NO_IMAGE]), [7, 9, 9, 9, 9, 8]
    features, positions = [torch.randn(4, 3), torch.randn(4, 3)], torch.arange(18).view(3, 6)
    keys = BlockDigests(2, rows, features, positions).up_to(tokens, 6)
    copies = [level.clone() for level in features]
    assert BlockDigests(2, rows, copies, positions.clone()).up_to(tokens, 5) == keys[:2]
    grown = BlockDigests(2, rows, features, positions)
    assert grown.up_to([*tokens, 1, 2], 8)[:3] == keys
    assert not set(BlockDigests(2, torch.full((6,), NO_IMAGE)).up_to(tokens, 6)) & set(keys)
    for salt in ("alice", "bob", ""):
        salted = BlockDigests(2, rows, features, positions, salt).up_to(tokens, 6)
        assert bool(set(salted) & set(keys)) == (not salt)
        keys += salted if salt else []


@pytest.mark.parametrize("changed", ["token", "embedding", "level", "time", "height", "width"])
def test_every_input_of_the_forward_pass_changes_the_keys(changed: str) -> None:
    """Each value of the second block in turn; the key of the first block stays."""
    rows, tokens = torch.tensor([NO_IMAGE, 0, 1, 2, 3, NO_IMAGE]), [7, 9, 9, 9, 9, 8]
    features, positions = torch.randn(2, 4, 3), torch.arange(18).view(3, 6)
    keys = BlockDigests(2, rows, list(features), positions).up_to(tokens, 6)
    for place in range(2):
        for column in range(3 if changed in ("embedding", "level") else 1):
            others, moved, words = features.clone(), positions.clone(), list(tokens)
            if changed == "token":
                words[2 + place] += 1
            elif changed in ("embedding", "level"):
                others[int(changed == "level"), 1 + place, column] += 1e-3
            else:
                moved[("time", "height", "width").index(changed), 2 + place] += 1
            found = BlockDigests(2, rows, list(others), moved).up_to(words, 6)
            assert [a == b for a, b in zip(keys, found, strict=True)] == [True, False, False]


def test_the_size_of_a_page_equals_its_formula() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        store = KVCache(3, 2, 20, 4, 24, dtype)
        assert store.page_bytes == page_bytes(2, 20, 4, 24, dtype)
        assert store.address(2) - store.address(0) == 2 * store.page_bytes
        assert store.address(1) % 64 == 0
