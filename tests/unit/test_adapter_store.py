"""Adapters between folders, host memory and pages, without a model."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vlora.atmm import op
from vlora.atmm.types import Segment
from vlora.errors import InvalidArgument
from vlora.lora import folders, store
from vlora.lora.adapter import AdapterFiles
from vlora.lora.folders import FolderWatch, find_folders, stamp_of
from vlora.lora.handle import AdapterHandle
from vlora.lora.model_shape import ModelShape
from vlora.lora.store import AdapterStore
from vlora.lora.weights_reader import WeightsReader
from vlora.memory.pool import PagePool

HIDDEN, RANK, PAGE = 32, 4, 4096
PLACE = (0, "q_proj")
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


class Bed:
    """A store over `root` with `pages` pages; each adapter's run takes one."""

    def __init__(self, model: ModelShape, root: Path, pages: int, host: int | None) -> None:
        self.store = AdapterStore(model, host_bytes=host)
        self.group = self.store.group([PLACE])
        self.store.load(find_folders(root, {}), make_resident=False)
        self.pool, self.memory = PagePool(pages), Memory(pages)
        self.store.attach(self.pool, self.memory, 0)

    def handle(self, index: int) -> AdapterHandle:
        return self.store.handle(f"a{index}")

    def want(self, *indices: int) -> AdapterHandle | None:
        """As many looks as it takes for loads and packing to be done."""
        stuck = None
        for _ in range(3):
            stuck = self.store.advance([self.handle(i) for i in indices])
            self.store.finish()
        self.pool.check_integrity()
        self.store.check_integrity()
        return stuck

    def resident(self) -> set[str]:
        return {handle.name for handle in self.store.resident.values()}


ONE = 2 * RANK * HIDDEN * 4
"""Bytes of an adapter in host memory."""


@pytest.fixture
def beds(model: ModelShape, root: Path) -> Iterator[Any]:
    made: list[Bed] = []

    def make(pages: int, host: int | None = None) -> Bed:
        made.append(Bed(model, root, pages, host))
        return made[-1]

    yield make
    for bed in made:
        bed.store.close()


def test_slots_hold_what_the_folders_hold_wherever_it_was_packed(beds: Any, root: Path) -> None:
    bed = beds(2)
    for wanted in ((0, 1), (2,), (3, 0), (1, 5)):
        bed.want(*wanted)
        for index in wanted:
            handle = bed.handle(index)
            assert handle.slot is not None
            pair = AdapterFiles(handle.name, handle.folder, bed.store._model).read().pairs[PLACE]
            x = torch.randn(3, HIDDEN)
            y = torch.zeros(3, HIDDEN)
            op.apply(y, x, [Segment(0, 3, handle.slot)], bed.group)
            torch.testing.assert_close(y, x @ pair.a.T @ pair.b.T, rtol=1e-4, atol=1e-4)
    assert len(bed.group) <= 2, "slots are used again"


def test_what_is_pinned_stays_and_the_longest_unused_goes(beds: Any) -> None:
    bed = beds(2)
    bed.want(0)
    bed.want(1)
    bed.want(2)
    assert bed.resident() == {"a1", "a2"}
    bed.handle(1).pin()
    bed.want(0)
    assert bed.resident() == {"a0", "a1"}
    bed.handle(0).pin()
    assert bed.want(3) is bed.handle(3), "and says so"
    bed.handle(1).unpin()
    bed.want(3)
    assert bed.resident() == {"a0", "a3"}


def test_the_one_in_the_weights_stays(beds: Any) -> None:
    bed = beds(1)
    bed.want(0)
    bed.store.protected_slot = bed.handle(0).slot
    assert bed.want(1) is bed.handle(1)
    bed.store.protected_slot = -1
    assert bed.want(1) is None
    assert bed.resident() == {"a1"}


def test_a_newer_wish_takes_no_room_from_an_older_one(beds: Any) -> None:
    bed = beds(2)
    bed.want(0, 1)
    assert bed.want(0, 1, 2, 3) is bed.handle(2)
    assert bed.resident() == {"a0", "a1"}
    assert bed.want(4, 0, 1) is bed.handle(1), "the newest of three makes room"
    assert bed.resident() == {"a0", "a4"}


def test_host_memory_keeps_its_budget_but_for_what_is_in_use(beds: Any) -> None:
    bed = beds(2, 3 * ONE)
    assert bed.store.host_bytes == 3 * ONE
    bed.want(3, 4)
    assert bed.resident() == {"a3", "a4"}
    for index in (0, 1, 2, 5):
        bed.want(index)
        assert bed.store.host_bytes <= 3 * ONE
    counted = bed.store.counters
    assert counted.loads >= 3
    assert counted.host_evictions >= counted.loads
    held = bed.handle(5)
    held.hold()
    bed.want(0, 1)
    bed.want(2, 3)
    assert held.adapter is not None
    held.release()


def test_one_load_serves_all_who_wait(beds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = beds(4, 0)
    gate = Gate(monkeypatch)
    for _ in range(5):
        assert bed.store.advance([bed.handle(0)] * 3) is None, "and nobody waits here"
    gate.open.set()
    bed.want(0)
    assert bed.resident() == {"a0"}
    assert gate.reads == ["a0"]


class Gate:
    """Holds every read of weights until it is opened; names in `reads`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[str] = []
        self.open = threading.Event()
        read = WeightsReader.read

        def held(recipe: WeightsReader, path: Path, refuse: Any) -> Any:
            self.reads.append(path.parent.name)
            assert self.open.wait(10)
            return read(recipe, path, refuse)

        monkeypatch.setattr(WeightsReader, "read", held)


def test_no_more_is_loaded_ahead_than_the_host_keeps_and_nothing_twice(
    beds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = beds(1, 3 * ONE)  # a0 to a2
    bed.want(0)
    gate = Gate(monkeypatch)
    bed.handle(0).pin()
    for _ in range(4):
        bed.store.advance([bed.handle(i) for i in (3, 4, 5, 1)])
    gate.open.set()
    bed.store.finish()
    assert gate.reads == ["a3", "a4"], "a0 is in use"
    bed.handle(0).unpin()
    for index in (3, 4):
        assert bed.want(index) is None
    assert gate.reads == ["a3", "a4"]


def test_what_is_in_host_memory_is_packed_while_a_disk_is_slow(
    beds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = beds(2, 2 * ONE)
    gate = Gate(monkeypatch)
    packed = threading.Event()
    bed.store.on_change = packed.set
    bed.store.advance([bed.handle(5), bed.handle(0)])
    assert packed.wait(10)
    assert bed.resident() == {"a0"}
    gate.open.set()
    bed.want(5)
    assert bed.resident() == {"a0", "a5"}


def test_who_waits_takes_no_page_that_who_runs_will_need(beds: Any) -> None:
    bed = beds(3)
    bed.want(0)
    bed.pool.allocate(1)
    assert bed.store.advance([bed.handle(0), bed.handle(1)], 1) is bed.handle(1)
    assert bed.want(0, 1) is None, "once it has ended"


def test_a_pack_that_fails_gives_its_pages_back(beds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = beds(1)

    put = bed.group.put

    def fails(slot: int, pairs: Any, *more: Any) -> None:
        if any(pairs):
            raise MemoryError("no room for a copy")
        put(slot, pairs, *more)

    with monkeypatch.context() as patch:
        patch.setattr(bed.group, "put", fails)
        bed.store.advance([bed.handle(0)])
        bed.store.finish()
    with pytest.raises(InvalidArgument, match=r"adapter 'a0'.*no room for a copy"):
        bed.handle(0)
    assert bed.want(1) is None
    assert bed.resident() == {"a1"}


def test_a_watch_tells_of_what_has_settled_and_of_nothing_twice(root: Path) -> None:
    told: list[dict[str, Any]] = []
    watch = FolderWatch(lambda: find_folders(root, {}), lambda now: told.append(dict(now)))
    known = {path.name: (path, stamp_of(path)) for path in sorted(root.iterdir())}
    watch._reported = dict(known)
    watch.look(0.0)
    assert not told
    write(root / "a0", 50)
    (root / "a1" / "adapter_config.json").unlink()
    watch.look(1.0)
    write(root / "a0", 51)  # still being written
    watch.look(1.9)
    watch.look(2.0 + folders.SETTLED_SECONDS / 2)
    assert [name for name in known if told[-1][name] != known[name]] == ["a1"]
    watch.look(3.0)
    assert [name for name in known if told[-1][name] != known[name]] == ["a0", "a1"]
    count = len(told)
    watch.look(9.0)
    assert len(told) == count
    for file in (root / "a2").iterdir():
        file.unlink()
    (root / "a2").rmdir()
    watch.look(10.0)
    assert "a2" not in told[-1]


@pytest.mark.skipif(folders._native() is None, reason="the core is not compiled")
def test_a_look_by_the_core_sees_what_a_look_without_it_sees(
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
        "links are what they lead to: a1, twice nowhere; two are empty"
    )
    monkeypatch.setattr(folders, "_native", lambda: None)
    assert folders.stamps_of(paths) == stamps
    assert folders.folders_in(root) == names


def test_a_finder_says_the_same_until_something_comes_or_goes(root: Path) -> None:
    find = folders.FolderFinder(root, {"alias": "a1"})
    first = find()
    assert first == find_folders(root, {"alias": "a1"})
    assert find() is first
    write(root / "a9", 9)
    assert set(find()) == {*first, "a9"}


def test_a_root_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    told: list[Any] = []
    watch = FolderWatch(lambda: find_folders(tmp_path / "gone", {}), told.append)
    watch._reported = {"a": (tmp_path, b"")}
    watch.look(0.0)
    assert not told


def test_a_new_version_is_the_names_and_the_old_one_its_holders(beds: Any, root: Path) -> None:
    bed = beds(2)
    bed.want(0)
    old = bed.handle(0)
    old.hold()
    old.pin()
    write(root / "a0", 77)
    bed.store.update({p.name: (p, stamp_of(p)) for p in sorted(root.iterdir())})
    new = bed.handle(0)
    assert new is not old
    bed.want(0)
    assert old.resident
    assert new.resident
    assert new.info.digest != old.info.digest
    old.unpin()
    old.release()
    bed.want(1)
    assert not old.resident, "nobody can ask for it again"
    assert old.adapter is None


def test_a_step_packs_what_is_small_by_itself(beds: Any) -> None:
    bed = beds(2)
    bed.want(0, 1)
    assert bed.store.advance([bed.handle(2), bed.handle(1)]) is None
    assert bed.resident() == {"a1", "a2"}, "by now, without the packer"
    bed.store.check_integrity()


def test_what_is_large_is_packed_beside_the_steps(
    beds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = beds(1)
    monkeypatch.setattr(store, "INLINE_PACK_BYTES", 0)
    packed: list[str] = []
    put = bed.group.put

    def told(slot: int, pairs: Any, *more: Any) -> None:
        if any(pairs):
            packed.append(threading.current_thread().name)
        put(slot, pairs, *more)

    monkeypatch.setattr(bed.group, "put", told)
    assert bed.want(3) is None
    assert bed.resident() == {"a3"}
    assert [name.partition("_")[0] for name in packed] == ["adapter-packer"]
