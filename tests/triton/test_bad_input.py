"""Tests that malformed requests get typed errors at once, and do not affect other requests."""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.support.triton_client import Asker, Refused, asking, picture, wrong

RETRIEVAL, ANALYTICS = "visual_retrieval", "video_analytics"
HEALTHY = {"text_input": "What is this?", "sampling_parameters": {"lora_name": "all-r8"}}


def bomb() -> bytes:
    """Return a PNG of 30000 × 30000 pixels in a few kilobytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", 30000, 30000, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(3751 * 300), 9)
    start = b"\x89PNG\r\n\x1a\n"
    return start + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def animation() -> bytes:
    """Return an animated GIF."""
    from PIL import Image

    content = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), (i * 50, 0, 0)) for i in range(3)]
    frames[0].save(content, "GIF", save_all=True, append_images=frames[1:])
    return content.getvalue()


@dataclass(frozen=True)
class Bad:
    """A malformed request: its inputs, and a pattern that its error message must match."""

    name: str
    code: str
    message: str
    values: dict[str, Any] = field(default_factory=dict)
    text: str | bytes | None = "What is this?"

    def inputs(self) -> dict[str, Any]:
        return {"text_input": self.text, **self.values}


def sampling(name: str, code: str, message: str, **keys: Any) -> Bad:
    return Bad(name, code, message, {"sampling_parameters": keys})


def raw_sampling(name: str, message: str, text: str) -> Bad:
    return Bad(name, "INVALID_ARG", message, {"sampling_parameters": text})


BAD = [
    Bad("a corrupt image", "INVALID_ARG", "image 0 is corrupt", {"image": picture()[:60]}),
    Bad(
        "bytes that are not an image",
        "INVALID_ARG",
        "image 1 is neither",
        {"image": [picture(), b"hello"]},
    ),
    Bad(
        "a decompression bomb",
        "INVALID_ARG",
        "900.* megapixels; the limit is 40",
        {"image": bomb()},
    ),
    Bad("an animated image", "INVALID_ARG", "animated.*'frames'", {"image": animation()}),
    Bad("an empty image", "INVALID_ARG", "image 0 is empty", {"image": b""}),
    Bad("a thousand frames", "INVALID_ARG", "1000.*64", {"frames": [picture()] * 1000}),
    Bad("65 images", "INVALID_ARG", "65.*64", {"image": [picture()] * 65}),
    Bad("an empty prompt", "INVALID_ARG", "prompt is empty", {}, text=""),
    Bad("a missing prompt", "INVALID_ARG", "'text_input' is missing", {"image": picture()}, None),
    Bad("a prompt that is too long", "INVALID_ARG", "1024", {}, text="word " * 5000),
    Bad("a prompt that is not UTF-8", "INVALID_ARG", "UTF-8", {}, text=b"\xff\xfe\xfa"),
    Bad("an unknown task", "INVALID_ARG", "vqa, caption, refer", {"task": "dance"}),
    Bad("metadata that is too big", "INVALID_ARG", "1048577.*1048576", {"metadata": "m" * 1048577}),
    sampling("an unknown adapter", "NOT_FOUND", "attention-r4", lora_name="unknown"),
    sampling(
        "a broken adapter",
        "INVALID_ARG",
        "adapter_broken: adapter 'broken': adapter_config.json",
        lora_name="broken",
    ),
    sampling("an adapter that is not a string", "INVALID_ARG", "must be a string", lora_name=3),
    sampling("an unknown key", "INVALID_ARG", "did you mean 'temperature'", temperatur=1),
    sampling("several answers", "UNSUPPORTED", "'n' = 3", n=3),
    sampling("a negative temperature", "INVALID_ARG", "'temperature' must be", temperature=-1),
    sampling("too many tokens", "INVALID_ARG", "100000.*1024", max_tokens=100000),
    sampling("an empty list of choices", "INVALID_ARG", "'choices' must be", choices=[]),
    raw_sampling("5,000 digits", "5000 digits; the limit is 400", '{"seed": ' + "7" * 5000 + "}"),
    Bad("a task that is not UTF-8", "INVALID_ARG", "UTF-8", {"task": b"\xed\xa0\x80"}),
    Bad(
        "a task of control characters",
        "INVALID_ARG",
        r"unknown task '\\x00\\u202e'",
        {"task": "\0\u202e"},
    ),
    Bad("a long unknown task", "INVALID_ARG", "'task' has 2000 bytes.*1024", {"task": "ж" * 1000}),
    sampling("a long value", "INVALID_ARG", r"'temperature'.*é\.\.\.é", temperature="é" * 9000),
    Bad("a prompt of 1 MiB", "INVALID_ARG", "bytes; the context of 1024", {}, "x" * 2**20),
    Bad("a prompt of 2 MiB", "INVALID_ARG", "2097152 bytes; the limit is 1048576", {}, "x" * 2**21),
    raw_sampling("malformed JSON", "not valid JSON.* at character", '{"temperature": 1'),
    raw_sampling(
        "JSON that is too big", "bytes; the limit is 65536", json.dumps({"x": "y" * 70000})
    ),
    raw_sampling("JSON that is too deep", "nested too deeply", '{"a":' * 13000),
]


@pytest.fixture(scope="module")
def healthy(server: Any) -> str:
    """Return the answer to a valid request."""
    with asking(server) as asker:
        return asker.text(RETRIEVAL, image=picture((1, 2, 3)), **HEALTHY)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_malformed_request_gets_its_error_and_concurrent_ones_their_answers(
    ask: Asker, healthy: str, bad: Bad
) -> None:
    ready = threading.Barrier(4)

    def valid() -> str:
        ready.wait()
        return ask.text(RETRIEVAL, image=picture((1, 2, 3)), **HEALTHY)

    def rejected(call: Callable[..., Any], model: str) -> Refused:
        ready.wait()
        with pytest.raises(Refused) as caught:
            call(model, **bad.inputs())
        return caught.value

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(valid) for _ in range(2)]
        streamed = pool.submit(rejected, ask.stream, RETRIEVAL)
        unary = pool.submit(rejected, ask.once, ANALYTICS)
    for error in (streamed.result(), unary.result()):
        assert f"{bad.code}: " in error.message
        assert "Traceback" not in error.message
        assert re.search(bad.message, error.message, re.DOTALL), error.message
    statuses = {
        "INVALID_ARG": "INVALID_ARGUMENT",
        "NOT_FOUND": "NOT_FOUND",
        "UNSUPPORTED": "UNIMPLEMENTED",
    }
    assert unary.result().status == f"StatusCode.{statuses[bad.code]}"
    assert [other.result() for other in others] == [healthy] * 2


@pytest.mark.parametrize("text", [r'{"lora_name": "\ud800"}', r'{"a\udfff": 1}', '{"seed": 1e999}'])
@pytest.mark.parametrize("image", [None, picture()], ids=["text", "image"])
def test_text_that_is_not_valid_utf8_is_rejected_by_every_model(
    ask: Asker, text: str, image: bytes | None
) -> None:
    question = {"text_input": "What?", "image": image, "sampling_parameters": text}
    for model in ("lmm", "visual_retrieval"):
        with pytest.raises(Refused, match="INVALID_ARG: ") as caught:
            ask.stream(model, **question)
        assert "Traceback" not in caught.value.message
    for model in ("lmm_unary", "video_analytics"):
        with pytest.raises(Refused, match="INVALID_ARG: "):
            ask.once(model, **question)


def test_an_http_connection_stays_open_after_text_that_is_not_valid_utf8(ask: Asker) -> None:
    bad = {"text_input": "x", "sampling_parameters": r'{"lora_name": "\ud800"}'}
    bad["image"] = base64.b64encode(picture()).decode()
    connection = http.client.HTTPConnection(ask.http_url, timeout=30)
    try:
        for body, expected in ((bad, 400), ({"text_input": "x"}, 200), (bad, 400)):
            connection.request("POST", "/v2/models/lmm/generate", json.dumps(body))
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (expected, True)
    finally:
        connection.close()


def test_a_request_id_that_is_not_valid_utf8_is_rejected(ask: Asker) -> None:
    for model in ("lmm", "video_analytics"):
        body = b'{"id": "\xff\xfe", "text_input": "x"}'
        status, text = ask.http(model, "generate", body)
        assert status == 400, text
        assert "UTF-8" in text


def features(rows: int = 64, value: float = 0.0) -> np.ndarray:
    return np.full((rows, 192), value, np.float32)


def layout(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, np.int32).reshape(-1, 6)


ONE_IMAGE = (0, 64, 1, 8, 8, 0)
BAD_FEATURES = {
    "infinite values": ("NaN or infinite", {"image_features": features(value=float("inf"))}),
    "too many rows": ("covers 64 rows, 'image_features' has 65", {"image_features": features(65)}),
    "a negative count": ("at least one", {"image_layout": layout((0, -64, 1, 8, 8, 0))}),
    "an empty grid": ("must be positive", {"image_layout": layout((0, 64, 0, 8, 8, 0))}),
    "a negative number of frames": ("0 or more", {"image_layout": layout((0, 64, 1, 8, 8, -1))}),
    "too many frames": ("show at most", {"image_layout": layout((0, 64, 1, 8, 8, 10**6))}),
    "images and features": ("'image' and 'image_features'", {"image": picture()}),
    "another rank": (
        "unexpected shape for input 'image_features'",
        {"image_features": wrong("image_features", np.zeros((1, 64, 192), np.float32), "FP32")},
    ),
    "another type": (
        "data-type is 'FP64'",
        {"image_features": wrong("image_features", np.zeros((64, 192)), "FP64")},
    ),
}


@pytest.mark.parametrize("name", BAD_FEATURES)
def test_features_that_do_not_fit_are_rejected(ask: Asker, name: str) -> None:
    message, changed = BAD_FEATURES[name]
    question = {
        "image_features": features(),
        "image_layout": layout(ONE_IMAGE),
        "text_input": "What?",
    }
    with pytest.raises(Refused, match=message) as caught:
        ask.once("lmm_unary", **{**question, **changed})
    assert caught.value.status == "StatusCode.INVALID_ARGUMENT"


@pytest.mark.parametrize("model", ["visual_retrieval", "video_analytics", "lmm", "lmm_unary"])
def test_a_wrong_dtype_or_shape_is_rejected(ask: Asker, model: str) -> None:
    call = ask.once if model in ("video_analytics", "lmm_unary") else ask.stream
    two = wrong("text_input", np.array([b"a", b"b"], dtype=object), "BYTES")
    number = wrong("text_input", np.array([1], np.int32), "INT32")
    for value, message in ((two, "unexpected shape"), (number, "data-type is 'INT32'")):
        with pytest.raises(Refused, match=message):
            call(model, text_input=value)


def test_an_unknown_input_is_rejected(ask: Asker) -> None:
    with pytest.raises(Refused, match="unexpected inference input 'picture'"):
        ask.once(ANALYTICS, text_input="What?", picture="x")


def test_a_request_without_a_prompt_is_rejected(ask: Asker) -> None:
    with pytest.raises(Refused) as caught:
        ask.once(ANALYTICS)
    assert caught.value.status == "StatusCode.INVALID_ARGUMENT"
    for model, call in (("lmm", ask.stream), ("lmm_unary", ask.once)):
        with pytest.raises(Refused, match="'text_input' is missing"):
            call(model, task="vqa")


def test_empty_lists_of_images_are_the_same_as_no_images(ask: Asker) -> None:
    question = {"text_input": "Just words?", "image": [], "frames": []}
    assert (
        ask.once(ANALYTICS, **question)["num_input_tokens"]
        == (ask.once(ANALYTICS, text_input="Just words?")["num_input_tokens"])
    )


def test_a_batch_of_prompts_for_the_encoder_is_rejected(ask: Asker) -> None:
    text = np.array([[b"a"], [b"b"]], dtype=object)
    with pytest.raises(Refused, match="INVALID_ARG: the request has a batch of prompts"):
        ask.once("vision_encoder", text_input=text)


def test_malformed_http_is_rejected_and_the_server_continues(ask: Asker) -> None:
    assert ask.http("lmm", "generate", b'{"text_input": ')[0] >= 400
    status, body = ask.http("lmm", "generate", {"text_input": "x", "temperature": "hot"})
    assert (status, "'temperature' must be" in body) == (400, True)
    assert ask.http("lmm", "generate", {"text_input": "x"})[0] == 200


@pytest.mark.alone
def test_errors_are_sent_without_delay(ask: Asker) -> None:
    started = time.monotonic()
    for _ in range(10):
        with pytest.raises(Refused):
            ask.once(ANALYTICS, text_input="What?", image=bomb())
    assert time.monotonic() - started < 5


def raw_strings(name: str, shape: list[int], content: bytes) -> grpcclient.InferInput:
    """Return a STRING input with this content, which need not be valid."""
    tensor = grpcclient.InferInput(name, shape, "BYTES")
    tensor._raw_content = content
    return tensor


@pytest.mark.parametrize(
    ("count", "length", "message"),
    [
        (2_000_000, 0, "'frames' has 2000000 elements; the limit is 16384"),
        # Triton's own words or ours, depending on how it passes the request on.
        (1, 99, "incomplete string data|'frames' does not hold 1 elements"),
    ],
    ids=["millions of elements", "a wrong length prefix"],
)
def test_strings_that_cannot_be_read_fail_no_other_request_of_their_batch(
    ask: Asker, healthy: str, count: int, length: int, message: str
) -> None:
    content = length.to_bytes(4, "little") * count
    for model, shape in (("vision_encoder", [1, count]), (ANALYTICS, [count]), ("lmm", [count])):
        text = np.array([[b"?"]] if model == "vision_encoder" else [b"?"], dtype=object)
        call = ask.stream if model == "lmm" else ask.once
        with ThreadPoolExecutor(8) as pool:
            others = [
                pool.submit(ask.once, ANALYTICS, image=picture((1, 2, 3)), **HEALTHY)
                for _ in range(8)
            ]
            frames = raw_strings("frames", shape, content)
            with pytest.raises(Refused, match=message):
                call(model, text_input=text, frames=frames)
            assert {str(other.result()["text_output"]) for other in others} == {healthy}


def test_valid_and_malformed_requests_of_one_batch_each_get_their_own_answer(
    ask: Asker, healthy: str
) -> None:
    def one(index: int) -> str:
        image = picture((1, 2, 3)) if index % 2 else picture()[: 40 + index]
        try:
            return str(ask.once(ANALYTICS, image=image, **HEALTHY)["text_output"])
        except Refused as error:
            return (
                "rejected" if "INVALID_ARG: image 0 is corrupt" in error.message else error.message
            )

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(one, range(32)))
    assert texts == ["rejected", healthy] * 16
