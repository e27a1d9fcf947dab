"""One pool beside a static split: the wall holds, the books balance, what is counted is there."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.adapters import split
from benchmarks.adapters.measurement import Bench
from benchmarks.adapters.split import SplitPool, Unpaired
from tests.support.pages import BlocksOfTokens, IdleAdapters
from tests.unit.test_bench_tiers import GRID as SMALL
from vlora.config import Options
from vlora.memory.block_table import BlockTable
from vlora.memory.pool import PagePool, Run
from vlora.memory.prefix import PrefixCache
from vlora.request import Request
from vlora.sampling import SamplingParams

GRID = SMALL | {
    "traces": {"registered": 6},
    "split": {"requests": 48, "room": 2, "kv_requests": 6, "shared": 64, "kinds": ["zipf"]},
}


@pytest.fixture(autouse=True)
def one_thread(_threads_put_back: None) -> None:
    torch.set_num_threads(1)


def test_what_one_pool_lends_the_split_refuses() -> None:
    """Whoever needs more than its side has, with the other side free."""
    more: list[Callable[[PagePool], object]] = [
        lambda pool: pool.allocate(6),
        lambda pool: pool.allocate_run(6),
    ]
    for take in more:
        assert take(PagePool(8)) is not None
        pool = SplitPool(4, 4)
        assert take(pool) is None
        assert pool.free == 8
        pool.check_integrity()
    assert SplitPool(4, 4).can_allocate_run(4, kv_pages=4)
    assert not SplitPool(4, 4).can_allocate_run(5)


def test_each_side_gives_up_its_own_whatever_is_older() -> None:
    pool = SplitPool(2, 2)
    prefix, idle = PrefixCache(pool), IdleAdapters(pool)

    def cache(scope: str) -> BlocksOfTokens:
        held = BlocksOfTokens(BlockTable(pool, 2, prefix), scope, [1, 2])
        assert held.table.grow(2)
        held.table.share(held.keys)
        held.table.clear()
        return held

    cached = [cache(scope) for scope in "ab"]  # older than any adapter
    for _ in range(3):
        run = pool.allocate_run(2)
        assert run is not None
        idle.add(run)
        assert [prefix.count_matching(held.keys) for held in cached] == [1, 1]
    newest = cache("c")  # newer than the adapter, which stays
    assert [prefix.count_matching(held.keys) for held in (*cached, newest)] == [0, 1, 1]
    assert list(idle.runs) == [run]
    pool.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_the_split_keeps_its_books_whatever_is_asked(seed: int) -> None:
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
            page for page in range(pool.total) if pool.is_held(page)
        }
    assert refused, "nothing was ever short"
    assert pool.pages_moved == 0


@pytest.mark.parametrize("side", split.SIDES)
def test_pages_whose_adapter_is_taken_from_them_are_counted(
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
    while len(engine.live_ids) == 2:
        engine.step()
    counted = Unpaired()
    counted.count(engine)
    handle.unpin()  # as nobody may while a request runs
    while handle.resident:
        engine.adapters.evict_oldest()
    counted.count(engine)
    (running,) = engine.scheduler.running
    assert counted.held == [0, len(running.table.pages)]
    pages = engine.pool.kv + engine.pool.cached
    assert counted.cached == [0.0, pytest.approx(engine.pool.cached / pages)]
    assert engine.pool.cached > 0
    assert engine.memory.prefix is not None
    # One pool gives it up first; the split knows nothing of its adapter.
    assert (engine.memory.prefix.oldest_use() == 0) == (side != split.SPLIT)
    engine.adapters.close()


def test_one_pool_keeps_adapters_and_their_keys_together(checkpoint: Path, tmp_path: Path) -> None:
    rows = split.run(Bench(checkpoint, tmp_path, GRID), GRID, lambda what: None)
    assert [row.setting for row in rows] == ["zipf, one pool", "zipf, static split"]
    assert all(row.outcome.failed == 0 and row.more["evictions"] > 0 for row in rows)
    assert all(row.more["cached_tokens"] > 0 for row in rows)
    summary = split.summarize(rows)
    assert summary["kv_without_adapter"] == 0
    assert summary["cached_without_adapter"] < summary["cached_without_adapter_split"]
