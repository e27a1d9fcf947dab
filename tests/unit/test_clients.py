"""Tests of the clients against a fake Triton server, and of their functions."""

import io
import itertools
import json
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from tritonclient.utils import InferenceServerException

from benchmarks.perf_analyzer import inputs, sweep
from clients import frames, video_analytics, visual_retrieval
from clients.common import ClientError, explain, sampling_parameters
from tests.support.fake_triton import FakeTriton, metadata_of
from tests.support.polling import until
from tools.demo import show
from tools.demo.show import is_right

BOX = "<ref>a</ref><box>(0,0),(500,500)</box>"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """Let a chunk last 50 ms for clients in this process."""
    monkeypatch.setattr(video_analytics, "CHUNK_SECONDS", 0.05)


@pytest.fixture
def picture(tmp_path) -> Path:
    path = tmp_path / "scene.png"
    Image.new("RGB", (8, 8), "red").save(path)
    return path


def shared_regions() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("vlora_frames_*")}


def test_parts_of_an_answer_are_printed_as_they_arrive(picture, capsys):
    with FakeTriton() as server:
        visual_retrieval.main(
            [str(picture), "--url", server.url, "What", "is this?", "--adapter", "glyphs"]
        )
    assert capsys.readouterr().out == "a red star\n"
    (request,) = server.requests
    assert request["text_input"] == [b"What is this?"]
    assert request["image"] == [picture.read_bytes()]
    assert json.loads(request["sampling_parameters"][0]) == {"lora_name": "glyphs"}
    assert "task" not in request


def test_an_answer_that_stalls_times_out_and_is_cancelled(picture, monkeypatch):
    monkeypatch.setattr("clients.common.ANSWER_SECONDS", 0.1)
    with FakeTriton(delay=2.0, words=("never",)) as server:
        client = visual_retrieval.connect(server.url, "visual_retrieval")
        answers = visual_retrieval.stream_responses(
            client, "visual_retrieval", visual_retrieval.request_inputs("hi"), seconds=0.1
        )
        with pytest.raises(ClientError, match=r"no answer within 0 s"):
            next(answers)
        client.close()
        assert server.cancelled.wait(5)


def test_an_error_in_a_stream_reaches_the_user(picture):
    with FakeTriton() as server:
        server.refusal = "unknown adapter 'x'"
        done = run_client("visual_retrieval", str(picture), "--url", server.url)
    assert done.returncode == 1
    assert done.stderr == "error: unknown adapter 'x'\n"


def run_client(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "clients" / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("others", ["", "example.org"])
def test_a_proxy_does_not_carry_requests_to_this_machine(picture, monkeypatch, others):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", others)
    with FakeTriton() as server:
        done = run_client("visual_retrieval", str(picture), "--url", server.url)
    assert (done.stdout, done.stderr) == ("a red star\n", "")


@pytest.mark.parametrize("client", ["visual_retrieval", "video_analytics"])
def test_without_a_server_the_error_explains_how_to_start_one(client):
    done = run_client(client, "camera", "--url", "127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no server answers at")
    assert "start one with `make serve`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8001", "127.0.0.1", "localhost:grpc", "localhost:65536", ""]
)
def test_an_invalid_address_is_refused_with_an_example(url):
    with pytest.raises(ClientError, match=r"--url takes HOST:PORT, as in 127\.0\.0\.1:8001"):
        visual_retrieval.main(["hello", "--url", url])


def test_an_http_port_is_distinguished_from_a_closed_port():
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(ClientError, match=r"does not speak gRPC.* give the gRPC port"):
                visual_retrieval.main(["hello", "--url", f"127.0.0.1:{server.server_port}"])
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("message", "status", "shown"),
    [
        ("NOT_FOUND: unknown adapter 'x'", "NOT_FOUND", "NOT_FOUND: unknown adapter 'x'"),
        (
            "in ensemble, INVALID_ARG: no",
            "INVALID_ARGUMENT",
            "in ensemble, INVALID_ARG: no",
        ),
        ("Deadline Exceeded", "DEADLINE_EXCEEDED", "Deadline Exceeded [DEADLINE_EXCEEDED]"),
        ("INTERNAL: lost", "UNAVAILABLE", "INTERNAL: lost [UNAVAILABLE]"),
        ("plain", None, "plain"),
    ],
)
def test_an_error_code_is_shown_once(message, status, shown):
    given = None if status is None else f"StatusCode.{status}"
    assert explain(InferenceServerException(message, given)) == shown


def test_a_folder_is_not_a_question(tmp_path):
    with pytest.raises(ClientError, match="is a folder: give the image files"):
        visual_retrieval.main([str(tmp_path), "What color?", "--url", "127.0.0.1:9"])


def test_an_output_file_that_cannot_be_written_is_an_error(tmp_path):
    with FakeTriton() as server:
        arguments = ["camera", "--url", server.url, "--seconds", "1", "--jsonl", str(tmp_path)]
        with pytest.raises(ClientError, match=r"cannot write .*: Is a directory"):
            video_analytics.main(arguments)
    assert not server.requests


def test_a_url_as_source_is_refused():
    with pytest.raises(ClientError, match="URLs are not supported"):
        video_analytics.main(["rtsp://127.0.0.1/x", "--url", "127.0.0.1:9"])


def test_a_video_is_refused_by_the_image_client(tmp_path):
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"x")
    with pytest.raises(ClientError, match=r"clip\.mp4 is a video: use clients/video_analytics\.py"):
        visual_retrieval.main([str(clip), "What happens?", "--url", "127.0.0.1:9"])


def test_a_model_that_is_not_ready_is_named():
    with FakeTriton() as server:
        server.models = set()
        with pytest.raises(ClientError, match="no model 'visual_retrieval' ready"):
            visual_retrieval.main(["hello", "--url", server.url])


def test_words_are_files_or_the_question(picture):
    split = visual_retrieval.split_words
    assert split([str(picture), "What is", "in a.png or so?"]) == (
        [picture],
        "What is in a.png or so?",
    )
    with pytest.raises(ClientError, match=r"the file gone\.png does not exist"):
        split(["gone.png"])


@pytest.mark.parametrize("send", ["png", "jpeg", "raw"])
def test_every_stream_sends_its_chunks_and_every_answer_is_written(send, tmp_path, capsys):
    jsonl = tmp_path / "answers.jsonl"
    before = shared_regions()
    with FakeTriton() as server:
        arguments = ["camera", "--url", server.url, "--streams", "3", "--seconds", "2"]
        arguments += ["--send", send, "--jsonl", str(jsonl)]
        assert video_analytics.main(arguments) == 0
    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    keys = {(record["stream"], record["chunk"]) for record in records}
    assert keys == {(stream, chunk) for stream in range(3) for chunk in range(2)}
    assert all(len(record["result"]["frames"]) == 6 for record in records)
    assert {metadata_of(request)["stream"] for request in server.requests} == {0, 1, 2}
    assert len(server.registered) == (1 if send == "raw" else 0)
    assert server.regions == {}
    assert shared_regions() == before
    shown = capsys.readouterr().out
    assert shown.count("moving left") == 6
    assert "p50 ms" in shown


def test_raw_frames_arrive_as_the_camera_made_them():
    with FakeTriton() as server:
        arguments = ["camera", "--url", server.url, "--seconds", "1", "--send", "raw"]
        assert video_analytics.main(arguments) == 0
    sent = next(frames.SyntheticCamera(30, 6, seed=0).chunks()).frames
    np.testing.assert_array_equal(server.requests[0]["frames_raw"], np.stack(sent))


def test_a_server_that_refuses_shared_memory_is_reported_with_the_remedy():
    before = shared_regions()
    with FakeTriton() as server:
        server.allows_shared_memory = False
        arguments = ["camera", "--url", server.url, "--seconds", "1", "--send", "raw"]
        with pytest.raises(ClientError, match=r"refused.*restricted.*--allow-shared-memory.*jpeg"):
            video_analytics.main(arguments)
    assert shared_regions() == before
    assert server.requests == []


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_client_removes_shared_memory_and_prints_its_summary(ending):
    before = shared_regions()
    with FakeTriton(delay=0.3) as server:
        command = [sys.executable, "clients/video_analytics.py", "camera", "--url", server.url]
        command += ["--send", "raw", "--streams", "2", "--seconds", "60"]
        # A shell that runs these tests in the background has their children ignore Ctrl-C, unless
        # it is handled here while they start; code of ours between fork and exec could hang.
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
                assert shared_regions() > before
                client.send_signal(ending)
                shown, errors = client.communicate(timeout=20)
            finally:
                client.kill()
    assert client.returncode == 128 + ending
    assert "p50 ms" in shown
    assert errors == ""
    assert server.regions == {}
    assert shared_regions() == before


def test_a_stream_that_lags_drops_chunks(monkeypatch, capsys):
    monkeypatch.setattr(video_analytics, "MAX_IN_FLIGHT", 1)
    with FakeTriton(delay=0.3) as server:
        video_analytics.main(["camera", "--url", server.url, "--seconds", "2"])
    summary = capsys.readouterr().out.splitlines()[-1].split()
    assert summary[:4] == ["0", "1", "0", "1"]


def test_chunks_of_a_stream_supersede_each_other_and_what_the_server_drops_is_counted(
    tmp_path, capsys
):
    jsonl = tmp_path / "answers.jsonl"
    with FakeTriton() as server:
        server.refusal = "in ensemble 'x', CANCELLED: a newer request of stream 's' superseded this"
        arguments = ["camera", "--url", server.url, "--streams", "2", "--seconds", "2"]
        assert video_analytics.main([*arguments, "--jsonl", str(jsonl)]) == 0
    keys = [json.loads(request["sampling_parameters"][0]) for request in server.requests]
    assert len({key["stream_id"] for key in keys}) == 2
    assert all(key["supersede"] and key["deadline_ms"] > 0 for key in keys)
    assert all("superseded" in json.loads(x)["dropped"] for x in jsonl.read_text().splitlines())
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["1", "0", "0", "2"]


def test_an_answer_that_is_an_error_is_shown_and_counted(tmp_path, capsys):
    jsonl = tmp_path / "answers.jsonl"
    with FakeTriton() as server:
        server.refusal = "image 0 is corrupt"
        arguments = ["camera", "--url", server.url, "--seconds", "1", "--jsonl", str(jsonl)]
        assert video_analytics.main(arguments) == 1
    assert "image 0 is corrupt" in json.loads(jsonl.read_text())["error"]
    assert "error: image 0 is corrupt" in capsys.readouterr().out


def test_a_refusal_of_the_first_chunk_is_reported_once_and_ends_the_run(tmp_path):
    jsonl = tmp_path / "answers.jsonl"
    refusal = "in ensemble 'video_analytics', NOT_FOUND: unknown adapter 'x'. Known: y"
    with FakeTriton() as server:
        server.refusal = refusal
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
        assert video_analytics.main(["camera", "--url", server.url, "--seconds", "3"]) == 1
    assert len(server.requests) == 3


def test_a_folder_is_played_in_order_and_repeated(tmp_path):
    for index in range(10):
        Image.new("RGB", (4, 4), (index, 0, 0)).save(tmp_path / f"{index:03}.png")
    chunks = frames.open_source(str(tmp_path), fps=6, frames_per_chunk=3, stream=0).chunks()
    seen = [[int(frame[0, 0, 0]) for frame in next(chunks).frames] for _ in range(3)]
    assert seen == [[0, 2, 4], [6, 8, 0], [2, 4, 6]]


def test_frames_of_several_sizes_cannot_be_sent_raw(tmp_path):
    for index in range(6):
        Image.new("RGB", (4 + index, 4), "blue").save(tmp_path / f"{index}.png")
    with (
        FakeTriton() as server,
        pytest.raises(ClientError, match="must have the same size"),
    ):
        video_analytics.main(
            [str(tmp_path), "--url", server.url, "--fps", "6", "--send", "raw", "--seconds", "5"]
        )


def test_a_video_file_is_cut_into_seconds(tmp_path):
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for index in range(25):
            pixels = np.full((32, 32, 3), index * 10, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    chunks = frames.open_source(str(path), fps=30, frames_per_chunk=2, stream=0).chunks()
    shades = [[float(frame.mean()) for frame in next(chunks).frames] for _ in range(4)]
    np.testing.assert_allclose(shades, [[0, 50], [100, 150], [200, 220], [0, 50]], atol=6)


def test_a_video_of_an_absurd_rate_keeps_few_frames(tmp_path, monkeypatch):
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=1000)
        stream.width = stream.height = 32
        for _ in range(1000):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
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
    with pytest.raises(ClientError, match=name):
        next(frames.open_source(str(tmp_path / name), 30, 6, 0).chunks())


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


def test_absent_options_are_not_sent():
    assert json.loads(sampling_parameters(None, seed=None, temperature=0)) == {"temperature": 0}


@pytest.mark.parametrize(("share", "expected"), [(0.5, 5), (0.95, 10), (1.0, 10), (0.1, 1)])
def test_quantiles_use_the_nearest_rank(share, expected):
    assert video_analytics.quantile(range(1, 11), share) == expected
    assert video_analytics.quantile([], share) == 0


@pytest.mark.parametrize("model", inputs.MODELS)
def test_load_inputs_are_distinct_and_alternate_between_adapters(model, tmp_path):
    path = inputs.write_inputs(tmp_path / "in.json", model, ["base", "a", "b"], images=12, tokens=7)
    data = json.loads(path.read_text())["data"]
    given = [json.loads(entry["sampling_parameters"][0]) for entry in data]
    assert [g.get("lora_name") for g in given] == [None, "a", "b"] * 4
    assert all(g["max_tokens"] == g["min_tokens"] == 7 for g in given)
    pictures = [str(entry.get("image") or entry.get("frames")) for entry in data]
    assert len(set(pictures)) == (1 if model == "lmm-text" else 12)


def test_a_sweep_row_contains_rates_and_means():
    before = sweep.ServerCounters(10, 5, 100.0, 10.0)
    after = sweep.ServerCounters(22, 9, 148.0, 14.0)
    times = [(0.0, 0.1, 0.4), (0.5, 0.8, 1.0)]
    row = sweep.summarize("lmm", 2, times, before, after)
    assert row.requests_per_second == pytest.approx(2.0)
    assert (row.first_p50_ms, row.last_p50_ms) == (pytest.approx(100), pytest.approx(400))
    assert row.last_p95_ms == pytest.approx(500)
    assert (row.encoder_batch, row.decode_rows) == (3.0, 12.0)
    assert sweep.summarize("lmm-text", 2, times, before, before).encoder_batch is None
    assert "2.0" in sweep.line_of(row)


def test_times_are_read_from_a_profile_that_is_not_valid_json():
    profile = (
        b'{"requests":[{"timestamp":1000000000,"request_inputs":{"a":"\xff[1"},'
        b'"response_timestamps":[1500000000,2000000000],"response_outputs":["\x00"},'
        b'{"timestamp":3000000000,"response_timestamps":[4000000000],"x":"'
    )
    assert sweep.read_times(profile) == [(1.0, 1.5, 2.0), (3.0, 4.0, 4.0)]


def test_metrics_are_summed_over_labels(tmp_path):
    page = tmp_path / "metrics"
    page.write_text('# HELP a\na{x="1"} 2\na{x="2"} 3\nb 1e3\n')
    assert sweep.read_metrics(page.as_uri()) == {"a": 5.0, "b": 1000.0}
    with pytest.raises(ClientError, match="--metrics-url"):
        sweep.read_metrics("http://127.0.0.1:9/metrics")


@pytest.mark.parametrize(
    ("expected", "given", "right"),
    [
        ("blue", "blue", True),
        ("blue", "red", False),
        ("<ref>a</ref><box>(0,0),(500,500)</box>", "<ref>a</ref><box>(9,0),(490,500)</box>", True),
        ("<ref>a</ref><box>(0,0),(500,500)</box>", "<ref>b</ref><box>(0,0),(500,500)</box>", False),
        (
            "<ref>a</ref><box>(0,0),(500,500)</box>",
            "<ref>a</ref><box>(400,0),(900,500)</box>",
            False,
        ),
        ("<ref>a</ref><box>(0,0),(500,500)</box>", "nothing", False),
    ],
)
def test_a_demo_answer_is_judged_by_words_and_box_overlap(expected, given, right):
    assert is_right(expected, given) is right


def test_the_demo_reports_that_it_starts_a_server_without_a_terminal(monkeypatch):
    said = io.StringIO()
    with FakeTriton() as server:
        monkeypatch.setattr(show, "_own_server", lambda: nullcontext(server.url))
        with show.server_at("127.0.0.1:9", Console(file=said)):
            pass
    assert said.getvalue().startswith("no server at 127.0.0.1:9: starting one")


def test_the_demo_table_shows_boxes_without_tags_and_the_expected_answer():
    sample = show.Sample("s", "detect", None, "a", BOX, (), [], [], is_video=False)
    said = io.StringIO()
    wrong = BOX.replace("500,500", "90,90")
    table = show.table_of([sample, sample], [show.Answer(BOX, 0.1), show.Answer(wrong, 0.1)])
    Console(file=said, width=80).print(table)
    shown = said.getvalue()
    assert shown.count("(0,0),(500,500)") == 2
    assert "expected: a" in shown
    assert "<box>" not in shown
