"""Tests of `vlora watch` with a real RTSP camera: each fault, and the connection after it."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from PIL import Image

from tests.support.cameras import LossyRelay, RtspCamera, WatchRun
from tests.support.polling import until
from vlora.watch.camera import CameraReader, open_source
from vlora.watch.config import Camera
from vlora.watch.counts import StreamCounts
from vlora.watch.ring import PacketRing

PASSWORD = "p@ss/w:rd?#%"
CHUNKS = {"seconds": 0.4, "frames": 2, "timeout_seconds": 30.0}


@pytest.fixture
def camera() -> Iterator[Callable[..., RtspCamera]]:
    """Yield a function that starts a camera."""
    started: list[RtspCamera] = []

    def start_camera(*options: str) -> RtspCamera:
        started.append(RtspCamera(*options))
        return started[-1]

    yield start_camera
    for one in started:
        one.kill()


def wait_for_answers(run: WatchRun, more: int = 2) -> None:
    counts = run["gate"].counts
    goal = counts.answered + more
    until(lambda: counts.answered >= goal)


def test_a_camera_that_ends_in_order_is_connected_again(start, camera):
    run = start(gate={"url": camera("--frames", "20").url, **CHUNKS})
    until(lambda: run["gate"].reader.counts.reconnections >= 2)
    wait_for_answers(run)
    counts = run["gate"].reader.counts
    assert counts.gaps >= counts.reconnections
    assert any("the stream has ended; next connection in" in line for line in run.lines)
    assert run["gate"].counts.errors == 0


@pytest.mark.alone
def test_a_frozen_camera_is_connected_again_and_its_lag_does_not_grow(start, camera):
    rtsp = camera()
    run = start(gate={"url": rtsp.url, **CHUNKS, "timeout_seconds": 1.0})
    wait_for_answers(run)
    os.kill(rtsp.process.pid, signal.SIGSTOP)
    try:
        until(lambda: "nothing arrived for 1 s" in run["gate"].reader.detail)
    finally:
        os.kill(rtsp.process.pid, signal.SIGCONT)
    wait_for_answers(run, 4)
    counts = run["gate"].reader.counts
    assert counts.reconnections >= 1
    assert counts.gaps >= 1
    assert run["gate"].counts.lags[-1] < 2


def test_a_camera_that_is_killed_is_connected_when_it_is_back(start, camera):
    rtsp = camera()
    run = start(gate={"url": rtsp.url, **CHUNKS})
    wait_for_answers(run)
    rtsp.kill()
    until(lambda: "Connection refused" in run["gate"].reader.detail)
    until(lambda: run["gate"].reader.counts.reconnections >= 4)
    rtsp.start()
    wait_for_answers(run)
    assert sum("Connection refused" in line for line in run.lines) == 1


def test_a_camera_that_loses_packets_goes_on_and_recovers_with_the_next_key_frame(start, camera):
    relay = LossyRelay(camera("--mtu", "200").port)
    try:
        run = start(gate={"url": relay.url, "transport": "udp", **CHUNKS})
        wait_for_answers(run)
        counts = run["gate"].reader.counts
        assert counts.damaged == 0
        relay.loss = 0.1
        until(lambda: counts.damaged >= 20)
        wait_for_answers(run)
        relay.loss, ended = 0.0, time.time()
        until(lambda: run["gate"].last.began > ended)
        damaged = counts.damaged
        wait_for_answers(run, 6)
    finally:
        relay.close()
    # A key frame comes each second. The one that was on its way may have been damaged.
    assert run["gate"].last.began > ended
    assert counts.damaged - damaged < 15
    assert relay.lost > 20
    assert counts.reconnections == run["gate"].counts.errors == 0


def test_another_resolution_starts_another_chunk_without_a_new_connection(start, camera, triton):
    rtsp = camera()
    run = start(gate={"url": rtsp.url, "size": 2000, **CHUNKS})
    wait_for_answers(run)
    rtsp.tell("size 640 480")

    def sizes() -> set[tuple[int, int]]:
        frames = triton.requests[-1]["frames"]
        return {Image.open(io.BytesIO(frame)).size for frame in frames}

    until(lambda: sizes() == {(640, 480)})
    assert run["gate"].reader.counts.reconnections == 0
    for request in triton.requests:
        assert len({Image.open(io.BytesIO(frame)).size for frame in request["frames"]}) == 1


def test_a_wrong_password_is_told_and_a_right_one_connects_and_neither_is_shown(
    start, camera, monkeypatch, capfd
):
    rtsp = camera("--user", "viewer", "--password", PASSWORD)
    url = rtsp.url.replace("rtsp://", "rtsp://viewer:${GATE_PASSWORD}@")
    monkeypatch.setenv("GATE_PASSWORD", "wr0ng-secret")
    run = start(gate={"url": url, **CHUNKS})
    until(lambda: "401 Unauthorized" in run["gate"].reader.detail)
    monkeypatch.setenv("GATE_PASSWORD", PASSWORD)
    wait_for_answers(run)
    shown = "\n".join([*run.lines, *capfd.readouterr(), json.dumps(run.records)])
    shown += repr(run["gate"].view()) + run["gate"].reader.camera.shown_url
    assert rtsp.url in shown
    for secret in (PASSWORD, "wr0ng-secret", "p%40ss", "viewer:"):
        assert secret not in shown


@pytest.mark.alone
def test_a_reader_that_is_too_slow_leaves_packets_out_instead_of_falling_behind(
    camera, monkeypatch
):
    monkeypatch.setattr("vlora.watch.streams.MIN_LATE_SECONDS", 0.5)
    counts, wanted, delays = StreamCounts(), [0.0], []
    source = open_source(Camera(url=camera().url, seconds=0.1), PacketRing(0.0, 0.0), counts)
    frames = source.frames(lambda: wanted[0])
    until_time = time.monotonic() + 5
    try:
        while time.monotonic() < until_time:
            frame = next(one for one in frames if one.at >= wanted[0])
            wanted[0] = frame.at + 0.01
            time.sleep(0.3)  # It could take 15 frames a second.
        # What has queued up comes without a wait.
        while len(delays) < 200 and sum(delays[-3:]) < 0.1:
            began = time.monotonic()
            next(frames)
            delays.append(time.monotonic() - began)
    finally:
        source.close()
    assert counts.gaps >= 2
    assert len(delays) < 40, "55 frames have queued up"


def test_a_bug_that_a_camera_meets_does_not_end_it(start, camera, monkeypatch):
    bugs = iter([ValueError("rtsp://user:hunter2@host")])
    right = CameraReader._shot

    def shot(reader, pixels):
        for bug in bugs:
            raise bug
        return right(reader, pixels)

    monkeypatch.setattr(CameraReader, "_shot", shot)
    run = start(gate={"url": camera().url, **CHUNKS})
    wait_for_answers(run)
    (line,) = [line for line in run.lines if "ValueError at test_network_cameras.py" in line]
    assert "hunter2" not in line


@pytest.mark.alone
def test_a_clip_of_a_camera_is_its_packets_of_these_seconds(start, camera):
    run = start(gate={"url": camera().url, **CHUNKS})
    began = time.time()
    until(lambda: run["gate"].counts.chunks and time.time() > began + 4)
    av = pytest.importorskip("av", reason="the extra watch is not installed")
    clip = run["gate"].reader.ring.clip(began + 2, began + 3.5)
    with av.open(io.BytesIO(clip)) as container:
        times = [frame.time for frame in container.decode(video=0)]
    # It begins with a key frame, of which this camera sends one a second.
    assert 1.3 < times[-1] - times[0] < 2.7
    assert np.median(np.diff(times)) == pytest.approx(1 / 15, abs=0.01)
