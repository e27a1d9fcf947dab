"""Tests of `vlora watch` against a fake Triton server: sources, chunks, requests, changes."""

from __future__ import annotations

import functools
import http.server
import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from tests.support.cameras import WatchRun, write_video
from tests.support.fake_triton import FakeTriton
from tests.support.http_server import http_server, response
from tests.support.polling import until
from tests.support.watching import free_port
from vlora.cli import app
from vlora.cli.common import console
from vlora.cli.watch import live_table, shows_table
from vlora.errors import ServerError
from vlora.sampling import SamplingParams
from vlora.watch.camera import Mailbox, open_source
from vlora.watch.chunks import Chunk
from vlora.watch.config import Camera
from vlora.watch.counts import Counts, StreamCounts
from vlora.watch.pixels import View
from vlora.watch.ring import PacketRing
from vlora.watch.sinks import JsonLinesOptions
from vlora.watch.sources import SourceError
from vlora.watch.table import (
    FAULTS,
    LIVE_HEADS,
    SUMMARY_HEADS,
    line,
    live_row,
    overload,
    overload_now,
    shown_heads,
    summary_row,
)

FULL = "in ensemble 'video_analytics', UNAVAILABLE: the queue is full: 9 requests are waiting"
VIEW = View()
QUICK = {"url": "synthetic", "seconds": 0.1, "frames": 2}


def test_a_file_read_fast_is_cut_into_chunks_and_every_chunk_is_answered(start, triton, tmp_path):
    write_video(tmp_path / "clip.mp4", 10, [index * 10 for index in range(25)])
    run = start(door={"url": "clip.mp4", "frames": 2, "pace": "fast", "adapter": "actions"})
    run.join()
    assert len(triton.requests) == len(run.records) == 3
    keys = json.loads(triton.requests[0]["sampling_parameters"][0])
    assert keys["lora_name"] == "actions"
    assert keys["supersede"]
    assert keys["deadline_ms"] == 120_000
    assert triton.headers[0]["x-lora-adapter"] == f"actions/{keys['stream_id']}"
    assert {len(request["frames"]) for request in triton.requests} == {2}
    assert run["door"].counts.drops == 0
    spans = [one["ended"] - one["began"] for one in run.records]
    assert spans == pytest.approx([0.5, 0.5, 0.4])
    assert all(one["result"]["text"] == "moving left" for one in run.records)


@pytest.mark.alone
def test_a_file_in_real_time_takes_its_time_and_is_repeated(start, tmp_path):
    write_video(tmp_path / "clip.mp4", 10, [0] * 10)
    began = time.time()
    run = start(door={"url": "clip.mp4", "frames": 2, "repeat": True})
    until(lambda: run["door"].counts.answered >= 2)
    assert 1.2 < time.time() - began < 8
    assert run["door"].counts.lags[-1] < 2
    # The file stays connected: a repetition is neither told nor counted.
    assert run["door"].reader.counts.reconnections == 0
    assert sum("connected to" in one for one in run.lines) == 1


def test_a_folder_is_played_once_in_the_order_of_names(start, triton, tmp_path):
    (tmp_path / "frames").mkdir()
    for index in range(6):
        Image.new("L", (32, 32), index * 40).save(tmp_path / "frames" / f"{index:03}.png")
    run = start(door={"url": "frames", "fps": 3, "frames": 3, "pace": "fast"})
    run.join()
    assert len(triton.requests) == 2
    camera = Camera(url=str(tmp_path / "frames"), fps=3)
    source = open_source(camera, PacketRing(0, 0), StreamCounts())
    assert [frame.size for frame in source.frames(lambda: 0.0)] == [(32, 32)] * 6


@pytest.mark.alone
def test_a_slow_server_costs_chunks_but_no_lag(start, triton):
    triton.delay = 0.45
    run = start(door=QUICK)
    until(lambda: run["door"].counts.answered >= 4)
    counts = run["door"].counts
    assert counts.drops >= 4
    assert counts.lags[-1] < 1.2
    assert counts.drops + counts.answered + 2 >= counts.chunks


@pytest.mark.parametrize("step", [-3600, 3600])
def test_a_step_of_the_system_clock_stops_no_camera(step, start, monkeypatch):
    run = start(door=QUICK)
    counts, clock = run["door"].counts, time.time
    until(lambda: counts.answered >= 2)

    def stepped():
        # gRPC's core, which converts deadlines, still has the old time.
        return clock() + step * sys._getframe(1).f_globals["__name__"].startswith("vlora.")

    monkeypatch.setattr(time, "time", stepped)
    before = counts.answered
    until(lambda: counts.answered >= before + 3)
    assert abs(counts.lags[-1]) < 1800


def test_the_gate_skips_an_unchanged_scene_and_asks_again_in_time(start, triton, tmp_path):
    write_video(tmp_path / "clip.mp4", 10, ([90] * 20 + [200] * 10) * 2)
    gate = {"url": "clip.mp4", "frames": 2, "seconds": 0.5, "pace": "fast", "gate": {}}
    run = start(gate=gate)
    run.join()
    assert (run["gate"].counts.answered, run["gate"].counts.skipped) == (4, 8)
    assert run["gate"].view()["skipped"] == pytest.approx(2 / 3)
    assert len(triton.requests) == 4


def test_skipped_chunks_count_for_alerts_as_the_last_answer(start, triton, tmp_path):
    write_video(tmp_path / "clip.mp4", 10, [90] * 60)
    rule = {"name": "motion", "when": {"contains": "left"}, "begin": "5 of 5"}
    gate = {"url": "clip.mp4", "frames": 2, "seconds": 0.5, "gate": {}, "alerts": [rule]}
    gate["pace"] = "fast"  # It loses no chunk.
    run = start(gate=gate)
    kept = tmp_path / "kept" / "events"
    until(lambda: list(kept.glob("*.json")) and list(kept.glob("*.mp4")))
    assert len(triton.requests) == 1
    assert list(kept.glob("*.jpg"))
    run.stop()


def test_the_probability_of_yes_is_asked_for_beside_the_words_of_a_camera(start, triton):
    alerts = {"alerts": [{"name": "any", "when": {"yes_probability": 0.5}}]}
    sixteen = [f"w{i}" for i in range(16)]
    words = {"null": None, "list": ["no"], "text": "no", "yes": ["yes"], "sixteen": sixteen}
    cameras = {
        name: QUICK | alerts | {"sampling": {"word_probabilities": value}}
        for name, value in words.items()
    }
    run = start(plain=QUICK, **cameras)
    until(lambda: all(run[name].counts.answered for name in ("plain", *words)))
    sent = [json.loads(one["sampling_parameters"][0]) for one in triton.requests]
    found = {keys["stream_id"].rpartition("-")[2]: keys.get("word_probabilities") for keys in sent}
    lists = {"list": ["no", "yes"], "yes": ["yes"], "sixteen": [*sixteen, "yes"]}
    assert found == {"plain": None, "null": ["yes"], "text": "no"} | lists
    parsed = SamplingParams.parse({"word_probabilities": found["sixteen"]})
    assert len(parsed.word_probabilities) == 17, "the server accepts them"


def test_when_the_server_is_full_the_camera_of_lowest_priority_yields(start, triton):
    triton.refusal = FULL
    run = start(door=QUICK | {"priority": 0}, yard=QUICK | {"priority": 7})
    until(lambda: run["yard"].counts.yielded >= 2)
    assert run["door"].counts.yielded == 0
    assert any("yard: yields to other cameras" in line for line in run.lines)
    triton.refusal = None
    until(lambda: run["yard"].counts.answered and run["door"].counts.answered)
    keys = [json.loads(one["sampling_parameters"][0]) for one in triton.requests]
    assert {key["priority"] for key in keys} == {0, 7}


def test_what_the_server_gives_up_is_a_drop_and_a_refusal_is_an_error_told_once(start, triton):
    triton.refusal = "CANCELLED: a newer request of stream 's' superseded this one"
    run = start(door=QUICK)
    counts = run["door"].counts
    until(lambda: counts.drops >= 2)
    assert counts.errors == 0
    triton.refusal = "NOT_FOUND: unknown adapter 'x'. Known: y"
    until(lambda: counts.errors >= 3)
    assert sum("unknown adapter" in line for line in run.lines) == 1
    assert "unknown adapter" in run["door"].view()["detail"]
    triton.refusal = None
    until(lambda: counts.answered)
    assert run["door"].view()["detail"] == ""


def test_a_server_that_restarts_is_waited_for_and_a_fast_file_loses_no_chunk(tmp_path):
    write_video(tmp_path / "clip.mp4", 10, [0] * 400)
    cameras = {"door": QUICK, "file": {"url": "clip.mp4", "pace": "fast", "frames": 2}}
    with FakeTriton(delay=0.2, port=free_port()) as first:
        run = WatchRun(tmp_path, first.url, cameras)
        run.start()
        until(lambda: run["file"].counts.answered >= 2)
    try:
        until(lambda: any("no server answers" in line for line in run.lines))
        until(lambda: all(one.error for one in run.watch.watched()))
        told = [line for line in run.lines if "no server answers" in line]
        assert len(told) == len(set(told)), "both cameras meet it, and it is told once"
        assert told[0].startswith("no server")
        answered = run["door"].counts.answered
        with FakeTriton(port=int(first.url.rpartition(":")[2])):
            until(lambda: run["file"].counts.answered == 40)
            until(lambda: run["door"].counts.answered > answered)
    finally:
        run.stop()


def test_a_changed_file_takes_effect_camera_by_camera(start):
    other = QUICK | {"url": "synthetic:2"}
    run = start(door=QUICK, yard=other, belt=QUICK)
    until(lambda: all(run[name].counts.answered for name in ("door", "yard")))
    door, yard = run["door"], run["yard"]
    rule = {"name": "motion", "when": {"contains": "left"}}
    run.write({"door": QUICK | {"alerts": [rule]}, "yard": other | {"frames": 3}, "new": QUICK})
    until(lambda: any("was read again" in line for line in run.lines))
    until(lambda: run["new"].counts.answered)
    assert {one.name for one in run.watch.watched()} == {"door", "yard", "new"}
    assert run["door"] is door
    assert door.camera.alerts[0].name == "motion"
    assert door.reader.counts.reconnections == 0
    assert run["yard"] is not yard
    assert yard.reader.is_stopping
    assert run["new"].reader is door.reader


def test_the_questions_of_a_camera_share_its_decoder_and_are_asked_each_for_itself(start, triton):
    rule = {"name": "motion", "when": {"contains": "left"}}
    people = {"adapter": "actions", "question": "Who?", "alerts": [rule]}
    run = start(gate=QUICK | {"asks": {"people": people, "fire": {"every": 4, "priority": 3}}})
    until(lambda: run["gate:fire"].counts.answered >= 3)
    reader = run["gate:people"].reader
    assert reader is run["gate:fire"].reader
    assert run["gate:people"].counts.chunks >= 9

    def asked(text):
        return [one for one in triton.requests if one["text_input"][0] == text]

    def pictures(text):
        return {b"".join(one["frames"]) for one in asked(text)}

    until(lambda: pictures(b"Who?") & pictures(b""))
    until(lambda: {one["camera"] for one in run.records} == {"gate:people", "gate:fire"})
    whos, fires = (
        [json.loads(one["sampling_parameters"][0]) for one in asked(text)]
        for text in (b"Who?", b"")
    )
    assert {keys["lora_name"] for keys in whos} == {"actions"}
    assert {keys["priority"] for keys in fires} == {3}
    assert {keys["deadline_ms"] for keys in fires} == {4000}
    streams = [{keys["stream_id"] for keys in some} for some in (whos, fires)]
    assert [len(some) for some in streams] == [1, 1]
    assert streams[0] != streams[1]
    # Another question does not cost a new connection.
    run.write({"gate": QUICK | {"asks": {"fire": {"question": "Smoke?"}}}})
    until(lambda: any("was read again" in line for line in run.lines))
    until(lambda: run["gate:fire"].counts.answered)
    assert [one.name for one in run.watch.watched()] == ["gate:fire"]
    assert run["gate:fire"].reader is reader
    assert not reader.is_stopping
    run.write({"gate": QUICK | {"frames": 3}})
    until(lambda: reader.has_ended)


def test_a_wrong_file_is_told_and_the_old_one_stays(start):
    run = start(door=QUICK)
    run.write({"door": QUICK | {"frame": 3}})
    until(lambda: any("unknown key 'frame'" in line for line in run.lines))
    answered = run["door"].counts.answered
    until(lambda: run["door"].counts.answered > answered)
    run.path.unlink()
    run.write({"yard": QUICK})
    until(lambda: [one.name for one in run.watch.watched()] == ["yard"])


def test_a_camera_is_not_connected_outside_its_hours(start, monkeypatch):
    monkeypatch.setattr("vlora.watch.camera.HOURS_CHECK_SECONDS", 0.05)
    now = datetime.now()
    later, latest = (now + timedelta(hours=hours) for hours in (2, 3))
    run = start(door=QUICK | {"hours": [f"{later:%H:%M}-{latest:%H:%M}"]})
    until(lambda: run["door"].view()["detail"] == "outside its hours")
    assert run["door"].view()["state"] == "waiting"
    monkeypatch.setattr(Camera, "is_watched", lambda camera, time: True)
    until(lambda: run["door"].counts.answered)
    monkeypatch.setattr(Camera, "is_watched", lambda camera, time: False)
    until(lambda: run["door"].reader.detail == "outside its hours")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Yield a folder and the URL at which it is served."""
    folder = tmp_path / "site"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def shades(url: str) -> list[int]:
    """Return the grey values of all frames of a source."""
    source = open_source(Camera(url=url, size=32), PacketRing(0, 0), StreamCounts())
    try:
        return [int(np.mean(f.read(VIEW))) for f in source.frames(lambda: 0.0)]
    finally:
        source.close()


def test_http_and_hls_are_read_but_a_playlist_opens_no_file(site):
    folder, url = site
    write_video(folder / "clip.ts", 10, range(0, 100, 10))
    lines = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n"
    (folder / "live.m3u8").write_text(lines.format("clip.ts"))
    known = shades(f"{url}/clip.ts")
    assert len(known) == 10
    assert shades(f"{url}/live.m3u8") == known
    secret = folder.parent / "secret.ts"
    (folder / "clip.ts").rename(secret)
    for target in (f"file://{secret}", str(secret), f"concat:{secret}", f"subfile,,:{secret}"):
        (folder / "live.m3u8").write_text(lines.format(target))
        with pytest.raises(ServerError, match=r"live\.m3u8"):
            shades(f"{url}/live.m3u8")


def test_a_camera_that_redirects_to_a_file_opens_it_not(tmp_path):
    pytest.importorskip("av", reason="the extra watch is not installed")
    from tests.support import video_traps

    with closing(video_traps.Trap(tmp_path)) as trap:
        location = f"location: file://{trap.path}"
        with (
            http_server(lambda: response("302 Found", b"", location)) as (port, requests),
            pytest.raises(ServerError, match=r"127\.0\.0\.1"),
        ):
            shades(f"http://127.0.0.1:{port}/camera")
        assert requests
        assert not trap.sprung()


def test_pictures_above_the_limit_are_not_decoded(site, monkeypatch):
    streams = pytest.importorskip("vlora.watch.streams", reason="the extra watch is not installed")
    folder, url = site
    write_video(folder / "clip.ts", 10, [90] * 10, (64, 48), "libx264")
    for most, frames in (("3072", 10), ("1000", 0)):
        monkeypatch.setitem(streams.LIMITS, "max_pixels", most)
        assert len(shades(f"{url}/clip.ts")) == frames


@pytest.mark.parametrize(
    "content",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{url}/clip.ts\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile {secret}\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
    ],
)
def test_a_file_opens_no_address_and_no_other_file(content, site, tmp_path):
    folder, url = site
    secret = write_video(folder / "clip.ts", 10, [0] * 10)
    for name in ("playlist.m3u8", "list.ffconcat", "plain.mp4", "x.sdp"):
        (tmp_path / name).write_text(content.format(url=url, secret=secret))
        with pytest.raises(ServerError, match=name):
            shades(str(tmp_path / name))


def test_a_device_and_a_missing_file_are_explained(tmp_path):
    with pytest.raises(ServerError, match=r"/dev/video99: No such file"):
        shades("/dev/video99")
    with pytest.raises(ServerError, match=r"gone\.mp4: No such file"):
        shades(str(tmp_path / "gone.mp4"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ServerError, match="empty contains no pictures"):
        shades(str(tmp_path / "empty"))


@contextmanager
def paused(watched):
    """Keep the counts of a camera as they are, without the drops of a busy machine."""
    with watched.mailbox._changed:
        watched.counts.drops = 0
        yield


def test_the_table_and_the_lines_show_answers_and_counts(start):
    run = start(door=QUICK, gone={"url": "rtsp://127.0.0.1:9/x"})
    until(lambda: run["door"].counts.answered and run["gone"].reader.detail)
    with paused(run["door"]):
        row = dict(zip(LIVE_HEADS, live_row(run["door"]), strict=True))
    assert (row["state"], row["answer"], row["drops"]) == ("running", "moving left", "0")
    until(lambda: live_row(run["gone"])[1].startswith("waiting: Connection"))
    row = dict(zip(LIVE_HEADS, live_row(run["gone"]), strict=True))
    assert row["lag s"] == "-"
    sinks = {"duty": {"away": "no answer", "queued": 7}, "log": {"away": "", "queued": 0}}
    with paused(run["door"]):
        shown = line(run.watch.watched(), {"events": {"door": 2, "gone": 1}, "sinks": sinks})
    assert "1 of 2 cameras running" in shown
    assert "3 events" in shown
    assert shown.endswith("; sink duty: no answer (7 waiting)")
    assert dict(zip(SUMMARY_HEADS, summary_row(run["gone"]), strict=True))["p95 s"] == "-"


def test_a_camera_has_one_line_in_the_table_and_overloaded_ones_are_named(start):
    run = start(door=QUICK, gone={"url": "rtsp://127.0.0.1:9/x"})
    until(lambda: run["door"].counts.answered and run["gone"].reader.detail)
    watched = run.watch.watched()
    terminal = Console(width=80, file=io.StringIO())
    with paused(run["door"]):
        terminal.print(live_table(watched))
        assert not overload(watched)
        run["door"].counts.drops = run["door"].counts.chunks
        overloaded = overload(watched)
    lines = [text for text in terminal.file.getvalue().splitlines() if text.strip()]
    assert len(lines) == 2 + len(watched)
    assert lines[2].split()[:2] == ["door", "running"]
    assert overloaded.startswith("1 of 2 cameras dropped more than 20% of their chunks (door)")


def test_a_camera_is_overloaded_while_it_drops_many_of_its_last_chunks(start):
    run = start(door=QUICK, gone={"url": "rtsp://127.0.0.1:9/x"})
    until(lambda: run["door"].counts.answered)
    with paused(run["door"]):
        run["door"].mailbox.counts = counts = Counts()
        for second in range(1000):
            counts.count_chunk(400 <= second < 600 and second % 2 == 0, float(second))
            if second in (399, 450, 999):
                assert not counts.is_overloaded
            elif second == 599:
                assert live_row(run["door"])[1] == "overloaded"
                shown = overload_now(run.watch.watched())
                assert "1 of 2 cameras dropped more than 20% of their chunks of the last 5" in shown
        assert not overload_now(run.watch.watched())
        assert live_row(run["door"])[1] == "running"


def test_the_live_table_has_columns_of_faults_only_if_there_are_any():
    clean = ("door", "running", "yes", "0.10", "5", "5", "0%", "0", "0", "0", "0")
    assert set(shown_heads([clean, clean])) == set(LIVE_HEADS) - set(FAULTS)
    failed = (*clean[:8], "2", "0", "0")
    assert set(shown_heads([clean, failed])) == set(LIVE_HEADS) - {*FAULTS} | {"errors"}
    assert shown_heads([]) == list(LIVE_HEADS)


def test_a_terminal_has_a_table_unless_a_sink_writes_to_it(monkeypatch):
    monkeypatch.setattr(console, "_force_terminal", True)
    assert shows_table([JsonLinesOptions(name="log", kind="jsonl", path=Path("events.jsonl"))])
    assert not shows_table([JsonLinesOptions(name="log", kind="jsonl")])
    monkeypatch.setattr(console, "_force_terminal", False)
    assert not shows_table([])


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("vlora.cli.watch.PACKAGES", ("no_such_package",))
    done = CliRunner().invoke(app, ["watch", "cameras.yaml"])
    assert done.exit_code == 1
    assert "no_such_package is missing; install it with: pip install 'vlora[watch]'" in done.output


def command(triton, tmp_path, *options, **cameras):
    """Return the command that watches these cameras."""
    path = tmp_path / "cameras.yaml"
    retention = {"folder": str(tmp_path / "kept")}
    path.write_text(yaml.safe_dump({"retention": retention, "cameras": cameras}))
    return [sys.executable, "-m", "vlora.cli", "watch", str(path), "--grpc", triton.url, *options]


def test_check_asks_about_each_camera_and_opens_page_and_sinks(triton, tmp_path):
    cameras = {"door": {"url": "synthetic", "frames": 3}, "yard": {"url": "gone.mp4"}}
    path = Path(command(triton, tmp_path, **cameras)[4])
    sink = {"name": "duty", "kind": "webhook", "url": "http://127.0.0.1:9", "secret_env": "NO_SUCH"}
    content = {"sinks": [sink], "page": {"listen": "0.0.0.0:8090"}}
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | content))
    done = CliRunner().invoke(app, ["watch", str(path), "--grpc", triton.url, "--check"])
    assert done.exit_code == 1
    assert f"server {triton.url}: ready" in done.output
    assert re.search(r"door: synthetic shows 256 x 256, answered in .* s: moving left", done.output)
    assert "gone.mp4: No such file" in done.output
    assert "sink duty: the environment has no variable NO_SUCH" in done.output
    assert "page: the page at 0.0.0.0:8090 is open to a network" in done.output
    assert [len(request["frames"]) for request in triton.requests] == [3]
    triton.refusal = "in ensemble 'video_analytics', NOT_FOUND: unknown adapter 'actoins'"
    done = CliRunner().invoke(app, ["watch", str(path), "--grpc", triton.url, "--check"])
    assert "door: unknown adapter 'actoins'" in done.output


def test_a_question_that_is_removed_does_not_hold_a_fast_file_up():
    box, stop = Mailbox("gate:fire", lambda: None, every=2), threading.Event()
    chunks = [Chunk(float(at), at + 0.5, []) for at in range(4)]
    reader = threading.Thread(target=lambda: [box.put(one, stop, True) for one in chunks])
    reader.start()
    until(lambda: box.counts.chunks == 1)
    reader.join(0.3)
    assert reader.is_alive(), "it waits until the first chunk is taken"
    box.is_closed = True
    reader.join(60)
    assert not reader.is_alive()
    assert box.counts.chunks == 2


def test_check_tries_a_stream_of_several_questions_once_and_tells_of_several_decoders(
    triton, tmp_path
):
    gone = {"url": "rtsp://127.0.0.1:9/x"}
    cameras = {"gate": gone | {"asks": {"a": {}, "b": {}}}, "near": gone | {"size": 64}}
    done = subprocess.run(
        command(triton, tmp_path, "--check", **cameras), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stdout.splitlines()[1:4]] == [
        "gate:a:",
        "gate:b:",
        "near:",
    ]
    assert "gate:a and near have one URL and different keys" in done.stdout


def test_an_interrupt_ends_in_order_with_a_summary(triton, tmp_path):
    log = tmp_path / "answers.jsonl"
    words = command(triton, tmp_path, "--jsonl", str(log), door=QUICK)
    # If a shell runs these tests in the background, their children ignore Ctrl-C.
    handled = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, handled)
    with process:
        try:
            until(lambda: log.exists() and log.read_text().count("\n") > 1)
            process.send_signal(signal.SIGINT)
            shown, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0
    assert errors == ""
    assert "door: connected to synthetic" in shown
    assert "p95 s" in shown
    record = json.loads(log.read_text().splitlines()[0])
    assert record["camera"] == "door"
    assert record["ended"] <= record["asked"] <= record["answered"]
    assert record["result"]["text"] == "moving left"


def test_without_a_server_the_command_says_how_to_start_one(triton, tmp_path):
    words = command(triton, tmp_path, door=QUICK)
    words[words.index(triton.url)] = "127.0.0.1:9"
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no server answers at 127.0.0.1:9" in done.stderr
    assert "vlora serve" in done.stderr


def test_endless_empty_pictures_are_read_slowly_and_end_with_a_reason(monkeypatch):
    pytest.importorskip("av", reason="the package `av` is not installed")
    monkeypatch.setattr("vlora.watch.streams.MAX_AHEAD_SECONDS", 0.1)
    part = b"--b\r\ncontent-type: image/jpeg\r\ncontent-length: 0\r\n\r\n\r\n"
    kind = "content-type: multipart/x-mixed-replace; boundary=b"
    with http_server(lambda: response("200 OK", part * 20_000, kind)) as (port, _):
        camera = Camera(url=f"http://127.0.0.1:{port}/", timeout_seconds=1.0)
        source = open_source(camera, PacketRing(0.0, 0.0), StreamCounts())
        with closing(source), pytest.raises(SourceError, match="no video for"):
            list(source.frames(lambda: 0.0))
