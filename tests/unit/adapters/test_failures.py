"""Tests of adapters that cannot be read, loaded or packed, temporarily or permanently."""

from __future__ import annotations

import errno
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from tests.support.adapter_store import no_free_descriptors, write_adapter
from tests.support.fakes import RustPanic
from vlora.adapters import catalog, errors, store
from vlora.adapters.catalog import stamp_of
from vlora.errors import InvalidArgument


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
