"""Tests of the clients against a fake Triton server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from PIL import Image
from tritonclient.utils import InferenceServerException

from clients import common, video_analytics, visual_retrieval
from clients.common import ClientError, explain, sampling_parameters
from tests.support.fake_triton import FakeTriton
from tests.support.http_server import http_server, response
from tests.support.run_client import run_client
from vlora.errors import ADAPTER_CHANGED

MODEL = "visual_retrieval"
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
    triton.refusals = [common.SHUTTING_DOWN]
    visual_retrieval.main(["--url", triton.url, "What is this?", "--adapter", "glyphs"])
    assert capsys.readouterr().out == "a red star\n"
    assert [one["x-lora-adapter"] for one in triton.headers] == ["glyphs", "glyphs"]
    assert common.routing_headers("a/b", "gate 2") == {"x-lora-adapter": "a%2Fb/gate%202"}
    assert common.routing_headers(None) == {}


def test_a_stream_whose_adapter_was_changed_is_sent_again(triton, capsys, monkeypatch):
    assert ADAPTER_CHANGED in common.PAUSES
    monkeypatch.setitem(common.PAUSES, ADAPTER_CHANGED, [0.0] * 2)
    refusal = f"in ensemble 'visual_retrieval', UNAVAILABLE: adapter 'a' {ADAPTER_CHANGED}; send"
    triton.refusals = [refusal] * 2
    visual_retrieval.main(["--url", triton.url, "What is this?"])
    assert capsys.readouterr().out == "a red star\n"
    triton.refusals = [refusal] * 3
    with pytest.raises(InferenceServerException, match=ADAPTER_CHANGED):
        [*common.stream_responses(common.connect(triton.url, MODEL), MODEL, [])]


def test_an_answer_that_stalls_times_out_and_is_cancelled(monkeypatch):
    monkeypatch.setattr("clients.common.ANSWER_SECONDS", 0.1)
    with FakeTriton(delay=60.0, words=("never",)) as triton:
        client = common.connect(triton.url, "visual_retrieval")
        answers = common.stream_responses(
            client, "visual_retrieval", common.request_inputs("hi"), seconds=0.1
        )
        with pytest.raises(ClientError, match=r"no answer within 0 s"):
            next(answers)
        client.close()
        assert triton.cancelled.wait(60)


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


def play(triton, monkeypatch, count, least, *options):
    """Run the client for a camera until each stream has `least` of a count; return its status."""

    async def show(watch, *_):
        while any(getattr(one.counts, count) < least for one in watch.watched()):
            await asyncio.sleep(0.05)

    monkeypatch.setattr("vlora.cli.watch._show", show)
    arguments = ["camera", "--url", triton.url, "--seconds", "60", *map(str, options)]
    return video_analytics.main(arguments)


def test_every_stream_sends_its_chunks_and_every_answer_is_written(
    triton, tmp_path, capsys, monkeypatch
):
    jsonl = tmp_path / "answers.jsonl"
    options = ("--streams", 3, "--jsonl", jsonl, "--deadline-ms", 900)
    assert play(triton, monkeypatch, "answered", 2, *options) == 0
    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    assert {record["camera"] for record in records} == {"stream 0", "stream 1", "stream 2"}
    assert len(records) >= 6
    assert all(len(record["result"]["frames"]) == 6 for record in records)
    right = sum(record["truth"] == "moving left" for record in records)
    keys = [json.loads(request["sampling_parameters"][0]) for request in triton.requests]
    assert len({key["stream_id"] for key in keys}) == 3
    assert {key["deadline_ms"] for key in keys} == {900}
    shown = capsys.readouterr().out
    assert shown.count("moving left") >= len(records)
    assert f"{right} of {len(records)} answers are right" in shown
    assert "p95 s" in shown


def test_an_answer_that_is_an_error_is_shown_and_counted(triton, capsys, monkeypatch):
    triton.refusal = "INVALID_ARG: image 0 is corrupt"
    assert play(triton, monkeypatch, "errors", 1) == 1
    assert capsys.readouterr().out.count("stream 0: image 0 is corrupt") == 1


@pytest.mark.parametrize("name", ["empty", "text.mp4", "gone"])
def test_a_source_that_cannot_be_played_is_named(name, tmp_path, triton):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(ClientError, match=name) as caught:
        video_analytics.main([str(tmp_path / name), "--url", triton.url])
    assert "Errno" not in str(caught.value)
