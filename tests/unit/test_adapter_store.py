"""Adapters between folders, host memory and pages, without a model."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from vlora.atmm import op
from vlora.atmm.types import Segment
from vlora.errors import InvalidArgument
from vlora.lora import folders, store, transient
from vlora.lora.adapter import AdapterFiles
from vlora.lora.folders import FolderWatch, find_folders, stamp_of
from vlora.lora.handle import AdapterHandle
from vlora.lora.model_shape import ModelShape
from vlora.lora.store import AdapterStore
from vlora.lora.weights_reader import WeightsReader
from vlora.memory.pool import PagePool

HIDDEN, RANK, PAGE = 32, 4, 4096
MATRIX = (0, "q_proj")
STEM = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


class Memory:
    """Pages of plain bytes."""

    page_bytes = PAGE

    def __init__(self, pages: int) -> None:
        raw = torch.zeros((pages + 1) * PAGE, dtype=torch.uint8)
        self.bytes = raw[-raw.data_ptr() % 64 :][: pages * PAGE].view(pages, PAGE)

    def address(self, page: int) -> int:
        return self.bytes.data_ptr() + page * PAGE

    def clear(self, pages: range) -> None:
        self.bytes[list(pages)] = 0


def write(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((RANK, HIDDEN), (HIDDEN, RANK)))
    save_file({f"{STEM}A.weight": a, f"{STEM}B.weight": b}, folder / "new")
    (folder / "new").rename(folder / "adapter_model.safetensors")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for index in range(6):
        write(tmp_path / f"a{index}", index)
    return tmp_path


@pytest.fixture
def model() -> ModelShape:
    shapes = {"q_proj": (HIDDEN, HIDDEN)}
    return ModelShape(1, HIDDEN, 8, shapes, "model.", lambda: torch.zeros(0), tuple)


class Harness:
    """Store over `root` with `pages` pages; each adapter's run takes one."""

    def __init__(self, model: ModelShape, root: Path, pages: int, host: int | None) -> None:
        self.store = AdapterStore(model, host_bytes=host)
        self.group = self.store.group([MATRIX])
        self.store.load(find_folders(root, {}), make_resident=False)
        self.pool, self.memory = PagePool(pages), Memory(pages)
        self.store.attach(self.pool, self.memory, 0)

    def handle(self, index: int) -> AdapterHandle:
        return self.store.handle(f"a{index}")

    def request(self, *indices: int) -> AdapterHandle | None:
        """Advance as often as loading and packing need, and return the adapter that found too
        few pages."""
        blocking = None
        for _ in range(3):
            blocking = self.store.advance([self.handle(i) for i in indices])
            self.store.finish()
        self.pool.check_integrity()
        self.store.check_integrity()
        return blocking

    def resident(self) -> set[str]:
        return {handle.name for handle in self.store.resident.values()}


ADAPTER_BYTES = 2 * RANK * HIDDEN * 4
"""Size of an adapter in host memory."""


@pytest.fixture
def make_harness(model: ModelShape, root: Path) -> Iterator[Any]:
    harnesses: list[Harness] = []

    def make(pages: int, host: int | None = None) -> Harness:
        harnesses.append(Harness(model, root, pages, host))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.store.close()


def test_slots_compute_with_the_weights_of_the_folders_wherever_they_are_packed(
    make_harness: Any, root: Path
) -> None:
    harness = make_harness(2)
    for indices in ((0, 1), (2,), (3, 0), (1, 5)):
        harness.request(*indices)
        for index in indices:
            handle = harness.handle(index)
            assert handle.slot is not None
            pair = (
                AdapterFiles(handle.name, handle.folder, harness.store._model).read().pairs[MATRIX]
            )
            x = torch.randn(3, HIDDEN)
            y = torch.zeros(3, HIDDEN)
            op.apply(y, x, [Segment(0, 3, handle.slot)], harness.group)
            torch.testing.assert_close(y, x @ pair.a.T @ pair.b.T, rtol=1e-4, atol=1e-4)
    assert len(harness.group) <= 2, "slots are used again"


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


def test_the_merged_adapter_is_not_evicted(make_harness: Any) -> None:
    harness = make_harness(1)
    harness.request(0)
    harness.store.protected_slot = harness.handle(0).slot
    assert harness.request(1) is harness.handle(1)
    harness.store.protected_slot = -1
    assert harness.request(1) is None
    assert harness.resident() == {"a1"}


def test_a_newer_request_does_not_evict_an_older_ones_adapter(make_harness: Any) -> None:
    harness = make_harness(2)
    harness.request(0, 1)
    assert harness.request(0, 1, 2, 3) is harness.handle(2)
    assert harness.resident() == {"a0", "a1"}
    assert harness.request(4, 0, 1) is harness.handle(1), "the newest of three is evicted"
    assert harness.resident() == {"a0", "a4"}


def test_host_copies_stay_within_the_budget_unless_they_are_in_use(make_harness: Any) -> None:
    harness = make_harness(2, 3 * ADAPTER_BYTES)
    assert harness.store.host_bytes == 3 * ADAPTER_BYTES
    harness.request(3, 4)
    assert harness.resident() == {"a3", "a4"}
    for index in (0, 1, 2, 5):
        harness.request(index)
        assert harness.store.host_bytes <= 3 * ADAPTER_BYTES
    counted = harness.store.counters
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


class BlockedReads:
    """Reads of weights that wait for `allow`; `reads` has the adapters' names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[str] = []
        self.allow = threading.Event()
        read = WeightsReader.read

        def wait_and_read(reader: WeightsReader, path: Path, invalid: Any) -> Any:
            self.reads.append(path.parent.name)
            assert self.allow.wait(10)
            return read(reader, path, invalid)

        monkeypatch.setattr(WeightsReader, "read", wait_and_read)


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
    packed = threading.Event()
    harness.store.on_change = packed.set
    harness.store.advance([harness.handle(5), harness.handle(0)])
    assert packed.wait(10)
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
        for second in range(transient.MAX_ATTEMPTS):
            harness.store.clock = lambda now=60.0 * second: now
            assert handle.error is None
            harness.store.advance([handle])
            harness.store.finish()
    with pytest.raises(InvalidArgument, match=r"adapter 'a0'.*no memory for a copy"):
        harness.handle(0)
    assert harness.request(1) is None
    assert harness.resident() == {"a1"}


def test_a_watch_reports_settled_folders_once(root: Path) -> None:
    reported: list[dict[str, Any]] = []
    watch = FolderWatch(lambda: find_folders(root, {}), lambda now: reported.append(dict(now)))
    known = {path.name: (path, stamp_of(path)) for path in sorted(root.iterdir())}
    watch._reported = dict(known)
    watch.look(0.0)
    assert not reported
    write(root / "a0", 50)
    (root / "a1" / "adapter_config.json").unlink()
    watch.look(1.0)
    write(root / "a0", 51)  # It is still being written.
    watch.look(1.9)
    watch.look(2.0 + folders.SETTLED_SECONDS / 2)
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


@pytest.mark.skipif(folders._native() is None, reason="the core is not compiled")
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
    stamps, names = folders.stamps_of(paths), folders.folders_in(root)
    assert {"a0", "dangling", "linked", "loop", "\udcff\udcfe"} <= set(names)
    assert not {"file", ".hidden"} & set(names)
    assert len(set(stamps)) == len(paths) - 3, (
        "links have the stamps of their targets: a1, and twice a missing one; two are empty"
    )
    monkeypatch.setattr(folders, "_native", lambda: None)
    assert folders.stamps_of(paths) == stamps
    assert folders.folders_in(root) == names


def test_a_finder_returns_the_same_object_until_a_folder_is_added_or_removed(root: Path) -> None:
    find = folders.FolderFinder(root, {"alias": "a1"})
    first = find()
    assert first == find_folders(root, {"alias": "a1"})
    assert find() is first
    write(root / "a9", 9)
    assert set(find()) == {*first, "a9"}


def test_the_removal_of_the_last_folder_is_reported(root: Path) -> None:
    for path in sorted(root.iterdir())[1:]:
        shutil.rmtree(path)
    reported: list[dict[str, Any]] = []
    find = folders.FolderFinder(root, {})
    watch = FolderWatch(find, lambda now: reported.append(dict(now)))
    watch._reported = {"a0": (root / "a0", stamp_of(root / "a0"))}
    watch.look(0.0)
    watch.look(1.0)
    assert not reported
    shutil.rmtree(root / "a0")
    watch.look(2.0)
    assert reported == [{}]
    write(root / "a0", 1)
    watch.look(3.0)
    watch.look(3.0 + folders.SETTLED_SECONDS)
    assert list(reported[-1]) == ["a0"]


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Let every attempt to open a file fail with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_look_without_free_descriptors_reports_nothing(root: Path) -> None:
    reported: list[dict[str, Any]] = []
    known = {path.name: (path, stamp_of(path)) for path in sorted(root.iterdir())}
    paths = {name: path for name, (path, _) in known.items()}
    watch = FolderWatch(lambda: paths, lambda now: reported.append(dict(now)))
    watch._reported = dict(known)
    with no_free_descriptors():
        assert set(folders.stamps_of([os.fsencode(root)])) == {b"!%d" % errno.EMFILE}
        for second in range(5):
            watch.look(float(second))
    assert not reported
    write(root / "a0", 50)
    watch.look(6.0)
    watch.look(6.0 + folders.SETTLED_SECONDS)
    assert [name for name in known if reported[-1][name] != known[name]] == ["a0"]


def test_a_version_that_cannot_be_read_for_now_is_read_later_and_the_old_one_serves(
    make_harness: Any, root: Path
) -> None:
    harness = make_harness(2)
    now = 0.0
    harness.store.clock = lambda: now
    old = harness.handle(0)
    write(root / "a0", 50)
    write(root / "new", 51)
    changed = {path.name: (path, stamp_of(path)) for path in root.iterdir()}
    with no_free_descriptors():
        harness.store.update(changed)
    assert harness.handle(0) is old
    assert set(harness.store.broken) == {"new"}
    harness.store.retry()
    assert harness.handle(0) is old, "it is not due yet"
    now = 1.0
    with no_free_descriptors():
        harness.store.retry()
    now = 1.0 + 2 * transient.FIRST_WAIT_SECONDS
    harness.store.retry()
    assert harness.handle(0).info.digest not in ("", old.info.digest)
    assert not harness.store.broken
    newest = harness.handle(0)
    now = 100.0
    harness.store.retry()
    assert harness.handle(0) is newest, "nothing is left to read"


@pytest.mark.parametrize("failures", [1, transient.MAX_ATTEMPTS])
def test_a_load_without_free_descriptors_is_tried_again(make_harness: Any, failures: int) -> None:
    harness = make_harness(2, 0)
    now = 0.0
    harness.store.clock = lambda: now
    asked = harness.handle(0)
    for _ in range(failures):
        with no_free_descriptors():
            harness.store.advance([asked])
            harness.store.finish()
        harness.store.advance([asked])
        harness.store.finish()
        assert not asked.resident, "the next attempt is not due yet"
        now += transient.MAX_WAIT_SECONDS
    if failures == transient.MAX_ATTEMPTS:
        assert "Too many open files" in str(asked.error)
        assert set(harness.store.broken) == {"a0"}
        harness.store.retry()
        assert harness.handle(0) is not asked
    harness.request(0)
    assert harness.resident() == {"a0"}


def test_errors_are_told_apart_by_their_number() -> None:
    def read(cause: BaseException) -> InvalidArgument:
        try:
            raise InvalidArgument("os error 5") from cause
        except InvalidArgument as error:
            return error

    for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.EACCES):
        assert transient.is_transient(read(OSError(number, "")))
    assert transient.is_transient(MemoryError())
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert transient.is_transient(caught.value)
    assert transient.is_transient(read(SafetensorError("Error: read failed (os error 5)")))
    for cause in (
        OSError(errno.ENOENT, ""),
        OSError(errno.ELOOP, ""),
        SafetensorError("InvalidHeader"),
        SafetensorError("Error: no such file (os error 2)"),
        ValueError("os error 5"),
        EOFError(),
    ):
        assert not transient.is_transient(read(cause)), cause
    assert not transient.is_transient(InvalidArgument("os error 5"))


def test_a_root_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    reported: list[Any] = []
    watch = FolderWatch(lambda: find_folders(tmp_path / "gone", {}), reported.append)
    watch._reported = {"a": (tmp_path, b"")}
    watch.look(0.0)
    assert not reported


def test_new_requests_get_the_new_version_and_running_ones_keep_the_old_one(
    make_harness: Any, root: Path
) -> None:
    harness = make_harness(2)
    harness.request(0)
    old = harness.handle(0)
    old.hold()
    old.pin()
    write(root / "a0", 77)
    harness.store.update({p.name: (p, stamp_of(p)) for p in sorted(root.iterdir())})
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
    write(root / "a0", 77)
    harness.store.update({p.name: (p, stamp_of(p)) for p in sorted(root.iterdir())})
    old.unpin()
    old.release()
    old.last_used = harness.pool.tick()  # As of a request that has just ended.
    harness.request(3)
    assert harness.resident() == {"a1", "a2", "a3"}
    assert not old.resident


class PausedRemovals(set[AdapterHandle]):
    """Set of handles; a removal waits for `allow`, or a moment if that never comes."""

    def __init__(self, handles: set[AdapterHandle]) -> None:
        super().__init__(handles)
        self.entered, self.allow = threading.Event(), threading.Event()

    def remove(self, handle: AdapterHandle) -> None:
        self.entered.set()
        self.allow.wait(0.3)
        super().remove(handle)


def test_a_copy_that_is_dropped_while_it_is_packed_leaves_no_adapter_without_its_digest(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "INLINE_PACK_BYTES", 0)
    harness = make_harness(2, 2 * ADAPTER_BYTES)
    harness.handle(1).hold()
    host, pages_of = harness.store._host, harness.store.pages_of
    host._handles = handles = PausedRemovals(host._handles)

    def make_space() -> None:
        with harness.store._lock:
            host.evict_until_fits(ADAPTER_BYTES)

    loader = threading.Thread(target=make_space)

    def after_the_drop_began(handle: AdapterHandle) -> int:
        harness.store.pages_of = pages_of
        loader.start()
        assert handles.entered.wait(10)
        return pages_of(handle)

    harness.store.pages_of = after_the_drop_began
    harness.store.advance([harness.handle(1), harness.handle(0)])
    handles.allow.set()
    loader.join()
    harness.store.finish()
    for handle in harness.store.resident.values():
        assert handle.adapter is not None
        assert handle.info.digest
    harness.request(1, 0)
    assert harness.resident() == {"a0", "a1"}


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
