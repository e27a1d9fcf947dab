"""Tests of an adapter's versions: which one requests get, and when an old one is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.adapter_store import write_adapter
from vlora.adapters import catalog
from vlora.adapters.files import Adapter, read_adapter


def test_new_requests_get_the_new_version_and_running_ones_keep_the_old_one(
    make_harness: Any, root: Path
) -> None:
    harness = make_harness(2)
    harness.request(0)
    old = harness.handle(0)
    old.hold()
    old.pin()
    write_adapter(root / "a0", 77)
    harness.reread()
    new = harness.handle(0)
    assert new is not old
    harness.request(0)
    assert old.resident
    assert new.resident
    assert new.info.digest != old.info.digest
    old.unpin()
    old.release()
    harness.request(1)
    assert not old.resident, "no request can use it again"
    assert old.adapter is None


def test_a_version_that_its_name_no_longer_means_is_evicted_first(
    make_harness: Any, root: Path
) -> None:
    harness = make_harness(3)
    harness.request(1, 2)
    harness.request(0)
    old = harness.handle(0)
    old.hold()
    old.pin()
    write_adapter(root / "a0", 77)
    harness.reread()
    old.unpin()
    old.release()
    old.last_used = harness.pool.tick()  # As of a request that has just ended.
    harness.request(3)
    assert harness.resident() == {"a1", "a2", "a3"}
    assert not old.resident


def test_files_that_change_while_they_are_read_are_no_version(
    make_harness: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of another version must not be served under the stamp of an earlier one."""

    def replace_and_read(*files: Any) -> Adapter:
        write_adapter(root / "a0", 78)
        return read_adapter(*files)

    harness = make_harness(2)
    old = harness.handle(0)
    write_adapter(root / "a0", 77)
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "read_adapter", replace_and_read)
        harness.reread()
    assert harness.handle(0) is old
    harness.reread()
    assert harness.handle(0).info.digest not in ("", old.info.digest)
