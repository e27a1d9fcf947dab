"""Tests of adapters between folders, host memory and pages: residency, eviction and failures."""

from __future__ import annotations

import errno
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from tests.support.adapter_store import (
    ADAPTER_BYTES,
    HIDDEN,
    MATRIX,
    BlockedReads,
    Harness,
    load_and_pack,
    no_free_descriptors,
    small_model,
    write_adapter,
)
from tests.support.calls import calls_of
from tests.support.fakes import RustPanic
from vlora.adapters import catalog, errors, store
from vlora.adapters.catalog import find_folders, stamp_of
from vlora.adapters.store import AdapterStore
from vlora.atmm import op
from vlora.atmm.types import Segment
from vlora.errors import InvalidArgument


def test_pinned_adapters_stay_and_the_least_recently_used_is_evicted(make_harness: Any) -> None:
    harness = make_harness(2)
    harness.request(0)
    harness.request(1)
    harness.request(2)
    assert harness.resident() == {"a1", "a2"}
    harness.handle(1).pin()
    harness.request(0)
    assert harness.resident() == {"a0", "a1"}
    harness.handle(0).pin()
    assert harness.request(3) is harness.handle(3), "the blocked adapter is returned"
    harness.handle(1).unpin()
    harness.request(3)
    assert harness.resident() == {"a0", "a3"}


@pytest.mark.parametrize("host", [None, ADAPTER_BYTES])
def test_adapters_pinned_by_name_are_loaded_at_the_start_and_stay_under_pressure(
    make_harness: Any, host: int | None
) -> None:
    harness = make_harness(3, host, pinned=("a1", "a4", "unknown"))
    assert harness.resident() == {"a1", "a4"}
    for index in (0, 2, 3, 5):
        assert harness.request(index) is None
        assert harness.resident() == {"a1", "a4", f"a{index}"}
    loaded = [(one.name, one.pinned) for one in harness.store.loaded() if one.resident]
    assert loaded[2] == ("a5", False)
    assert {*loaded[:2]} == {("a1", True), ("a4", True)}


def test_a_new_version_of_a_pinned_adapter_is_loaded_as_soon_as_there_are_pages(
    make_harness: Any,
) -> None:
    harness = make_harness(2, pinned=("a1",))
    old = harness.handle(1)
    old.pin()  # A request runs with the old version, and others have all pages.
    old.hold()
    (page,) = harness.pool.allocate(1)
    write_adapter(harness.root / "a1", seed=9)
    harness.reread()
    harness.store.finish()
    assert not harness.handle(1).resident
    harness.pool.release([page])
    harness.store.finish()
    assert harness.handle(1).resident
    old.unpin()
    old.release()
    harness.request(0)
    assert {*harness.store.resident.values()} == {harness.handle(0), harness.handle(1)}


def test_a_pinned_adapter_that_has_become_too_large_is_loaded_for_requests_only(
    make_harness: Any, caplog: pytest.LogCaptureFixture
) -> None:
    harness = make_harness(2, pinned=("a1",))
    harness.store.max_pinned_pages = 0
    write_adapter(harness.root / "a1", seed=9)
    harness.reread()
    harness.store.finish()
    assert "adapter 'a1' is too large to stay pinned" in caplog.text
    assert not harness.handle(1).resident
    harness.request(1)
    harness.request(2, 3)
    assert harness.resident() == {"a2", "a3"}


def test_the_merged_adapter_is_not_evicted(make_harness: Any) -> None:
    harness = make_harness(1)
    harness.request(0)
    harness.store.tiers.residents.protected_slot = harness.handle(0).slot
    assert harness.request(1) is harness.handle(1)
    harness.store.tiers.residents.protected_slot = -1
    assert harness.request(1) is None
    assert harness.resident() == {"a1"}


def test_a_newer_request_does_not_evict_an_older_ones_adapter(make_harness: Any) -> None:
    harness = make_harness(2)
    harness.request(0, 1)
    assert harness.request(0, 1, 2, 3) is harness.handle(2)
    assert harness.resident() == {"a0", "a1"}
    assert harness.request(4, 0, 1) is harness.handle(1), "the newest of three is evicted"
    assert harness.resident() == {"a0", "a4"}


def test_the_work_of_an_eviction_does_not_grow_with_the_number_of_residents(
    tmp_path: Path,
) -> None:
    calls = []
    for count in (30, 120):
        for index in range(count):
            write_adapter(tmp_path / str(count) / f"a{index}", index)
        harness = Harness(small_model(), tmp_path / str(count), count, None)
        for index in range(count):
            harness.request(index)
        assert len(harness.resident()) == count
        calls.append(calls_of(lambda pool=harness.pool: pool.allocate(16)).total())
        assert len(harness.resident()) == count - 16
        harness.store.close()
    assert calls[1] <= 1.1 * calls[0]


def test_host_copies_stay_within_the_budget_unless_they_are_in_use(make_harness: Any) -> None:
    harness = make_harness(2, 3 * ADAPTER_BYTES)
    assert harness.store.tiers.host.used_bytes == 3 * ADAPTER_BYTES
    harness.request(3, 4)
    assert harness.resident() == {"a3", "a4"}
    for index in (0, 1, 2, 5):
        harness.request(index)
        assert harness.store.tiers.host.used_bytes <= 3 * ADAPTER_BYTES
    counted = harness.store.tiers.counters
    assert counted.loads >= 3
    assert counted.host_evictions >= counted.loads
    held = harness.handle(5)
    held.hold()
    harness.request(0, 1)
    harness.request(2, 3)
    assert held.adapter is not None
    held.release()


def test_one_load_serves_all_waiting_requests(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(4, 0)
    blocked = BlockedReads(monkeypatch)
    for _ in range(5):
        assert harness.store.advance([harness.handle(0)] * 3) is None, (
            "no adapter found too few pages"
        )
    blocked.allow.set()
    harness.request(0)
    assert harness.resident() == {"a0"}
    assert blocked.reads == ["a0"]


def test_prefetch_stays_within_the_host_budget_and_loads_nothing_twice(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(1, 3 * ADAPTER_BYTES)  # The host tier holds a0 to a2.
    harness.request(0)
    blocked = BlockedReads(monkeypatch)
    harness.handle(0).pin()
    for _ in range(4):
        harness.store.advance([harness.handle(i) for i in (3, 4, 5, 1)])
    blocked.allow.set()
    harness.store.finish()
    assert blocked.reads == ["a3", "a4"], "a0 is in use"
    harness.handle(0).unpin()
    for index in (3, 4):
        assert harness.request(index) is None
    assert blocked.reads == ["a3", "a4"]


def test_adapters_in_host_memory_are_packed_while_the_disk_is_slow(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(2, 2 * ADAPTER_BYTES)
    blocked = BlockedReads(monkeypatch)
    monkeypatch.setattr(store, "INLINE_PACK_BYTES", 0)
    packed = threading.Event()
    harness.store.workers.on_post = packed.set
    harness.store.advance([harness.handle(5), harness.handle(0)])
    assert packed.wait(60)
    harness.store.apply()
    assert harness.resident() == {"a0"}
    blocked.allow.set()
    harness.request(5)
    assert harness.resident() == {"a0", "a5"}


def test_a_waiting_adapter_takes_no_page_that_a_running_request_will_need(
    make_harness: Any,
) -> None:
    harness = make_harness(3)
    harness.request(0)
    harness.pool.allocate(1)
    assert harness.store.advance([harness.handle(0), harness.handle(1)], 1) is harness.handle(1)
    assert harness.request(0, 1) is None, "no request is running any more"


def test_a_small_adapter_is_packed_between_two_steps(make_harness: Any) -> None:
    harness = make_harness(2)
    harness.request(0, 1)
    assert harness.store.advance([harness.handle(2), harness.handle(1)]) is None
    assert harness.resident() == {"a1", "a2"}, "already, without the packer"
    harness.store.check_integrity()


def test_a_large_adapter_is_packed_by_the_packer_thread(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(1)
    monkeypatch.setattr(store, "INLINE_PACK_BYTES", 0)
    packed: list[str] = []
    put = harness.group.put

    def record_and_put(slot: int, pairs: Any, *more: Any) -> None:
        if any(pairs):
            packed.append(threading.current_thread().name)
        put(slot, pairs, *more)

    monkeypatch.setattr(harness.group, "put", record_and_put)
    assert harness.request(3) is None
    assert harness.resident() == {"a3"}
    assert [name.partition("_")[0] for name in packed] == ["adapter-packer"]


def test_an_adapter_in_bf16_has_no_copy_besides_the_host_copy_and_the_packed_one(
    root: Path,
) -> None:
    store = AdapterStore(small_model(), dtype=torch.bfloat16)
    group = store.slots.group([MATRIX])
    load_and_pack(store, find_folders(root, {}))
    handle = store.handle("a0")
    assert handle.adapter is not None
    assert handle.slot is not None
    kept, pair = group.pairs[0][handle.slot], handle.adapter.pairs[MATRIX]
    assert kept is not None
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in pair]
    rounded = [factor.bfloat16().float() for factor in pair]
    x, segments = torch.randn(3, HIDDEN), [Segment(0, 3, handle.slot)]
    reference, compiled = torch.zeros(2, 3, HIDDEN)
    op.apply(reference, x, segments, group, backend="reference")
    torch.testing.assert_close(reference, x @ rounded[0].T @ rounded[1].T)
    op.apply(compiled, x, segments, group)
    torch.testing.assert_close(compiled, reference, rtol=0.02, atol=0.1)
    store.close()


def test_a_failed_pack_releases_its_pages(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(1)

    put = harness.group.put

    def fails(slot: int, pairs: Any, *more: Any) -> None:
        if any(pairs):
            raise MemoryError("no memory for a copy")
        put(slot, pairs, *more)

    with monkeypatch.context() as patch:
        patch.setattr(harness.group, "put", fails)
        handle = harness.handle(0)
        for second in range(errors.MAX_ATTEMPTS):
            harness.store.folders.clock = lambda now=60.0 * second: now
            assert handle.error is None
            harness.store.advance([handle])
            harness.store.finish()
    with pytest.raises(InvalidArgument, match=r"adapter 'a0'.*no memory for a copy"):
        harness.handle(0)
    assert harness.request(1) is None
    assert harness.resident() == {"a1"}


def test_a_version_that_cannot_be_read_for_now_is_read_later_and_the_old_one_serves(
    make_harness: Any, root: Path
) -> None:
    harness = make_harness(2)
    now = 0.0
    harness.store.folders.clock = lambda: now
    old = harness.handle(0)
    write_adapter(root / "a0", 50)
    write_adapter(root / "new", 51)
    changed = {path.name: (path, stamp_of(path)) for path in root.iterdir()}
    with no_free_descriptors():
        harness.store.folders.update(changed)
    harness.store.apply()
    assert harness.handle(0) is old
    assert set(harness.store.table.broken) == {"new"}
    harness.store.folders.retry()
    harness.store.apply()
    assert harness.handle(0) is old, "it is not due yet"
    now = 1.0
    with no_free_descriptors():
        harness.store.folders.retry()
    now = 1.0 + 2 * errors.FIRST_WAIT_SECONDS
    harness.store.folders.retry()
    harness.store.apply()
    assert harness.handle(0).info.digest not in ("", old.info.digest)
    assert not harness.store.table.broken
    newest = harness.handle(0)
    now = 100.0
    harness.store.folders.retry()
    harness.store.apply()
    assert harness.handle(0) is newest, "nothing is left to read"


@pytest.mark.parametrize("failures", [1, errors.MAX_ATTEMPTS])
def test_a_load_without_free_descriptors_is_tried_again(make_harness: Any, failures: int) -> None:
    harness = make_harness(2, 0)
    now = 0.0
    harness.store.folders.clock = lambda: now
    asked = harness.handle(0)
    for _ in range(failures):
        with no_free_descriptors():
            harness.store.advance([asked])
            harness.store.finish()
        harness.store.advance([asked])
        harness.store.finish()
        assert not asked.resident, "the next attempt is not due yet"
        now += errors.MAX_WAIT_SECONDS
    if failures == errors.MAX_ATTEMPTS:
        assert "Too many open files" in str(asked.error)
        assert set(harness.store.table.broken) == {"a0"}
        harness.store.folders.retry()
        harness.store.apply()
        assert harness.handle(0) is not asked
    harness.request(0)
    assert harness.resident() == {"a0"}


def test_the_number_of_an_error_decides_whether_it_is_transient() -> None:
    def read(cause: BaseException) -> InvalidArgument:
        try:
            raise InvalidArgument("os error 5") from cause
        except InvalidArgument as error:
            return error

    for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.EACCES):
        assert errors.is_transient(read(OSError(number, "")))
    assert errors.is_transient(MemoryError())
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert errors.is_transient(caught.value)
    assert errors.is_transient(read(SafetensorError("Error: read failed (os error 5)")))
    for cause in (
        OSError(errno.ENOENT, ""),
        OSError(errno.ELOOP, ""),
        SafetensorError("InvalidHeader"),
        SafetensorError("Error: no such file (os error 2)"),
        ValueError("os error 5"),
        EOFError(),
    ):
        assert not errors.is_transient(read(cause)), cause
    assert not errors.is_transient(InvalidArgument("os error 5"))


def test_a_panic_while_weights_are_loaded_is_an_error_of_their_adapter(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: Any) -> Any:
        raise RustPanic("index out of bounds")

    harness = make_harness(2, 0)
    handle = harness.handle(0)
    with monkeypatch.context() as patch:
        patch.setattr(store, "read_adapter", panic)
        harness.store.advance([handle])
        harness.store.finish()
    with pytest.raises(InvalidArgument, match=r"adapter 'a0'.*index out of bounds"):
        harness.handle(0)
    assert harness.request(1) is None


@pytest.mark.parametrize("error", [RustPanic("index out of bounds"), MemoryError("\ud800")])
def test_an_unexpected_error_while_a_folder_is_read_is_one_of_its_adapter(
    make_harness: Any, root: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    describe = catalog.describe_adapter

    def fail(name: str, *more: Any) -> Any:
        if name == "new":
            raise error
        return describe(name, *more)

    harness = make_harness(1)
    for number, name in enumerate(("new", "newer")):
        write_adapter(root / name, 50 + number)
    monkeypatch.setattr(catalog, "describe_adapter", fail)
    harness.reread()
    assert set(harness.store.table.broken) == {"new"}
    assert "newer" in harness.store.names()
    message = str(harness.store.table.broken["new"])
    assert re.match(r"adapter 'new': .*/new failed to load", message)
    message.encode()


def test_adapters_are_loaded_while_no_thread_can_be_started(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    harness = make_harness(2, 0)
    monkeypatch.setattr(threading.Thread, "start", fail)
    assert harness.request(0) is None
    assert harness.resident() == {"a0"}
