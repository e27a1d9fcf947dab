"""Tests of the video client against a fake Triton server, and of its sources of frames."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clients import frames, video_analytics
from clients.common import ClientError
from tests.support.fake_triton import FakeTriton, metadata_of
from tests.support.polling import until
from tests.support.run_client import run_client

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """Let a chunk last 50 ms for clients in this process."""
    monkeypatch.setattr(video_analytics, "CHUNK_SECONDS", 0.05)


@pytest.fixture
def server():
    with FakeTriton() as started:
        yield started


@pytest.fixture
def jsonl(tmp_path):
    return tmp_path / "answers.jsonl"


def play(server, *options, seconds=1):
    """Return the exit status of the client for a camera."""
    arguments = ["camera", "--url", server.url, "--seconds", str(seconds), *map(str, options)]
    return video_analytics.main(arguments)


def shared_regions(process: int) -> set[str]:
    """Return the shared memory of a client's process. Other tests run at the same time."""
    return {path.name for path in Path("/dev/shm").glob(f"vlora_frames_{process}_*")}


@pytest.mark.parametrize("send", ["png", "jpeg", "raw"])
def test_every_stream_sends_its_chunks_and_every_answer_is_written(send, server, jsonl, capsys):
    assert play(server, "--streams", 3, "--send", send, "--jsonl", jsonl, seconds=2) == 0
    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    keys = {(record["stream"], record["chunk"]) for record in records}
    assert keys == {(stream, chunk) for stream in range(3) for chunk in range(2)}
    assert all(len(record["result"]["frames"]) == 6 for record in records)
    assert {metadata_of(request)["stream"] for request in server.requests} == {0, 1, 2}
    assert len(server.registered) == (1 if send == "raw" else 0)
    assert server.regions == {}
    assert not shared_regions(os.getpid())
    shown = capsys.readouterr().out
    assert shown.count("moving left") == 6
    assert "p50 ms" in shown


def test_raw_frames_arrive_as_the_camera_made_them(server):
    assert play(server, "--send", "raw") == 0
    sent = next(frames.SyntheticCamera(30, 6, seed=0).chunks()).frames
    np.testing.assert_array_equal(server.requests[0]["frames_raw"], np.stack(sent))


def test_a_server_that_refuses_shared_memory_is_reported_with_the_remedy(server):
    server.allows_shared_memory = False
    with pytest.raises(ClientError, match=r"closed to clients.*--allow-shared-memory.*jpeg"):
        play(server, "--send", "raw")
    assert not shared_regions(os.getpid())
    assert server.requests == []


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_client_removes_shared_memory_and_prints_its_summary(ending):
    with FakeTriton(delay=0.3) as server:
        command = [sys.executable, "clients/video_analytics.py", "camera", "--url", server.url]
        command += ["--send", "raw", "--streams", "2", "--seconds", "60"]
        # If a shell runs these tests in the background, they and their children ignore Ctrl-C. A
        # handler while the child starts prevents that; a `preexec_fn` could hang.
        handled = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            client = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        finally:
            signal.signal(signal.SIGINT, handled)
        with client:
            try:
                until(lambda: server.requests or client.poll() is not None)
                assert client.poll() is None, client.communicate()
                assert shared_regions(client.pid)
                client.send_signal(ending)
                shown, errors = client.communicate(timeout=20)
            finally:
                client.kill()
    assert client.returncode == 128 + ending
    assert "p50 ms" in shown
    assert errors == ""
    assert server.regions == {}
    assert not shared_regions(client.pid)


def test_a_stream_that_lags_drops_chunks(monkeypatch, capsys):
    monkeypatch.setattr(video_analytics, "MAX_IN_FLIGHT", 1)
    with FakeTriton(delay=0.3) as server:
        play(server, seconds=2)
    summary = capsys.readouterr().out.splitlines()[-1].split()
    assert summary[:4] == ["0", "1", "0", "1"]


def test_chunks_of_a_stream_supersede_each_other_and_what_the_server_drops_is_counted(
    server, jsonl, capsys
):
    server.refusal = "in ensemble 'x', CANCELLED: a newer request of stream 's' superseded this"
    assert play(server, "--streams", 2, "--jsonl", jsonl, seconds=2) == 0
    keys = [json.loads(request["sampling_parameters"][0]) for request in server.requests]
    assert len({key["stream_id"] for key in keys}) == 2
    assert all(key["supersede"] and key["deadline_ms"] > 0 for key in keys)
    assert all("superseded" in json.loads(x)["dropped"] for x in jsonl.read_text().splitlines())
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["1", "0", "0", "2"]


def test_an_answer_that_is_an_error_is_shown_and_counted(server, jsonl, capsys):
    server.refusal = "image 0 is corrupt"
    assert play(server, "--jsonl", jsonl) == 1
    assert "image 0 is corrupt" in json.loads(jsonl.read_text())["error"]
    assert "error: image 0 is corrupt" in capsys.readouterr().out


def test_a_refusal_of_the_first_chunk_is_reported_once_and_ends_the_run(server, jsonl):
    refusal = "NOT_FOUND: unknown adapter 'x'. Known: y"
    server.refusal = f"in ensemble 'video_analytics', {refusal}"
    options = ["--url", server.url, "--streams", "2", "--seconds", "9", "--jsonl", str(jsonl)]
    done = run_client("video_analytics", "camera", "--adapter", "x", *options)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {refusal}")
    assert (done.stdout + done.stderr).count(refusal) == 1
    assert "p50 ms" not in done.stdout
    assert len(jsonl.read_text().splitlines()) == len(server.requests) == 1


def test_a_refusal_after_answers_affects_its_chunk_only(monkeypatch):
    monkeypatch.setattr(video_analytics, "CHUNK_SECONDS", 0.3)

    class RefusesTheSecond(FakeTriton):
        def ModelInfer(self, request, context):  # noqa: N802
            self.refusal = "INVALID_ARG: frame 0 is corrupt" if len(self.requests) == 1 else None
            return super().ModelInfer(request, context)

    with RefusesTheSecond() as server:
        assert play(server, seconds=3) == 1
    assert len(server.requests) == 3


def test_a_folder_is_played_in_order_and_repeated(tmp_path):
    for index in range(10):
        Image.new("RGB", (4, 4), (index, 0, 0)).save(tmp_path / f"{index:03}.png")
    chunks = frames.open_source(str(tmp_path), fps=6, frames_per_chunk=3, stream=0).chunks()
    seen = [[int(frame[0, 0, 0]) for frame in next(chunks).frames] for _ in range(3)]
    assert seen == [[0, 2, 4], [6, 8, 0], [2, 4, 6]]


def test_frames_of_several_sizes_cannot_be_sent_raw(tmp_path, server):
    for index in range(6):
        Image.new("RGB", (4 + index, 4), "blue").save(tmp_path / f"{index}.png")
    arguments = [str(tmp_path), "--url", server.url, "--fps", "6", "--send", "raw"]
    with pytest.raises(ClientError, match="must have the same size"):
        video_analytics.main([*arguments, "--seconds", "5"])


def write_clip(folder, rate, shades):
    """Write a clip of 32 x 32 grey frames, `rate` of them per second. Return its path."""
    av = pytest.importorskip("av", reason="the package `av` is not installed")
    path = folder / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width = stream.height = 32
        for shade in shades:
            pixels = np.full((32, 32, 3), shade, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_a_video_file_is_cut_into_seconds(tmp_path):
    path = write_clip(tmp_path, 10, [index * 10 for index in range(25)])
    chunks = frames.open_source(str(path), fps=30, frames_per_chunk=2, stream=0).chunks()
    shades = [[float(frame.mean()) for frame in next(chunks).frames] for _ in range(4)]
    np.testing.assert_allclose(shades, [[0, 50], [100, 150], [200, 220], [0, 50]], atol=6)


def test_a_video_of_an_absurd_rate_keeps_few_frames(tmp_path, monkeypatch):
    path = write_clip(tmp_path, 1000, [0] * 1000)
    converted = []
    asarray = frames.np.asarray
    monkeypatch.setattr(frames.np, "asarray", lambda *a: converted.append(1) or asarray(*a))
    (chunk,) = itertools.islice(frames.VideoFile(path, 3).chunks(), 1)
    assert len(chunk.frames) == 3
    assert len(converted) == 3 * frames.GRID


@pytest.mark.parametrize("name", ["empty", "text.mp4", "gone"])
def test_a_source_that_cannot_be_played_is_named(name, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(ClientError, match=name) as caught:
        next(frames.open_source(str(tmp_path / name), 30, 6, 0).chunks())
    assert "Errno" not in str(caught.value)


def test_the_camera_shows_the_motion_that_it_names():
    chunks = frames.SyntheticCamera(30, 6, seed=5).chunks()
    told = set()
    for _ in range(30):
        chunk = next(chunks)
        surface = chunk.frames[0][0, 0].astype(int)
        places = [np.argwhere(np.abs(f - surface).sum(-1) > 30).mean(0) for f in chunk.frames]
        down, right = places[-1] - places[0]
        motion = "moving " + ("right" if right > 0 else "left")
        if abs(down) > abs(right):
            motion = "moving " + ("down" if down > 0 else "up")
        if max(abs(down), abs(right)) < 1:
            motion = "standing still"
        assert motion == chunk.truth
        told.add(motion)
    assert len(told) == 5
