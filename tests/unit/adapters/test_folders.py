"""Tests of scans of the adapter folders: what they find, and which changes they report."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapter_store import no_free_descriptors, small_model, write_adapter
from vlora.adapters import catalog
from vlora.adapters.catalog import FolderWatch, find_folders, read_each, stamp_of
from vlora.adapters.files import load_adapter
from vlora.adapters.tensors import WeightsReader


def test_a_watch_reports_settled_folders_once(root: Path) -> None:
    reported: list[dict[str, Any]] = []
    watch = FolderWatch(lambda: find_folders(root, {}), lambda now: reported.append(dict(now)))
    known = {path.name: (path, stamp_of(path)) for path in sorted(root.iterdir())}
    watch._reported = dict(known)
    watch.look(0.0)
    assert not reported
    write_adapter(root / "a0", 50)
    (root / "a1" / "adapter_config.json").unlink()
    watch.look(1.0)
    write_adapter(root / "a0", 51)  # It is still being written.
    watch.look(1.9)
    watch.look(2.0 + catalog.SETTLED_SECONDS / 2)
    assert [name for name in known if reported[-1][name] != known[name]] == ["a1"]
    watch.look(3.0)
    assert [name for name in known if reported[-1][name] != known[name]] == ["a0", "a1"]
    count = len(reported)
    watch.look(9.0)
    assert len(reported) == count
    for file in (root / "a2").iterdir():
        file.unlink()
    (root / "a2").rmdir()
    watch.look(10.0)
    assert "a2" not in reported[-1]


@pytest.mark.skipif(catalog._native() is None, reason="the core is not compiled")
def test_the_core_and_python_find_the_same_folders_and_stamps(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "dangling").symlink_to(root / "nowhere")
    (root / "linked").symlink_to(root / "a1")
    (root / "loop").symlink_to(root / "loop")
    (root / "file").write_text("no folder")
    (root / ".hidden").mkdir()
    (root / os.fsdecode(b"\xff\xfe")).mkdir()
    (root / "a2" / "dangling").symlink_to(root / "nowhere")
    (root / "a2" / "b").mkdir()
    paths = [*map(os.fsencode, root.iterdir()), b"/none/such", b"a\0b"]
    stamps, names = catalog.stamps_of(paths), catalog.folders_in(root)
    assert {"a0", "dangling", "linked", "loop", "\udcff\udcfe"} <= set(names)
    assert not {"file", ".hidden"} & set(names)
    assert len(set(stamps)) == len(paths) - 3, (
        "links have the stamps of their targets: a1, and twice a missing one; two are empty"
    )
    monkeypatch.setattr(catalog, "_native", lambda: None)
    assert catalog.stamps_of(paths) == stamps
    assert catalog.folders_in(root) == names


@pytest.mark.parametrize("in_core", [False, True])
def test_weights_that_are_overwritten_in_place_with_the_same_size_and_time_are_new(
    root: Path, in_core: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_core:
        monkeypatch.setattr(catalog, "_native", lambda: None)
    elif catalog._native() is None:
        pytest.skip("the core is not compiled")
    before = stamp_of(root / "a0")
    file = root / "a0" / "adapter_model.safetensors"
    status = file.stat()
    content = file.read_bytes()
    time.sleep(0.02)  # The clock of file systems has steps of up to 10 ms.
    with file.open("r+b") as opened:
        opened.write(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_ino) == (status.st_size, status.st_ino)
    assert stamp_of(root / "a0") != before


def test_a_finder_returns_the_same_object_until_a_folder_is_added_or_removed(root: Path) -> None:
    find = catalog.FolderFinder(root, {"alias": "a1"})
    first = find()
    assert first == find_folders(root, {"alias": "a1"})
    assert find() is first
    write_adapter(root / "a9", 9)
    assert set(find()) == {*first, "a9"}


def test_the_removal_of_the_last_folder_is_reported(root: Path) -> None:
    for path in sorted(root.iterdir())[1:]:
        shutil.rmtree(path)
    reported: list[dict[str, Any]] = []
    find = catalog.FolderFinder(root, {})
    watch = FolderWatch(find, lambda now: reported.append(dict(now)))
    watch._reported = {"a0": (root / "a0", stamp_of(root / "a0"))}
    watch.look(0.0)
    watch.look(1.0)
    assert not reported
    shutil.rmtree(root / "a0")
    watch.look(2.0)
    assert reported == [{}]
    write_adapter(root / "a0", 1)
    watch.look(3.0)
    watch.look(3.0 + catalog.SETTLED_SECONDS)
    assert list(reported[-1]) == ["a0"]


def test_a_scan_without_free_file_descriptors_reports_no_change(root: Path) -> None:
    reported: list[dict[str, Any]] = []
    known = {path.name: (path, stamp_of(path)) for path in sorted(root.iterdir())}
    paths = {name: path for name, (path, _) in known.items()}
    watch = FolderWatch(lambda: paths, lambda now: reported.append(dict(now)))
    watch._reported = dict(known)
    with no_free_descriptors():
        assert set(catalog.stamps_of([os.fsencode(root)])) == {b"!%d" % errno.EMFILE}
        for second in range(5):
            watch.look(float(second))
    assert not reported
    write_adapter(root / "a0", 50)
    watch.look(6.0)
    watch.look(6.0 + catalog.SETTLED_SECONDS)
    assert [name for name in known if reported[-1][name] != known[name]] == ["a0"]


def test_a_root_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    reported: list[Any] = []
    watch = FolderWatch(lambda: find_folders(tmp_path / "gone", {}), reported.append)
    watch._reported = {"a": (tmp_path, b"")}
    watch.look(0.0)
    assert not reported


def test_adapters_are_listed_with_the_weights_of_one_at_a_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "broken").mkdir()
    alive: list[weakref.ref[Any]] = []
    read = WeightsReader.read

    def counted(*args: Any) -> Any:
        gc.collect()
        assert not [reference for reference in alive if reference() is not None]
        pairs, digest = read(*args)
        alive.extend(weakref.ref(factor) for pair in pairs.values() for factor in pair)
        return pairs, digest

    monkeypatch.setattr(WeightsReader, "read", counted)
    model = small_model()
    infos, errors = read_each(
        find_folders(root, {}), lambda name, folder: load_adapter(name, folder, model).info
    )
    assert list(infos) == [f"a{index}" for index in range(6)]
    assert all(info.digest for info in infos.values())
    assert set(errors) == {"broken"}
    assert "adapter 'broken': adapter_config.json" in str(errors["broken"])
