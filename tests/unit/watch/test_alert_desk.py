"""Tests of the desk of the alerts, and of the store of pictures, clips and records."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the extra watch is not installed")

from PIL import Image
from pydantic import TypeAdapter

from tests.support.polling import until
from tests.support.watching import answer, jpeg
from vlora.errors import ServerError
from vlora.watch.desk import (
    BOX_COLOUR,
    MAX_WAITING,
    AlertDesk,
    draw_boxes,
    open_desk,
    removed_sinks,
)
from vlora.watch.disk_queue import DiskQueue
from vlora.watch.events import Event
from vlora.watch.rules import AlertRule
from vlora.watch.sinks import SinkOptions
from vlora.watch.store import NAME, Retention, Store, file_name

RULE = AlertRule.model_validate({"name": "people", "when": {"contains": "yes"}})
HOSTILE = ["../../etc/passwd", "/abs", "..", "", "a" * 5000, "\0\n", "ü/日本", ".hidden", "a b.jpg"]
READER: TypeAdapter[Any] = TypeAdapter(SinkOptions)


@contextmanager
def desk(folder: Path, *sinks: dict[str, Any], **retention: Any) -> Iterator[AlertDesk]:
    options = [READER.validate_python({"name": f"s{i}", **one}) for i, one in enumerate(sinks)]
    made = open_desk(options, Retention(folder=folder / "watch", **retention))
    try:
        yield made
    finally:
        made.close(60.0)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def event(begin: float, camera: str = "gate") -> Event:
    return Event(camera, "people", begin, None, 1.0, answer(began=begin, camera=camera))


def test_an_event_has_picture_clip_and_record_and_goes_to_every_sink(tmp_path: Path) -> None:
    asked: list[tuple[float, float]] = []

    def clip(begin: float, end: float) -> bytes:
        asked.append((begin, end))
        return b"clip until %.1f" % end

    now = time.time()
    box = {"label": "person", "box": [10, 12, 60, 50], "score": 0.5}
    given = {"picture": jpeg(), "objects": [box], "clip": clip}
    sinks = [
        {"kind": "jsonl", "path": tmp_path / "plain"},
        {"kind": "jsonl", "path": tmp_path / "inline", "picture": True},
    ]
    with desk(tmp_path, *sinks) as alerts:
        for second, text in enumerate(["no", "yes", "yes", "no"]):
            alerts.take([RULE], answer(text, now + second, **given))
        until(lambda: len(alerts.newest()) == 1 and alerts.newest()[0]["end"])
        record = alerts.newest()[0]
        assert alerts.counts()["events"] == {"gate": 1}
        assert NAME.fullmatch(record["picture"])
        path = alerts.store.path(record["picture"])
        assert path is not None
        drawn = path.read_bytes()
        assert alerts.store.path("../plain") is None
    begin, end = lines(tmp_path / "plain")
    assert end == record
    assert (begin["kind"], end["kind"], begin["id"]) == ("begin", "end", end["id"])
    assert (begin["reason"], end["reason"]) == (None, "over")
    assert (begin["end"], end["begin"], end["end"]) == (None, now + 1, now + 2.9)
    fields = {"camera": "gate", "rule": "people", "text": "yes", "score": 1.0, "objects": [box]}
    fields |= {"adapter": "people", "digest": "ab12", "picture": record["picture"]}
    assert fields.items() <= begin.items()
    assert fields.items() <= end.items()
    assert asked == [(now + 1, now + 1.9), (now + 1, now + 2.9)]
    folder = tmp_path / "watch" / "events"
    assert (folder / begin["clip"]).read_bytes() == b"clip until %.1f" % (now + 1.9)
    assert (folder / end["clip"]).read_bytes() == b"clip until %.1f" % (now + 2.9)
    assert drawn == draw_boxes(jpeg(), [box]) != jpeg()
    inline = lines(tmp_path / "inline")
    assert base64.b64decode(inline[0].pop("picture_base64")) == drawn
    assert inline == [begin, end]
    assert folder.stat().st_mode & 0o077 == 0


def test_boxes_are_drawn_where_the_answer_says_and_stay_inside() -> None:
    boxes = [
        {"label": "person", "box": [20, 10, 70, 50]},
        {"label": "日本 <b>", "box": [90, 60, -5, 1e9]},
        {"label": None, "box": [500, 500, 600, 600], "score": None},
    ]
    before, after = (Image.open(io.BytesIO(one)) for one in (jpeg(), draw_boxes(jpeg(), boxes[:1])))
    assert after.size == before.size
    for point in ((45, 49), (69, 30), (20, 45)):
        drawn = after.getpixel(point)
        assert isinstance(drawn, tuple)
        assert all(abs(a - b) < 90 for a, b in zip(drawn, BOX_COLOUR, strict=True)), point
    assert draw_boxes(jpeg(), boxes)
    assert draw_boxes(jpeg(), []) == jpeg()
    assert draw_boxes(b"", boxes) == b""


def test_an_event_goes_on_without_a_picture_or_clip_that_fails(tmp_path: Path) -> None:
    def clip(begin: float, end: float) -> bytes:
        raise RuntimeError("broken packets")

    broken = {"picture": b"no picture", "objects": [{"box": [1, 2, 3, 4]}], "clip": clip}
    with desk(tmp_path, {"kind": "jsonl", "path": tmp_path / "lines"}) as alerts:
        alerts.take([RULE], answer(**broken))
        alerts.take([RULE], answer("no", 1.0, objects=[{"box": ["a"]}], picture=jpeg()))
        until(lambda: alerts.counts()["sinks"]["s0"]["sent"] == 2)
        assert alerts.counts()["media_errors"] == 3
    assert [(one["picture"], one["clip"]) for one in lines(tmp_path / "lines")] == [
        (None, None)
    ] * 2


def test_a_changed_removed_or_forgotten_rule_ends_its_event(tmp_path: Path) -> None:
    other = RULE.model_copy(update={"name": "other"})
    changed = RULE.model_copy(update={"pause_seconds": 5.0})
    with desk(tmp_path, {"kind": "jsonl", "path": tmp_path / "lines"}) as alerts:
        alerts.take([RULE, other], answer())
        alerts.take([changed], answer(began=1.0))
        alerts.take([RULE], answer(began=2.0, camera="yard"))
        alerts.forget("gate")
    told = [(one["camera"], one["rule"], one["kind"]) for one in lines(tmp_path / "lines")]
    reasons = [one["reason"] for one in lines(tmp_path / "lines") if one["kind"] == "end"]
    assert reasons == ["changed"] * 3 + ["stopped"]
    first = [("gate", "people", "begin"), ("gate", "other", "begin")]
    first += [("gate", "people", "end"), ("gate", "other", "end"), ("gate", "people", "begin")]
    assert told == [
        *first,
        ("yard", "people", "begin"),
        ("gate", "people", "end"),
        ("yard", "people", "end"),  # Closing ends it.
    ]


KILLED = """
import sys, time
from pathlib import Path
from tests.support.watching import answer
from tests.unit.watch.test_alert_desk import RULE, desk
from vlora.watch import desk as module
module.OPEN_SECONDS = 0.1
folder, now = Path(sys.argv[1]), float(sys.argv[2])
opened = folder / "watch/events/open.events"
with desk(folder, {"kind": "jsonl", "path": folder / "lines"}) as alerts:
    for began in (now, now + 5):
        alerts.take([RULE], answer("yes", began))
    while not opened.exists() or str(now + 5.9) not in opened.read_text():
        time.sleep(0.05)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_an_event_that_a_kill_cuts_off_ends_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "watch" / "events").mkdir(parents=True)
    (tmp_path / "watch" / "events" / "open.events").write_text("[1, {")
    now = float(int(time.time()))
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(now)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.kill()
    with desk(tmp_path, {"kind": "jsonl", "path": tmp_path / "lines"}) as alerts:
        until(lambda: alerts.counts()["sinks"]["s0"]["sent"] == 1)
        assert alerts.newest()[0]["end"] == now + 5.9
    begin, end = lines(tmp_path / "lines")
    assert (begin["end"], begin["reason"]) == (None, None)
    assert end == begin | {"kind": "end", "end": now + 5.9, "reason": "killed"}
    assert not (tmp_path / "watch" / "events" / "open.events").exists()


def test_what_a_removed_sink_has_not_taken_is_told_and_kept_for_the_days_of_retention(
    tmp_path: Path,
) -> None:
    for name, count in (("kept", 1), ("gone", 2), ("empty", 0)):
        queue = DiskQueue(tmp_path / "queues" / f"{name}.queue", 10, 1000)
        for _ in range(count):
            queue.put(b"{}")
        queue.close()
    sinks = [READER.validate_python({"name": "kept", "kind": "jsonl"})]
    retention = Retention(folder=tmp_path, days=2.0)
    assert len([*removed_sinks(sinks, retention)]) == 2, "nothing is removed by looking"
    (told,) = removed_sinks(sinks, retention, clean=True)
    assert "the sink 'gone' is not in the file" in told
    assert "holds 2 of its messages; name the sink again to send them" in told
    assert not (tmp_path / "queues" / "empty.queue").exists()
    old = time.time() - 3 * 86400
    os.utime(tmp_path / "queues" / "gone.queue", (old, old))
    (told,) = removed_sinks(sinks, retention, clean=True)
    assert told.endswith("2 of its messages, older than 2 days; the queue was removed")
    assert [path.name for path in (tmp_path / "queues").iterdir()] == ["kept.queue"]
    (tmp_path / "queues" / "odd.queue").write_text("no database" * 100)
    (told,) = removed_sinks(sinks, retention, clean=True)
    assert told.endswith("odd.queue cannot be read")


def test_silence_ends_an_event_by_the_clock(tmp_path: Path) -> None:
    quick = RULE.model_copy(update={"silence_seconds": 0.1})
    with desk(tmp_path) as alerts:
        alerts.take([quick], answer(began=time.time() - 0.9))
        until(lambda: alerts.newest() and alerts.newest()[0]["end"])
        assert alerts.newest()[0]["reason"] == "silence"


def test_answers_are_never_held_up_and_what_is_too_much_is_counted(tmp_path: Path) -> None:
    released = threading.Event()
    given = {"clip": lambda begin, end: released.wait(30) and None}
    with desk(tmp_path) as alerts:
        for number in range(MAX_WAITING + 101):
            alerts.take([RULE], answer("yes" if number % 2 == 0 else "no", float(number), **given))
        # The first event is being written.
        lost = alerts.counts()["lost"]
        assert 100 <= lost <= 101
        released.set()


def test_a_slow_regular_expression_is_counted(tmp_path: Path) -> None:
    slow = AlertRule.model_validate({"name": "slow", "when": {"regex": "(a+)+$"}})
    with desk(tmp_path) as alerts:
        alerts.take([slow, RULE], answer("a" * 5000 + "yes"))
        assert alerts.counts()["timeouts"] == 1
        assert alerts.counts()["events"] == {"gate": 1}


def test_the_last_events_are_known_after_a_restart(tmp_path: Path) -> None:
    now = time.time()
    with desk(tmp_path) as alerts:
        for second in range(3):
            alerts.take([RULE], answer("yes", now + 2 * second, picture=jpeg()))
            alerts.take([RULE], answer("no", now + 2 * second + 1))
        until(lambda: len(alerts.newest()) == 3 and all(one["end"] for one in alerts.newest()))
        before = alerts.newest()
    assert [one["begin"] for one in before] == [now + 4, now + 2, now]
    part = tmp_path / "watch" / "events" / f"{before[0]['picture']}.part"
    part.write_bytes(b"half")
    with desk(tmp_path) as alerts:
        assert alerts.newest() == before
        assert alerts.store.path(before[0]["picture"])
        assert not part.exists()


def test_a_sink_that_cannot_be_opened_closes_the_others(tmp_path: Path) -> None:
    good = READER.validate_python({"name": "good", "kind": "jsonl"})
    bad = {"name": "bad", "kind": "webhook", "url": "http://x/${VLORA_NO_SUCH_VARIABLE}"}
    retention = Retention(folder=tmp_path)
    with pytest.raises(ServerError, match="no variable VLORA_NO_SUCH_VARIABLE"):
        open_desk([good, READER.validate_python(bad)], retention)
    running = open_desk([good], retention)
    with pytest.raises(ServerError, match="another `vlora watch` uses the folder"):
        open_desk([], retention)
    running.close(1.0)
    open_desk([good], retention).close(1.0)


@pytest.mark.parametrize("camera", HOSTILE, ids=range(len(HOSTILE)))
def test_no_name_of_a_camera_leads_out_of_the_folder(tmp_path: Path, camera: str) -> None:
    now = time.time()
    with desk(tmp_path / "in") as alerts:
        for begin in (now, now + 1):
            alerts.take([RULE], answer("yes", begin, camera, picture=jpeg()))
        until(lambda: alerts.newest())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent for path in files} == {tmp_path / "in" / "watch" / "events"}
    assert sorted(path.suffix for path in files) == [".jpg", ".json"]
    assert all(NAME.fullmatch(path.name) for path in files)


def test_the_oldest_files_go_first_beyond_bytes_and_days(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    store = Store(Retention(folder=tmp_path, days=2.0, megabytes=0.003))
    (folder / "notes.txt").write_bytes(b"x" * 5000)
    now = time.time()
    events = [event(now - 10 + second) for second in range(4)]
    for one in events:
        assert store.save(file_name(one, "jpg"), b"x" * 1000)
    assert store.size_bytes == 3000
    assert store.path(file_name(events[0], "jpg")) is None
    assert not (folder / file_name(events[0], "jpg")).exists()
    store.save(file_name(events[3], "jpg"), b"y" * 1500)  # in place of the smaller one
    assert [store.path(file_name(one, "jpg")) is None for one in events] == [
        True,
        True,
        False,
        False,
    ]
    old = event(now - 3 * 86400)
    store.save(file_name(old, "json"), b"{}")
    assert store.path(file_name(old, "json")) is None
    again = Store(Retention(folder=tmp_path, days=2.0, megabytes=0.0015))
    names = {path.name for path in folder.iterdir()}
    assert names == {"notes.txt", file_name(events[3], "jpg")}
    assert again.size_bytes == 1500


def test_a_disk_that_refuses_files_is_counted_and_events_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "watch" / "events"
    with desk(tmp_path, {"kind": "jsonl", "path": tmp_path / "lines"}) as alerts:
        shutil.rmtree(folder)
        now = time.time()
        alerts.take([RULE], answer("yes", now, picture=jpeg()))
        until(lambda: alerts.counts()["sinks"]["s0"]["sent"] == 1)
        assert alerts.counts()["store_errors"] >= 3, "picture, record, and the open events"
        assert alerts.store.error == "No such file or directory"
        folder.mkdir()
        alerts.take([RULE], answer("no", now + 1))
        alerts.take([RULE], answer("yes", now + 2, picture=jpeg()))
        until(lambda: alerts.counts()["sinks"]["s0"]["sent"] == 3)
    pictures = [one["picture"] is not None for one in lines(tmp_path / "lines")]
    assert pictures == [False, False, True, True]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ServerError, match=r"name another as retention\.folder"):
        Store(Retention(folder=tmp_path / "file"))


def test_a_damaged_record_is_skipped_and_counted(tmp_path: Path) -> None:
    store = Store(Retention(folder=tmp_path))
    now = time.time()
    store.save(file_name(event(now), "json"), b'{"id": 1}')
    store.save(file_name(event(now + 1), "json"), b"{")
    assert store.newest(5) == [{"id": 1}]
    assert store.errors == 1
