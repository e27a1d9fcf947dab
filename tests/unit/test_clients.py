"""Tests of the clients against a fake Triton server, and of their sources of frames."""

from __future__ import annotations

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
from tritonclient.utils import InferenceServerException

from clients import common, frames, video_analytics, visual_retrieval
from clients.common import ClientError, explain, sampling_parameters
from tests.support.fake_triton import FakeTriton, metadata_of
from tests.support.http_server import http_server, response
from tests.support.polling import until
from tests.support.run_client import run_client

CLOSED = ("--url", "127.0.0.1:9")


@pytest.fixture
def picture(tmp_path) -> Path:
    path = tmp_path / "scene.png"
    Image.new("RGB", (8, 8), "red").save(path)
    return path


@pytest.fixture
def triton():
    with FakeTriton() as started:
        yield started


def test_parts_of_an_answer_are_printed_as_they_arrive(picture, triton, capsys):
    visual_retrieval.main(
        [str(picture), "--url", triton.url, "What", "is this?", "--adapter", "glyphs"]
    )
    assert capsys.readouterr().out == "a red star\n"
    (request,) = triton.requests
    assert request["text_input"] == [b"What is this?"]
    assert request["image"] == [picture.read_bytes()]
    assert json.loads(request["sampling_parameters"][0]) == {"lora_name": "glyphs"}
    assert "task" not in request
    assert json.loads(sampling_parameters(None, seed=None, temperature=0)) == {"temperature": 0}


def test_a_stream_that_a_server_hands_over_is_sent_again_with_its_header(triton, capsys):
    triton.hands_over = True
    visual_retrieval.main(["--url", triton.url, "What is this?", "--adapter", "glyphs"])
    assert capsys.readouterr().out == "a red star\n"
    assert [one["x-lora-adapter"] for one in triton.headers] == ["glyphs", "glyphs"]
    assert common.routing_headers("a/b", "gate 2") == {"x-lora-adapter": "a%2Fb/gate%202"}
    assert common.routing_headers(None) == {}


def test_an_answer_that_stalls_times_out_and_is_cancelled(monkeypatch):
    monkeypatch.setattr("clients.common.ANSWER_SECONDS", 0.1)
    with FakeTriton(delay=2.0, words=("never",)) as triton:
        client = common.connect(triton.url, "visual_retrieval")
        answers = common.stream_responses(
            client, "visual_retrieval", common.request_inputs("hi"), seconds=0.1
        )
        with pytest.raises(ClientError, match=r"no answer within 0 s"):
            next(answers)
        client.close()
        assert triton.cancelled.wait(5)


def test_an_error_in_a_stream_reaches_the_user(picture, triton):
    triton.refusal = "in ensemble 'visual_retrieval', NOT_FOUND: unknown adapter 'x'"
    done = run_client("visual_retrieval", str(picture), "--url", triton.url)
    assert done.returncode == 1
    assert done.stderr == "error: NOT_FOUND: unknown adapter 'x'\n"


@pytest.mark.parametrize("others", ["", "example.org"])
def test_a_proxy_does_not_carry_requests_to_this_machine(picture, triton, monkeypatch, others):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", others)
    done = run_client("visual_retrieval", str(picture), "--url", triton.url)
    assert (done.stdout, done.stderr) == ("a red star\n", "")


@pytest.mark.parametrize("client", ["visual_retrieval", "video_analytics"])
def test_without_a_server_the_error_explains_how_to_start_one(client):
    done = run_client(client, "camera", *CLOSED)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no server answers at")
    assert "start one with `make serve`" in done.stderr
    assert "Traceback" not in done.stderr


ADDRESS = r"--url takes HOST:PORT, as in 127\.0\.0\.1:8001"


@pytest.mark.parametrize(
    ("client", "arguments", "message"),
    [
        (visual_retrieval, ["hello", "--url", "http://127.0.0.1:8001"], ADDRESS),
        (visual_retrieval, ["hello", "--url", "127.0.0.1"], ADDRESS),
        (visual_retrieval, ["hello", "--url", "localhost:grpc"], ADDRESS),
        (visual_retrieval, ["hello", "--url", "localhost:65536"], ADDRESS),
        (visual_retrieval, ["hello", "--url", ""], ADDRESS),
        (visual_retrieval, [".", "What?", *CLOSED], "is a folder: give the image files"),
        (
            visual_retrieval,
            ["clip.mp4", "What happens?", *CLOSED],
            r"clip\.mp4 is a video: use clients/video_analytics\.py",
        ),
        (visual_retrieval, ["gone.png", *CLOSED], r"the file gone\.png does not exist"),
        (video_analytics, ["rtsp://127.0.0.1/x", *CLOSED], "URLs are not supported"),
        (
            video_analytics,
            ["scene.PNG", *CLOSED],
            r"is a picture: use clients/visual_retrieval\.py",
        ),
    ],
)
def test_a_mistake_in_a_command_is_explained(client, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(b"x")
    Image.new("RGB", (4, 4)).save(tmp_path / "scene.PNG")
    with pytest.raises(ClientError, match=message):
        client.main(arguments)


def test_an_http_port_is_distinguished_from_a_closed_port():
    with (
        http_server(lambda: response("400 Bad Request", b"")) as (port, _),
        pytest.raises(ClientError, match=r"does not speak gRPC.* give the gRPC port"),
    ):
        visual_retrieval.main(["hello", "--url", f"127.0.0.1:{port}"])


@pytest.mark.parametrize(
    ("message", "status", "shown"),
    [
        ("NOT_FOUND: unknown adapter 'x'", "NOT_FOUND", "NOT_FOUND: unknown adapter 'x'"),
        ("in ensemble 'x', INVALID_ARG: no", "INVALID_ARGUMENT", "INVALID_ARG: no"),
        ("in ensemble 'x', [request id: 7] no inputs", None, "no inputs"),
        ("INVALID_ARG: in ensemble 'x', no", None, "INVALID_ARG: in ensemble 'x', no"),
        ("Deadline Exceeded", "DEADLINE_EXCEEDED", "Deadline Exceeded [DEADLINE_EXCEEDED]"),
        ("INTERNAL: lost", "UNAVAILABLE", "INTERNAL: lost [UNAVAILABLE]"),
        ("plain", None, "plain"),
    ],
)
def test_an_error_is_shown_with_one_code_and_without_tritons_prefixes(message, status, shown):
    given = None if status is None else f"StatusCode.{status}"
    assert explain(InferenceServerException(message, given)) == shown


def test_an_output_file_that_cannot_be_written_is_an_error(tmp_path, triton):
    arguments = ["camera", "--url", triton.url, "--seconds", "1", "--jsonl", str(tmp_path)]
    with pytest.raises(ClientError, match=r"cannot write .*: Is a directory"):
        video_analytics.main(arguments)
    assert not triton.requests


def test_a_model_that_is_not_ready_is_named(triton):
    triton.models = set()
    with pytest.raises(ClientError, match="no model 'visual_retrieval' ready"):
        visual_retrieval.main(["hello", "--url", triton.url])


def test_words_are_files_or_the_question(picture):
    split = visual_retrieval.split_words
    words = split([str(picture), "What is", "in a.png or so?"])
    assert words == ([picture], "What is in a.png or so?")
    for missing in (str(picture.parent / "gone"), str(picture.parent / "gone.txt")):
        with pytest.raises(ClientError, match=r"gone.* does not exist"):
            split([missing, "What is it?"])
    for question in ("What is in " + "the picture, " * 500, "Is it red/blue?", "and/or"):
        assert split([question]) == ([], question)


def test_an_error_about_an_image_names_its_file(picture, triton, monkeypatch):
    arguments = [str(picture), str(picture), "What?", "--url", triton.url]
    for image, named in (("image 1", r" \(image 1: .*scene\.png\)$"), ("image 7", "$")):
        triton.refusal = f"INVALID_ARG: {image} is corrupt"
        with pytest.raises(ClientError, match=f"{image} is corrupt{named}"):
            visual_retrieval.main(arguments)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ClientError, match=r"cannot read .*scene\.png: Permission denied"):
        visual_retrieval.main(arguments)


def test_an_empty_answer_is_said_to_be_empty(picture, capsys):
    with FakeTriton(words=("",)) as triton:
        visual_retrieval.main([str(picture), "What?", "--url", triton.url])
    assert capsys.readouterr().err.startswith("(empty answer, finish reason ")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-tokens", "many", "--max-tokens: must be a whole number, not 'many'"),
        ("--temperature", "hot", "--temperature: must be a number, not 'hot'"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_with_the_right_one(option, value, message, capsys):
    with pytest.raises(SystemExit):
        visual_retrieval.main(["What?", option, value])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--list", "--url", "127.0.0.1:8080"),
            "--url takes a URL, as in http://127.0.0.1:8080/v1",
        ),
        ((__file__,), "give a question, with the images before it"),
        (("hi", "--max-tokens", "x"), "--max-tokens: must be a whole number, not 'x'"),
    ],
)
def test_mistakes_in_the_command_of_the_openai_example_are_explained(arguments, message):
    pytest.importorskip("openai", reason="the package openai is not installed")
    done = run_client("openai_example", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """Let a chunk last 50 ms for clients in this process."""
    monkeypatch.setattr(video_analytics, "CHUNK_SECONDS", 0.05)


@pytest.fixture
def jsonl(tmp_path):
    return tmp_path / "answers.jsonl"


def play(triton, *options, seconds=1):
    """Return the exit status of the client for a camera."""
    arguments = ["camera", "--url", triton.url, "--seconds", str(seconds), *map(str, options)]
    return video_analytics.main(arguments)


def shared_regions(process: int) -> set[str]:
    """Return the shared memory of a client's process. Other tests run at the same time."""
    return {path.name for path in Path("/dev/shm").glob(f"vlora_frames_{process}_*")}


@pytest.mark.parametrize("send", ["png", "jpeg", "raw"])
def test_every_stream_sends_its_chunks_and_every_answer_is_written(send, triton, jsonl, capsys):
    assert play(triton, "--streams", 3, "--send", send, "--jsonl", jsonl, seconds=2) == 0
    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    keys = {(record["stream"], record["chunk"]) for record in records}
    assert keys == {(stream, chunk) for stream in range(3) for chunk in range(2)}
    assert all(len(record["result"]["frames"]) == 6 for record in records)
    assert {metadata_of(request)["stream"] for request in triton.requests} == {0, 1, 2}
    assert len(triton.registered) == (1 if send == "raw" else 0)
    assert triton.regions == {}
    assert not shared_regions(os.getpid())
    shown = capsys.readouterr().out
    assert shown.count("moving left") == 6
    assert "p50 ms" in shown


def test_raw_frames_arrive_as_the_camera_made_them(triton):
    assert play(triton, "--send", "raw") == 0
    sent = next(frames.SyntheticCamera(30, 6, seed=0).chunks()).frames
    np.testing.assert_array_equal(triton.requests[0]["frames_raw"], np.stack(sent))


def test_a_server_that_refuses_shared_memory_is_reported_with_the_remedy(triton):
    triton.allows_shared_memory = False
    with pytest.raises(ClientError, match=r"closed to clients.*--allow-shared-memory.*jpeg"):
        play(triton, "--send", "raw")
    assert not shared_regions(os.getpid())
    assert triton.requests == []


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_client_removes_shared_memory_and_prints_its_summary(ending):
    with FakeTriton(delay=0.3) as triton:
        command = [sys.executable, "clients/video_analytics.py", "camera", "--url", triton.url]
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
                until(lambda: triton.requests or client.poll() is not None)
                assert client.poll() is None, client.communicate()
                assert shared_regions(client.pid)
                client.send_signal(ending)
                shown, errors = client.communicate(timeout=20)
            finally:
                client.kill()
    assert client.returncode == 128 + ending
    assert "p50 ms" in shown
    assert errors == ""
    assert triton.regions == {}
    assert not shared_regions(client.pid)


def test_a_stream_that_lags_drops_chunks(monkeypatch, capsys):
    monkeypatch.setattr(video_analytics, "MAX_IN_FLIGHT", 1)
    with FakeTriton(delay=0.3) as triton:
        play(triton, seconds=2)
    summary = capsys.readouterr().out.splitlines()[-1].split()
    assert summary[:4] == ["0", "1", "0", "1"]


def test_chunks_of_a_stream_supersede_each_other_and_what_the_server_drops_is_counted(
    triton, jsonl, capsys
):
    triton.refusal = "in ensemble 'x', CANCELLED: a newer request of stream 's' superseded this"
    assert play(triton, "--streams", 2, "--jsonl", jsonl, seconds=2) == 0
    keys = [json.loads(request["sampling_parameters"][0]) for request in triton.requests]
    assert len({key["stream_id"] for key in keys}) == 2
    assert all(key["supersede"] and key["deadline_ms"] > 0 for key in keys)
    assert all("superseded" in json.loads(x)["dropped"] for x in jsonl.read_text().splitlines())
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["1", "0", "0", "2"]


def test_an_answer_that_is_an_error_is_shown_and_counted(triton, jsonl, capsys):
    triton.refusal = "image 0 is corrupt"
    assert play(triton, "--jsonl", jsonl) == 1
    assert "image 0 is corrupt" in json.loads(jsonl.read_text())["error"]
    assert "error: image 0 is corrupt" in capsys.readouterr().out


def test_a_refusal_of_the_first_chunk_is_reported_once_and_ends_the_run(triton, jsonl):
    refusal = "NOT_FOUND: unknown adapter 'x'. Known: y"
    triton.refusal = f"in ensemble 'video_analytics', {refusal}"
    options = ["--url", triton.url, "--streams", "2", "--seconds", "9", "--jsonl", str(jsonl)]
    done = run_client("video_analytics", "camera", "--adapter", "x", *options)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {refusal}")
    assert (done.stdout + done.stderr).count(refusal) == 1
    assert "p50 ms" not in done.stdout
    assert len(jsonl.read_text().splitlines()) == len(triton.requests) == 1


def test_a_refusal_after_answers_affects_its_chunk_only(monkeypatch):
    monkeypatch.setattr(video_analytics, "CHUNK_SECONDS", 0.3)

    class RefusesTheSecond(FakeTriton):
        def ModelInfer(self, request, context):  # noqa: N802
            self.refusal = "INVALID_ARG: frame 0 is corrupt" if len(self.requests) == 1 else None
            return super().ModelInfer(request, context)

    with RefusesTheSecond() as triton:
        assert play(triton, seconds=3) == 1
    assert len(triton.requests) == 3


def test_a_folder_is_played_in_order_and_repeated(tmp_path):
    for index in range(10):
        Image.new("RGB", (4, 4), (index, 0, 0)).save(tmp_path / f"{index:03}.png")
    chunks = frames.open_source(str(tmp_path), fps=6, frames_per_chunk=3, stream=0).chunks()
    seen = [[int(frame[0, 0, 0]) for frame in next(chunks).frames] for _ in range(3)]
    assert seen == [[0, 2, 4], [6, 8, 0], [2, 4, 6]]


def test_frames_of_several_sizes_cannot_be_sent_raw(tmp_path, triton):
    for index in range(6):
        Image.new("RGB", (4 + index, 4), "blue").save(tmp_path / f"{index}.png")
    arguments = [str(tmp_path), "--url", triton.url, "--fps", "6", "--send", "raw"]
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
