"""Tests of the image client, and of what both clients share, against a fake Triton server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image
from tritonclient.utils import InferenceServerException

from clients import common, video_analytics, visual_retrieval
from clients.common import ClientError, explain, sampling_parameters
from tests.support.fake_triton import FakeTriton
from tests.support.run_client import run_client


@pytest.fixture
def picture(tmp_path) -> Path:
    path = tmp_path / "scene.png"
    Image.new("RGB", (8, 8), "red").save(path)
    return path


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
        client = common.connect(server.url, "visual_retrieval")
        answers = common.stream_responses(
            client, "visual_retrieval", common.request_inputs("hi"), seconds=0.1
        )
        with pytest.raises(ClientError, match=r"no answer within 0 s"):
            next(answers)
        client.close()
        assert server.cancelled.wait(5)


def test_an_error_in_a_stream_reaches_the_user(picture):
    with FakeTriton() as server:
        server.refusal = "in ensemble 'visual_retrieval', NOT_FOUND: unknown adapter 'x'"
        done = run_client("visual_retrieval", str(picture), "--url", server.url)
    assert done.returncode == 1
    assert done.stderr == "error: NOT_FOUND: unknown adapter 'x'\n"


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


def test_a_folder_among_the_images_is_refused(tmp_path):
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
    for missing in (str(picture.parent / "gone"), str(picture.parent / "gone.txt")):
        with pytest.raises(ClientError, match=r"gone.* does not exist"):
            split([missing, "What is it?"])
    for question in ("What is in " + "the picture, " * 500, "Is it red/blue?", "and/or"):
        assert split([question]) == ([], question)


def test_an_error_about_an_image_names_its_file(picture):
    with FakeTriton() as server:
        server.refusal = "INVALID_ARG: image 1 is corrupt"
        arguments = [str(picture), str(picture), "What?", "--url", server.url]
        with pytest.raises(ClientError, match=r"image 1 is corrupt \(image 1: .*scene\.png\)$"):
            visual_retrieval.main(arguments)
        server.refusal = "INVALID_ARG: image 7 is corrupt"
        with pytest.raises(ClientError, match=r"image 7 is corrupt$"):
            visual_retrieval.main(arguments)


def test_an_image_that_cannot_be_read_is_named(picture, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ClientError, match=r"cannot read .*scene\.png: Permission denied"):
        visual_retrieval.main([str(picture), "What?"])


def test_an_empty_answer_is_said_to_be_empty(picture, capsys):
    with FakeTriton(words=("",)) as server:
        visual_retrieval.main([str(picture), "What?", "--url", server.url])
    assert capsys.readouterr().err.startswith("(empty answer, finish reason ")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-tokens", "many", "--max-tokens: must be a whole number, not 'many'"),
        ("--seed", "1.5", "--seed: must be a whole number, not '1.5'"),
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


def test_absent_options_are_not_sent():
    assert json.loads(sampling_parameters(None, seed=None, temperature=0)) == {"temperature": 0}
