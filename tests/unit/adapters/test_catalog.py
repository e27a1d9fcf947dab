"""Tests of the catalogue of adapters: folders, names, versions, and the choice for a request."""

from __future__ import annotations

import difflib
import errno
import gc
import os
import shutil
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapter_store import no_free_descriptors, small_model, write_adapter
from vlora.adapters import catalog
from vlora.adapters.catalog import (
    CANNOT_BE_LOADED,
    HINT_NEIGHBOURS,
    MAX_HINT_LENGTH,
    FolderWatch,
    NameTable,
    error_of,
    find_folders,
    read_each,
    stamp_of,
)
from vlora.adapters.errors import ErrorFactory
from vlora.adapters.files import Adapter, load_adapter, read_adapter
from vlora.adapters.routing import MAX_WORDS, Router, Skill, read_skills, usual_words
from vlora.adapters.store import AdapterStore
from vlora.adapters.tensors import WeightsReader
from vlora.errors import AdapterBroken, InvalidArgument, NotFound


class Watched:
    """A watch of the folders in `root`, which has reported those that are there now."""

    def __init__(self, root: Path, find: Any = None) -> None:
        self.known = {path.name: (path, stamp_of(path)) for path in sorted(root.iterdir())}
        self.reported: list[dict[str, Any]] = []
        self.watch = FolderWatch(
            find or catalog.FolderFinder(root, {}), lambda now: self.reported.append(dict(now))
        )
        self.watch._reported = dict(self.known)

    def look(self, *seconds: float) -> None:
        for second in seconds:
            self.watch.look(second)

    @property
    def changed(self) -> list[str]:
        """Names of the known folders that changed before the last report."""
        return [name for name in self.known if self.reported[-1][name] != self.known[name]]


def test_a_watch_reports_settled_folders_once(root: Path) -> None:
    watched = Watched(root)
    watched.look(0.0)
    assert not watched.reported
    write_adapter(root / "a0", 50)
    (root / "a1" / "adapter_config.json").unlink()
    watched.look(1.0)
    write_adapter(root / "a0", 51)  # It is still being written.
    watched.look(1.9, 2.0 + catalog.SETTLED_SECONDS / 2)
    assert watched.changed == ["a1"]
    watched.look(3.0)
    assert watched.changed == ["a0", "a1"]
    count = len(watched.reported)
    watched.look(9.0)
    assert len(watched.reported) == count
    shutil.rmtree(root / "a2")
    watched.look(10.0, 11.0)
    assert "a2" not in watched.reported[-1]


def test_beyond_a_number_of_folders_the_changed_ones_take_turns_and_new_ones_do_not(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "MAX_SCANNED", 2)
    read: list[int] = []
    stamps_of = catalog.stamps_of
    monkeypatch.setattr(catalog, "stamps_of", lambda p: (read.append(len(p)), stamps_of(p))[1])
    watched = Watched(root)
    scans = -(-len(watched.known) // 2)
    last = max(watched.known)
    write_adapter(root / last, 50)
    read.clear()
    watched.look(*map(float, range(scans)))
    assert read == [2] * scans
    write_adapter(root / "zz", 51)
    (root / "zz").rename(root / "new")
    watched.look(10.0, 10.0 + catalog.SETTLED_SECONDS)
    assert "new" in watched.reported[-1]
    assert watched.changed == [last]
    count = len(watched.reported)
    watched.look(*map(float, range(20, 20 + 2 * scans)))
    assert len(watched.reported) == count
    shutil.rmtree(root / "a0")
    watched.look(40.0, 41.0)
    assert "a0" not in watched.reported[-1]


def test_closing_a_watch_waits_for_the_end_of_its_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    scanning, ended = threading.Event(), threading.Event()

    def find() -> dict[str, Path]:
        scanning.set()
        time.sleep(0.2)
        ended.set()
        return {}

    monkeypatch.setattr(catalog, "LOOK_SECONDS", 0.01)
    watch = FolderWatch(find, lambda now: None)
    watch.start({})
    assert scanning.wait(60)
    watch.close()
    assert ended.is_set()


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


@pytest.mark.skipif(catalog._native() is None, reason="the core is not compiled")
def test_the_core_and_python_find_the_same_folders_and_stamps(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "dangling").symlink_to(root / "nowhere")
    (root / "linked").symlink_to(root / "a1")
    (root / "loop").symlink_to(root / "loop")
    (root / "file").write_text("no folder")
    (root / ".hidden").mkdir()
    (root / "lost+found").mkdir()
    (root / os.fsdecode(b"\xff\xfe")).mkdir()
    (root / "a2" / "dangling").symlink_to(root / "nowhere")
    (root / "a2" / "b").mkdir()
    paths = [*map(os.fsencode, root.iterdir()), b"/none/such", b"a\0b"]
    stamps, names = catalog.stamps_of(paths), catalog.folders_in(root)
    assert {"a0", "dangling", "linked", "loop", "\udcff\udcfe"} <= set(names)
    assert not {"file", ".hidden", "lost+found"} & set(names)
    assert len(set(stamps)) == len(paths) - 4, (
        "links have the stamps of their targets: a1, and twice a missing one; three are empty"
    )
    monkeypatch.setattr(catalog, "_native", lambda: None)
    assert catalog.stamps_of(paths) == stamps
    assert catalog.folders_in(root) == names


def broken_folders(root: Path, count: int) -> None:
    for index in range(count):
        (root / f"b{index:03}").mkdir()
        (root / f"b{index:03}" / "adapter_config.json").write_text("{")


def test_of_many_broken_folders_the_log_names_the_first_and_a_new_one_is_read_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(catalog, "MAX_LOGGED", 2)
    caplog.set_level("INFO")
    broken_folders(root, 50)
    store = AdapterStore(small_model())
    store.load(find_folders(root, {}))
    assert len(store.table.broken) == 50
    assert [line[:14] for line in caplog.messages[:2]] == ["adapter 'b000'", "adapter 'b001'"]
    assert caplog.messages[2:] == [f"48 more adapters {CANNOT_BE_LOADED}"]

    looked: list[str] = []
    version_of = FolderWatch._version_of
    monkeypatch.setattr(
        FolderWatch, "_version_of", lambda *a: (looked.append(a[1]), version_of(*a))[1]
    )
    watch = FolderWatch(catalog.FolderFinder(root, {}), store.folders.update)
    watch._reported = store.folders.stamps
    write_adapter(root / "new", 1)
    for second in (0.0, catalog.SETTLED_SECONDS):
        watch.look(second)
    store.apply()
    assert looked == ["new", "new"], "folders that have not changed are only compared"
    assert "new" in store.names()
    for folder in root.glob("b*"):
        shutil.rmtree(folder)
    for second in (9.0, 10.0):
        watch.look(second)
    assert len(caplog.messages[3:]) == 3
    assert caplog.messages[-1] == "48 more adapters were removed"


def test_a_broken_folder_that_can_be_read_again_is_logged(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    broken_folders(root, 1)
    folders = AdapterStore(small_model()).folders

    def look() -> list[str]:
        caplog.clear()
        found = find_folders(root, {}).items()
        folders.update({name: (path, stamp_of(path)) for name, path in found})
        return caplog.messages

    assert look()[0].startswith("adapter 'b000': adapter_config.json is not valid JSON")
    shutil.rmtree(root / "b000")
    write_adapter(root / "b000", 1)
    assert look() == ["adapter 'b000' can be loaded now"]
    write_adapter(root / "b000", 2)
    assert look() == []


def test_results_of_many_folders_come_together(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_folders(root, 20)
    store = AdapterStore(small_model())
    reports: list[int] = []
    monkeypatch.setattr(store.folders, "report", lambda results: reports.append(len(results)))
    found = {name: (path, stamp_of(path)) for name, path in find_folders(root, {}).items()}
    store.folders.update(found)
    assert reports == [len(found)]
    monkeypatch.setattr(catalog, "REPORT_SECONDS", 0.0)
    store.folders.stamps = {}
    store.folders.update(found)
    assert reports[1:] == [1] * len(found), "but none waits for long"
    store.close()


def test_an_error_of_a_broken_adapter_keeps_no_request_and_no_file(root: Path) -> None:
    broken_folders(root, 1)
    store = AdapterStore(small_model())
    store.load(find_folders(root, {}))

    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)

    def ask(value: Held) -> None:
        store.handle("b000")

    for _ in range(3):
        with pytest.raises(AdapterBroken, match="b000") as raised:
            ask(held)
        del raised
    del held
    gc.collect()
    assert alive() is None
    stored = store.table.broken["b000"]
    assert stored.__traceback__ is stored.__cause__ is stored.__context__ is None
    store.close()


def test_a_finder_returns_the_same_object_until_a_folder_is_added_or_removed(root: Path) -> None:
    find = catalog.FolderFinder(root, {"alias": "a1"})
    first = find()
    assert first == find_folders(root, {"alias": "a1"})
    assert find() is first
    write_adapter(root / "a9", 9)
    assert set(find()) == {*first, "a9"}


def test_an_empty_folder_is_no_adapter_until_it_has_a_file(root: Path) -> None:
    watched = Watched(root)
    (root / "new").mkdir()
    watched.look(0.0, 1.0)
    assert not watched.reported
    named = find_folders(root, {"alias": "new"})
    assert named["alias"] == root / "new"
    assert "new" not in named
    write_adapter(root / "new", 1)
    watched.look(2.0, 3.0)
    assert "new" in watched.reported[-1]
    for file in (root / "new").iterdir():
        file.unlink()
    watched.look(4.0, 5.0)
    assert watched.reported[-1]["new"] == (root / "new", b"")


def test_the_removal_of_the_last_folder_is_reported(root: Path) -> None:
    for path in sorted(root.iterdir())[1:]:
        shutil.rmtree(path)
    watched = Watched(root)
    watched.look(0.0, 1.0)
    assert not watched.reported
    shutil.rmtree(root / "a0")
    watched.look(2.0, 2.5, 2.6)
    assert watched.reported == [{}]
    write_adapter(root / "a0", 1)
    watched.look(3.0, 3.0 + catalog.SETTLED_SECONDS)
    assert list(watched.reported[-1]) == ["a0"]


def test_a_folder_that_is_exchanged_by_two_renames_is_not_reported_as_removed(root: Path) -> None:
    watched = Watched(root)
    write_adapter(root.parent / "new", 50)
    (root / "a0").rename(root.parent / "old")
    watched.look(0.0)
    (root.parent / "new").rename(root / "a0")
    watched.look(1.0, 1.0 + catalog.SETTLED_SECONDS)
    assert len(watched.reported) == 1
    assert watched.changed == ["a0"]


def test_a_scan_that_cannot_read_the_folders_reports_no_change(root: Path) -> None:
    paths = {path.name: path for path in sorted(root.iterdir())}
    watched = Watched(root, lambda: paths)
    with no_free_descriptors():
        assert set(catalog.stamps_of([os.fsencode(root)])) == {b"!%d" % errno.EMFILE}
        watched.look(*map(float, range(5)))
    assert not watched.reported
    write_adapter(root / "a0", 50)
    watched.look(6.0, 6.0 + catalog.SETTLED_SECONDS)
    assert watched.changed == ["a0"]
    gone = Watched(root, lambda: find_folders(root / "gone", {}))
    gone.look(0.0)
    assert not gone.reported


def test_adapters_are_listed_with_the_weights_of_one_at_a_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "broken").mkdir()
    (root / "broken" / "README.md").touch()
    (root / "empty").mkdir()
    (root / "lost+found").mkdir(0)
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


def table_of(count: int) -> NameTable:
    """Return a table of `count` names without their adapters."""
    kinds = ("vehicles", "defects", "license-plates")
    return NameTable({f"{kinds[i % 3]}-{i:05}-r16": None for i in range(count)}, {})  # type: ignore[misc]


def message(table: NameTable, name: str) -> str:
    with pytest.raises(NotFound) as caught:
        table.handle(name)
    return str(caught.value)


@pytest.mark.parametrize(
    "unknown", ["vehicles-00300-r1", "vehicles-0030-r16", "ehicles-00300-r16", "vehicels-00300-r16"]
)
def test_an_error_names_a_similar_adapter_among_thousands(unknown: str) -> None:
    (hint,) = difflib.get_close_matches(unknown, table_of(5000).names, n=1)
    assert f"did you mean '{hint}'" in message(table_of(5000), unknown)


@pytest.mark.parametrize("count", [50, 500, 5000])
def test_an_unknown_name_is_compared_with_few_names_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    compared = []
    ratio = difflib.SequenceMatcher.real_quick_ratio

    def counted(matcher: Any) -> float:
        compared.append(matcher)
        return ratio(matcher)

    monkeypatch.setattr(difflib.SequenceMatcher, "real_quick_ratio", counted)
    assert "did you mean" in message(table_of(count), "vehicles-00030-r1")
    assert 0 < len(compared) <= 4 * HINT_NEIGHBOURS
    compared.clear()
    assert "did you mean" not in message(table_of(count), "x" * (MAX_HINT_LENGTH + 1))
    assert not compared


def test_names_are_read_and_changed_while_an_error_is_being_written(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(1)
    writing, go_on = threading.Event(), threading.Event()

    def slow(*_: Any) -> str:
        writing.set()
        assert go_on.wait(60)
        return " (slow)"

    monkeypatch.setattr(catalog, "known_names", slow)
    errors: list[str] = []

    def ask() -> None:
        with pytest.raises(NotFound) as caught:
            harness.store.handle("a9")
        errors.append(str(caught.value))

    asking = threading.Thread(target=ask)
    asking.start()
    assert writing.wait(60)
    write_adapter(harness.root / "a9", 9)

    def others() -> None:
        harness.reread()
        harness.request(9)

    other = threading.Thread(target=others, daemon=True)
    other.start()
    other.join(30)
    assert not other.is_alive(), "others wait for the error"
    assert harness.resident() == {"a9"}
    go_on.set()
    asking.join()
    assert errors == ["unknown adapter 'a9' (slow)"], "of the names at the time of the request"


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


FACES = Skill("faces", "vqa", 0.9, frozenset({"is", "there", "a", "face"}))
SIGNS = Skill("signs", "vqa", 0.8, frozenset({"what", "is", "written", "on", "the", "sign"}))
DIGITS = Skill("digits", "classify", 0.9, frozenset())
SKILL = {"name": "faces", "task": "vqa", "accuracy": 0.9, "words": ["face"]}


def nothing(_: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("task", "question", "chosen"),
    [
        ("vqa", "Is there a face in this picture?", "portraits"),
        ("vqa", "What does the SIGN say?", "streets"),
        ("vqa", "How many cars?", None),
        ("vqa", "What color is the big circle?", None),
        ("vqa", "", None),
        ("classify", "", "portraits"),
        ("detect", "face", None),
    ],
)
def test_task_and_words_choose_the_adapter(task: str, question: str, chosen: str | None) -> None:
    router = Router({"portraits": [FACES, DIGITS], "streets": [SIGNS], "plain": []})
    assert router.choose(task, question, nothing) == chosen


def test_a_resident_adapter_is_preferred_unless_another_is_clearly_better() -> None:
    better = Skill("faces", "vqa", 0.91, FACES.words)
    best = Skill("faces", "vqa", 0.95, FACES.words)
    router = Router({"one": [FACES], "two": [better]})
    assert router.choose("vqa", "a face?", nothing) == "two"
    assert router.choose("vqa", "a face?", "one".__eq__) == "one"
    router = Router({"one": [FACES], "two": [best]})
    assert router.choose("vqa", "a face?", "one".__eq__) == "two"


def test_a_rare_word_says_more_than_a_common_one() -> None:
    common = {"is", "there", "a"}
    router = Router(
        {name: [Skill(name, "vqa", 0.9, frozenset({*common, name}))] for name in ("cat", "dog")}
    )
    assert router.choose("vqa", "Is there a dog?", nothing) == "dog"


def test_usual_words_leave_out_rare_ones() -> None:
    questions = ["How many red dots?"] * 60 + ["How many blue dots?"] * 60 + ["Odd word?"]
    assert usual_words(questions) == ["blue", "dots", "how", "many", "red"]
    assert len(usual_words([" ".join(f"w{i}" for i in range(100))])) == MAX_WORDS
    assert usual_words(["", ""]) == []


def test_skills_are_read() -> None:
    (skill,) = read_skills([SKILL], ErrorFactory("a"))
    assert skill == Skill("faces", "vqa", 0.9, frozenset({"face"}))


@pytest.mark.parametrize(
    "value",
    [
        {},
        [1],
        [{**SKILL, "accuracy": "high"}],
        [{**SKILL, "accuracy": 2}],
        [{**SKILL, "accuracy": float("nan")}],
        [{**SKILL, "words": "face"}],
        [{**SKILL, "words": [1]}],
        [{**SKILL, "name": 3}],
        [{**SKILL, "more": 1}],
        [{**SKILL, "words": ["w"] * 33}],
        [SKILL] * 257,
    ],
)
def test_wrong_skills_are_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="skill"):
        read_skills(value, ErrorFactory("a"))


def test_a_file_whose_name_begins_as_the_stamp_of_an_error_is_none(tmp_path: Path) -> None:
    (tmp_path / "!1").touch()
    assert error_of(stamp_of(tmp_path)) is None
