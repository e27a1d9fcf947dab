"""Tests of a static split of the page pool: its wall, its accounting, and the comparison."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import adapters as split
from benchmarks.adapters import ManyAdapters, SplitPool, UnpairedPages
from tests.support.adapters_grid import SMALL_GRID
from tests.support.pages import BlocksOfTokens, IdleAdapters
from vlora.config import Options
from vlora.memory.kv_cache import BlockTable
from vlora.memory.pool import Owner, PagePool, Run
from vlora.memory.prefix import PrefixCache
from vlora.request import Request
from vlora.sampling import SamplingParams

GRID = SMALL_GRID | {
    "split": {
        "registered": 6,
        "requests": 48,
        "room": 2,
        "kv_requests": 6,
        "shared": 64,
        "kinds": ["zipf"],
    },
}


@pytest.fixture(autouse=True)
def one_thread(_restore_threads: None) -> None:
    torch.set_num_threads(1)


def test_the_split_refuses_more_than_a_side_has_where_one_pool_does_not() -> None:
    allocations: list[Callable[[PagePool], object]] = [
        lambda pool: pool.allocate(6),
        lambda pool: pool.allocate_run(6),
    ]
    for allocate in allocations:
        assert allocate(PagePool(8)) is not None
        pool = SplitPool(4, 4)
        assert allocate(pool) is None
        assert pool.free == 8
        pool.check_integrity()
    assert SplitPool(4, 4).can_allocate_run(4, kv_pages=4)
    assert not SplitPool(4, 4).can_allocate_run(5)


def test_each_side_evicts_its_own_pages_even_if_the_other_has_older_ones() -> None:
    pool = SplitPool(2, 2)
    prefix, idle = PrefixCache(pool), IdleAdapters(pool)

    def cache(scope: str) -> BlocksOfTokens:
        held = BlocksOfTokens(BlockTable(pool, 2, prefix), scope, [1, 2])
        assert held.table.grow(2)
        held.table.share(held.keys)
        held.table.clear()
        return held

    cached = [cache(scope) for scope in "ab"]  # Older than any adapter.
    for _ in range(3):
        run = pool.allocate_run(2)
        assert run is not None
        idle.add(run)
        assert [prefix.count_matching(held.keys) for held in cached] == [1, 1]
    newest = cache("c")  # Newer than the adapter, which stays.
    assert [prefix.count_matching(held.keys) for held in (*cached, newest)] == [0, 1, 1]
    assert list(idle.runs) == [run]
    pool.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_the_accounting_of_the_split_holds_under_random_use(seed: int) -> None:
    rng = random.Random(seed)
    pool = SplitPool(9, 11)
    prefix, idle = PrefixCache(pool), IdleAdapters(pool)
    live: list[BlocksOfTokens] = []
    busy: list[Run] = []
    refused = 0
    for _ in range(300):
        drawn = rng.random()
        if drawn < 0.35:
            tokens = rng.choices(range(2), k=rng.randint(1, 12))
            held = BlocksOfTokens(BlockTable(pool, 2, prefix), rng.choice("ab"), tokens)
            held.table.reuse_prefix(held.keys[: (len(tokens) - 1) // 2])
            if held.table.grow(len(tokens)):
                held.table.share(held.keys)
                live.append(held)
            else:
                held.table.clear()
                refused += 1
        elif drawn < 0.6 and live:
            live.pop(rng.randrange(len(live))).table.clear()
        elif drawn < 0.85:
            run = pool.allocate_run(rng.randint(1, 4))
            refused += run is None
            busy += [] if run is None else [run]
        elif busy:
            idle.add(busy.pop(rng.randrange(len(busy))))
        pool.check_integrity()
        prefix.check_integrity()
        assert {page for held in live for page in held.table.pages} == {
            page for page in range(pool.total) if pool.owner(page) is Owner.KV
        }
    assert refused, "no allocation was refused"
    assert pool.pages_moved == 0


@pytest.mark.parametrize("side", split.SIDES)
def test_pages_whose_adapter_was_evicted_are_counted(
    side: str, checkpoint: Path, adapters_dir: Path
) -> None:
    engine = split.SIDES[side](
        Options(model=checkpoint, adapters=adapters_dir, merging="off", kv_cache_tokens=1024)
    )
    name = engine.adapters.names()[0]
    handle = engine.adapters.handle(name)
    for number in range(2):
        params = SamplingParams(temperature=0.0, max_tokens=2 + 3 * number, ignore_eos=True)
        prompt = "<s>" + " what is red" * (12 + number)
        state = engine.prepare(Request(str(number), prompt, params, adapter=name))
        engine.add(state, float(number))
    while len(engine.request_ids) == 2:
        engine.step()
    unpaired = UnpairedPages()
    unpaired.count(engine)
    handle.unpin()  # The program itself never unpins the adapter of a running request.
    assert engine.pool.run_evictor is not None
    while handle.resident:
        engine.pool.run_evictor.evict_oldest()
    unpaired.count(engine)
    (running,) = engine.scheduler.running
    assert unpaired.held == [0, len(running.table.pages)]
    pages = engine.pool.kv + engine.pool.cached
    assert unpaired.cached == [0.0, pytest.approx(engine.pool.cached / pages)]
    assert engine.pool.cached > 0
    assert engine.memory.prefix is not None
    # One pool evicts the prefix of an evicted adapter first; the split does not.
    assert (engine.memory.prefix.oldest_use() == 0) == (side != split.SPLIT)
    engine.adapters.close()


def test_one_pool_holds_no_keys_and_values_without_their_adapter(
    checkpoint: Path, tmp_path: Path
) -> None:
    adapters = ManyAdapters(checkpoint, tmp_path, GRID)
    rows = list(adapters.run_split())
    assert [row["setting"] for row in rows] == ["zipf, one pool", "zipf, static split"]
    assert all(row["failed"] == 0 for row in rows)
    assert all(row["evictions"] > 0 for row in rows)
    assert all(row["cached_tokens"] > 0 for row in rows)
    summary = split.summarize(rows)
    assert summary["kv_without_adapter"] == 0
    assert summary["cached_without_adapter"] < summary["cached_without_adapter_split"]
