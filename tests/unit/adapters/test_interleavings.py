"""Tests of worker results that meet changes of folders, evictions and requests in any order.

A test runs the workers' jobs itself, on its own thread, and so determines their order.
"""

from __future__ import annotations

import random
import shutil
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.adapter_store import ADAPTER_BYTES, Harness, write_adapter
from vlora.adapters import store
from vlora.adapters.handle import TRANSITIONS, AdapterHandle, AdapterState


class SteppedThread:
    """Executor whose jobs run when the test calls `run_next`."""

    def __init__(self, *_: object) -> None:
        self.jobs: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def run_next(self) -> None:
        self.jobs.popleft()()

    def shutdown(self) -> None:
        self.jobs.clear()


@pytest.fixture
def make_stepped(make_harness: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that makes (harness, loader, packer). Only the packer packs adapters."""
    threads: list[SteppedThread] = []

    def thread(*_: object) -> SteppedThread:
        threads.append(SteppedThread())
        return threads[-1]

    monkeypatch.setattr(store, "ThreadPoolExecutor", thread)
    monkeypatch.setattr(store, "INLINE_PACK_BYTES", 0)

    def make(pages: int, host: int | None = None) -> tuple[Harness, SteppedThread, SteppedThread]:
        harness = make_harness(pages, host)
        loader, packer = threads[-2:]
        for started in (loader, packer):
            started.run_next()  # This job only starts the thread.
        return harness, loader, packer

    return make


def check(harness: Harness, handles: set[AdapterHandle]) -> None:
    """Check what holds at any time, whatever the workers are doing."""
    harness.pool.check_integrity()
    packing = sum(handle.state is AdapterState.PACKING for handle in handles)
    assert harness.pool.adapter == packing + len(harness.store.resident)
    copies = sum(handle.adapter is not None for handle in handles)
    assert harness.store.tiers.host.used_bytes == copies * ADAPTER_BYTES
    for handle in handles:
        handle.check_integrity()
    for slot, handle in harness.store.resident.items():
        assert handle.digest
        assert handle.adapter is not None
        assert harness.store.slots.adapter(slot) is handle.adapter


def test_a_version_never_gets_a_second_digest(make_stepped: Any) -> None:
    harness, loader, _ = make_stepped(2, ADAPTER_BYTES)
    handle = harness.handle(0)
    digest = handle.digest
    harness.store.advance([harness.handle(1)])
    loader.run_next()
    harness.store.apply()
    assert handle.state is AdapterState.ON_DISK
    assert handle.digest == digest
    write_adapter(handle.folder, 77)
    handle.stamp = harness.store.folders.stamps["a0"][1]
    harness.store.advance([handle])
    loader.run_next()
    harness.store.apply()
    assert handle.state is AdapterState.FAILED
    assert handle.digest == digest


def test_every_state_can_be_reached_and_left_as_the_table_says() -> None:
    assert set(TRANSITIONS) == set(AdapterState)
    reached = {AdapterState.ON_DISK}
    for _ in AdapterState:
        reached |= {after for state in reached for after in TRANSITIONS[state]}
    assert reached == set(AdapterState)
    assert [state for state in AdapterState if not TRANSITIONS[state]] == [AdapterState.FAILED]


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_results_changes_and_requests_leaves_a_consistent_store(
    make_stepped: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random steps of all threads; every transition outside of the table is an AssertionError."""
    draw = random.Random(seed)
    harness, loader, packer = make_stepped(3, draw.choice([0, 2, 4]) * ADAPTER_BYTES)
    store, held, seen, states = harness.store, [], set(), set()
    now = 0.0
    store.folders.clock = lambda: now
    failing = False
    put = harness.group.put

    def put_or_fail(slot: int, pairs: Any, *more: Any) -> None:
        if failing and any(pairs):
            raise draw.choice([MemoryError(), ValueError()])
        put(slot, pairs, *more)

    monkeypatch.setattr(harness.group, "put", put_or_fail)

    def known() -> list[AdapterHandle]:
        return [store.handle(name) for name in store.names()]

    for step in range(250):
        match draw.randrange(9):
            case 0 | 1:
                store.advance(draw.sample(known(), min(3, len(known()))), draw.randrange(2))
            case 2 if loader.jobs:
                loader.run_next()
            case 3 if packer.jobs:
                failing = draw.random() < 0.1
                packer.run_next()
                failing = False
            case 4:
                store.apply()
            case 5:
                folder = harness.root / f"a{draw.randrange(6)}"
                if draw.random() < 0.3:
                    shutil.rmtree(folder, ignore_errors=True)
                else:
                    write_adapter(folder, step)
            case 6:
                harness.reread()
                store.folders.retry()
                store.apply()
            case 7 if store.resident:
                handle = draw.choice(list(store.resident.values()))
                handle.hold()
                handle.pin()
                held.append(handle)
            case 8 if held:
                handle = held.pop(draw.randrange(len(held)))
                handle.unpin()
                handle.release()
        now += draw.random()
        seen |= set(known())
        states |= {handle.state for handle in seen}
        check(harness, seen)
    assert states >= set(AdapterState) - {AdapterState.FAILED}
    while held:
        handle = held.pop()
        handle.unpin()
        handle.release()
    while loader.jobs or packer.jobs:
        (loader if loader.jobs else packer).run_next()
    now += 100.0
    for index in range(6):
        write_adapter(harness.root / f"a{index}", index)
    harness.reread()
    for index in range(6):
        while not harness.handle(index).resident:
            store.advance([harness.handle(index)])
            while loader.jobs or packer.jobs:
                (loader if loader.jobs else packer).run_next()
            store.apply()
    seen |= set(known())
    check(harness, seen)
    store.check_integrity()
    assert all(handle.adapter is None for handle in seen if handle.obsolete and not handle.resident)
