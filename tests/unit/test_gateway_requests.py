"""Tests that the gateway receives a request's body, reads its fields and loads its media."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from collections import Counter
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from tests.support.http_server import http_server, response
from vlora.gateway import media
from vlora.gateway.answers import CompletionWriter
from vlora.gateway.backend import Piece
from vlora.gateway.bodies import LONG_BYTES, LONG_COMMAS, Bodies, Held, _UrlScanner
from vlora.gateway.errors import ApiError
from vlora.gateway.media import MediaLoader, decode, is_public
from vlora.gateway.messages import MAX_MEDIA, Conversation, Media
from vlora.gateway.options import MIB, GatewayOptions
from vlora.gateway.requests import MAX_COMMAS, Ask, of_tenant, read_body, read_chat, read_completion

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CLIP = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AA,BB,CC"}}
PICTURE = "messages[0].content[0].image_url"


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def chat(*parts: Any, **fields: Any) -> Ask:
    messages = [{"role": "user", "content": list(parts) or "What?"}]
    return read_chat({"model": "base", "messages": messages, **fields})


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        read_chat({"model": "base", "messages": [{"role": "user", "content": "What?"}], **fields})
    return refused.value


def parts_of(ask: Ask) -> list[list[dict[str, str]]]:
    return [turn["content"] for turn in json.loads(ask.conversation.text)["messages"]]


def test_texts_and_images_become_parts_in_their_order() -> None:
    ask = chat(text("a <image>"), IMAGE, text(" b"))
    assert parts_of(ask) == [[text("a <image>"), {"type": "image"}, text(" b")]]
    assert [media.param for media in ask.conversation.images] == [
        "messages[0].content[1].image_url.url"
    ]
    assert parts_of(chat()) == [[text("What?")]]


def test_a_zero_in_a_field_is_passed_on() -> None:
    zeros = dict.fromkeys(("temperature", "seed", "priority", "min_tokens", "top_k"), 0)
    ask = chat(**zeros, logprobs=True, top_logprobs=0, stop_token_ids=[0], max_tokens=0)
    passed = {**zeros, "logprobs": 0, "stop_token_ids": [0], "max_tokens": 0}
    assert {key: ask.sampling[key] for key in passed} == passed
    assert ask.logprobs


def test_the_message_of_the_task_raw_is_a_prompt() -> None:
    assert chat(IMAGE, IMAGE, text("Same?"), task="raw").conversation.text == "Same?"
    assert chat(text("a "), IMAGE, text(" b"), task="raw").conversation.text == "a <image> b"
    assert chat(IMAGE, text("a <image> b"), task="raw").conversation.text == "a <image> b"
    assert not chat(text("a"), task="raw").has_messages
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert refusal(messages=turns, task="raw").param == "messages"


@pytest.mark.parametrize("name", ["model", "task"])
def test_a_name_that_is_long_is_refused_without_an_echo(name: str) -> None:
    # A body may be large if a value looks like a data URL.
    refused = refusal(**{name: "data:" + "x" * 1000})
    assert (refused.param, refused.message[-37:]) == (name, "has 1005 characters; the limit is 256")


def test_clips_and_pictures_come_in_any_order() -> None:
    kinds = ("mp4", "webm", "quicktime", "x-matroska", "mp2t")
    files = [f"data:video/{kind};base64,AA" for kind in kinds] + ["https://host/a.mp4"]
    files.insert(2, CLIP["video_url"]["url"])
    parts = [{"type": "video_url", "video_url": {"url": url}} for url in files]
    extra = {
        "media_io_kwargs": {"video": {"num_frames": "8"}},
        "mm_processor_kwargs": {"fps": 2, "max_pixels": 4096},
    }
    read = chat(*parts[:1], IMAGE, *parts[1:], text("What?"), **extra)
    conversation = read.conversation
    assert [one.url for one in conversation.videos] == files
    assert decode(conversation.videos[2]) == files[2].encode()
    assert len(conversation.images) == 1
    content = json.loads(conversation.text)["messages"][0]["content"]
    assert [part["type"] for part in content[:3]] == ["video", "image", "video"]
    assert {key: read.sampling[key] for key in extra} == extra
    place = "messages[0].content[2].video_url.url"
    assert conversation.without_urls().place_of("video 1 is corrupt") == place
    for url in ("data:video/avi;base64,AA", "data:video/jpeg;base64", "file:///a.mp4", "rtsp://a"):
        with pytest.raises(ApiError, match="must be a video file, data:video/mp4;base64"):
            chat({"type": "video_url", "video_url": {"url": url}})
    with pytest.raises(ApiError, match="is a video; send it as a 'video_url'"):
        chat({"type": "image_url", "image_url": {"url": "data:video/mp4;base64,AA"}})


@pytest.mark.parametrize("priority", [-1, "-5", -(2**31)])
def test_a_tenant_has_a_salt_and_goes_before_no_other(priority: Any) -> None:
    assert of_tenant({"priority": "3"}, "alice") == {"priority": "3", "cache_salt": "alice"}
    with pytest.raises(ApiError, match="'priority' must be a whole number from 0"):
        of_tenant({"priority": priority}, "alice")
    with pytest.raises(ApiError, match="'cache_salt' = 'bob' is not supported"):
        read_chat({"model": "m", "messages": [], "cache_salt": "bob"})


@pytest.mark.parametrize("frames", [0, 1000])
def test_the_number_of_images_and_frames_is_limited_before_they_are_read(frames: int) -> None:
    clip = "data:video/jpeg;base64," + ",".join(["AA"] * frames)
    parts = [IMAGE] * (MAX_MEDIA - frames)
    parts += [{"type": "video_url", "video_url": {"url": clip}}] if frames else []
    assert len(chat(*parts).conversation.images) == MAX_MEDIA - frames
    with pytest.raises(ApiError, match="has 1025 or more images, videos and frames; the limit is"):
        chat(IMAGE, *parts)


def test_all_messages_are_passed_on_with_their_roles_and_options() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [IMAGE, text("What is it?")]},
        {"role": "assistant", "content": "A"},
    ]
    prefilled = {"add_generation_prompt": False, "continue_final_message": True}
    ask = read_chat({"model": "base", "messages": messages, **prefilled})
    sent = json.loads(ask.conversation.text)
    assert ask.task is None
    assert ask.has_messages
    assert [turn["role"] for turn in sent["messages"]] == ["system", "user", "assistant"]
    assert {name: sent[name] for name in prefilled} == prefilled
    assert refusal(**prefilled).param == "continue_final_message"


def test_a_chat_is_greedy_and_as_long_as_the_context_unless_it_says_otherwise() -> None:
    assert chat().sampling == {"temperature": 0, "stream_interval_ms": 20, "max_tokens": None}
    given = chat(temperature=0.5, max_completion_tokens=7, top_k=3, stop=["."], seed=1, user="me")
    assert given.sampling == {
        "temperature": 0.5,
        "stream_interval_ms": 20,
        "max_tokens": 7,
        "top_k": 3,
        "stop": ["."],
        "seed": 1,
    }


@pytest.mark.parametrize(
    ("fields", "structure"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": {"a": 1}}}, {"json": {"a": 1}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            {"json": {"a": 1}},
        ),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"], "json": None}}, {"choice": ["a", "b"]}),
    ],
)
def test_every_way_to_restrict_the_answer_becomes_structured_outputs(
    fields: dict[str, Any], structure: dict[str, Any] | None
) -> None:
    sent = chat(**fields).sampling.get("structured_outputs")
    assert (sent and json.loads(sent)) == structure


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("What?", "messages"),
        (["What?"], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": 7, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], PICTURE),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 7}}]}], PICTURE),
    ],
)
def test_a_message_of_a_wrong_form_is_refused_by_its_place(messages: Any, param: str) -> None:
    error = refusal(messages=messages)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "m" * 257}, "model"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    ],
)
def test_a_field_that_cannot_be_served_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == ("INVALID_ARG", param)
    assert json.loads(error.as_json())["error"]["type"] == "invalid_request_error"


def test_a_completion_has_one_prompt_and_a_number_of_alternatives() -> None:
    ask = read_completion({"model": "base", "prompt": ["Once"], "logprobs": 2, "max_tokens": 3})
    assert (ask.conversation.text, ask.top_logprobs, ask.task) == ("Once", 2, None)
    for wrong in ({"prompt": ["a", "b"]}, {"prompt": [1]}, {"prompt": "a", "logprobs": "5"}):
        with pytest.raises(ApiError, match="must be"):
            read_completion({"model": "base", **wrong})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff", "UTF-8 at byte 0"),
        (b"[]", "must be a JSON object"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "64 levels"),
        (b'{"a": [' + b"0," * MAX_COMMAS + b"0, 0]}", "commas"),
    ],
)
def test_a_body_is_one_json_object_of_bounded_depth_and_number_of_values(
    body: bytes, message: str
) -> None:
    with pytest.raises(ApiError, match=message):
        read_body(body)


def test_an_unknown_field_with_a_long_name_is_refused_without_a_search() -> None:
    error = refusal(**{"x" * 10_000_000: 1})
    assert len(error.message) < 300
    assert len(error.param or "") < 100


def test_a_long_body_is_parsed_beside_the_event_loop() -> None:
    """Other requests are served meanwhile: parsing ends only after the loop has run a callback."""
    went_on = threading.Event()

    async def parsed() -> tuple[str, str]:
        bodies = Bodies(GatewayOptions())
        asyncio.get_running_loop().call_soon(went_on.set)
        large = await bodies.parse(bytearray(LONG_BYTES + 1), name_of_thread, "-")
        many = await bodies.parse(bytearray(b"," * (LONG_COMMAS + 1)), name_of_thread, "-")
        small = await bodies.parse(bytearray(LONG_BYTES), name_of_thread, "-")
        bodies.close()
        assert many.startswith("parser of values")
        return large, small

    def name_of_thread(body: bytearray) -> str:
        assert went_on.wait(60)
        return threading.current_thread().name

    large, small = asyncio.run(parsed())
    assert large.startswith("parser_")
    assert small == threading.current_thread().name


def test_a_tenants_body_waits_for_one_body_of_another_tenant_at_most() -> None:
    parsed: list[bytes] = []
    all_wait = threading.Event()

    async def parse_all() -> None:
        bodies = Bodies(GatewayOptions())
        sent = [(b"a", "a")] * 20 + [(b"b", "b")]
        parsing = asyncio.gather(
            *(bodies.parse(bytearray(one * (LONG_BYTES + 1)), read, who) for one, who in sent)
        )
        asyncio.get_running_loop().call_soon(all_wait.set)  # After the first step of each task.
        await parsing
        bodies.close()

    def read(body: bytearray) -> None:
        assert all_wait.wait(60)
        parsed.append(bytes(body[:1]))

    asyncio.run(parse_all())
    assert len(parsed) == 21
    assert parsed.index(b"b") <= 1


def test_a_picture_does_not_wait_for_bodies_with_many_values() -> None:
    free = threading.Event()

    async def parse_all() -> None:
        bodies = Bodies(GatewayOptions())
        slow = bodies.parse(bytearray(b"," * (LONG_COMMAS + 1)), lambda _: free.wait(60), "a")
        picture = bodies.parse(bytearray(LONG_BYTES + 1), lambda _: free.set(), "b")
        assert await asyncio.gather(slow, picture) == [True, None]
        bodies.close()

    asyncio.run(parse_all())


class Upload:
    """A body in parts of `size` bytes. taken: number of parts received. stalls: it never ends."""

    def __init__(self, body: bytes, size: int = 64 * 1024, stalls: bool = False) -> None:
        self.parts = [body[start : start + size] for start in range(0, len(body), size)]
        self.stalls = stalls
        self.taken = 0

    async def __call__(self) -> dict[str, Any]:
        if self.taken == len(self.parts):
            await asyncio.sleep(60)
        self.taken += 1
        more = self.stalls or self.taken < len(self.parts)
        return {"type": "http.request", "body": self.parts[self.taken - 1], "more_body": more}

    def receive(self, bodies: Bodies, held: Held) -> bytearray:
        headers = [(b"content-type", b"application/json")]
        request = Request({"type": "http", "headers": headers}, self)
        return asyncio.run(bodies.receive(request, held))


@pytest.mark.parametrize(
    ("start", "content"),
    [
        (b'{"user": "', b",0"),
        (b'{"data:', b",0"),
        (b'{"stop": [0', b",0"),
        (b'{"x": "data:", "y": "', b",0"),
        (b'{"text": "data:', b",0"),
        (b'{"url": ["data:', b",0"),
        (b'{"url": "data:', b"\\n"),
        (b'{"url": "data:', "é".encode()),
        (b'{"url": "data:', b",0"),
        (b'{"url":"data:', b"\\/" + b"A" * 62),
    ],
)
def test_only_data_urls_of_a_body_may_be_large(start: bytes, content: bytes) -> None:
    """The rest is bounded while it arrives, and so is what is no base64 in a URL."""
    bodies = Bodies(GatewayOptions())
    with bodies.holding("-") as held:
        large = Upload(start + content * (8 * 1024**2 // len(content)))
        if b'url"' in start and content.isascii() and content != b"\\n" and b"[" not in start:
            assert len(large.receive(bodies, held)) == 8 * 1024**2 + len(start)
        else:
            with pytest.raises(
                ApiError, match="more than 4194304 bytes without its images"
            ) as error:
                large.receive(bodies, held)
            assert error.value.code == "TOO_LARGE"
            assert large.taken in (64, 65)
    with bodies.holding("-") as held:
        body = b'{"url": "data:image/png;base64,' + b"A" * 100_000 + b'", "a": ["data:", "data:x"]}'
        for size in (1, 7, 1000):
            scanner = _UrlScanner()
            arrived = bytearray()
            for part in Upload(body, size).parts:
                arrived += part
                scanner.scan(arrived)
            assert scanner.json_bytes < 300
        assert Upload(body * 60, 100_000).receive(bodies, held) == body * 60


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_stalled_upload_ends_soon(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlora.gateway.bodies.WINDOW_SECONDS", 0.2)
    bodies = Bodies(GatewayOptions())
    with bodies.holding("-") as held, pytest.raises(ApiError, match="fewer than 163840 bytes"):
        Upload(b"[" + b" " * size, stalls=True).receive(bodies, held)


def test_a_tenant_has_a_share_of_the_memory_for_bodies_and_small_bodies_a_part_of_it() -> None:
    bodies = Bodies(GatewayOptions(keys=Path("keys"), max_held_bytes=80 * MIB))
    with bodies.holding("a") as a, bodies.holding("b") as b, bodies.holding("c") as c:
        a.add(40 * MIB)
        with pytest.raises(ApiError, match=f"your requests have more than {40 * MIB} bytes"):
            a.add(1)
        b.add(30 * MIB)
        with pytest.raises(ApiError, match=f"all requests have more than {70 * MIB} bytes"):
            b.add(1)
        c.add(MIB)
        with pytest.raises(ApiError, match="all requests"):
            c.add(1)
        a.release()
        c.add(30 * MIB)
    assert bodies._held == {}


def test_a_message_is_bounded_whatever_it_quotes() -> None:
    assert len(ApiError("INVALID_ARG", "x" * 10**7, "y" * 10**7).as_json()) < 5000
    with pytest.raises(ApiError) as error:
        read_body(b'{"%b": 1, "%b": 2}' % (b"a" * 10**6, b"a" * 10**6))
    assert len(error.value.message) < 300


def test_an_encoded_body_is_refused_by_the_name_of_its_encoding() -> None:
    headers = [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")]

    async def receive() -> None:
        bodies = Bodies(GatewayOptions())
        with bodies.holding("-") as held:
            await bodies.receive(Request({"type": "http", "headers": headers}), held)

    with pytest.raises(ApiError, match="content encoding must be identity, not 'gzip'"):
        asyncio.run(receive())


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("image 1 is empty", "second"),
        ("video 0, frame 0 is corrupt", "clip"),
        ("image 2 is empty", None),
        ("the image 1 is empty", None),
        ("image 1x is empty", None),
    ],
)
def test_an_error_about_an_image_names_its_part_of_the_request(
    message: str, place: str | None
) -> None:
    images = Media("data:", "first"), Media("data:", "second")
    assert Conversation("", images, (Media("data:", "clip"),)).place_of(message) == place


def load(options: GatewayOptions, *urls: str) -> list[bytes]:
    async def loaded() -> list[bytes]:
        loader, bodies = MediaLoader(options), Bodies(options)
        try:
            with bodies.holding("-") as held:
                return await loader.load([Media(url, "here") for url in urls], bodies, held)
        finally:
            await loader.close()
            bodies.close()

    return asyncio.run(loaded())


def refused(options: GatewayOptions, *urls: str) -> ApiError:
    with pytest.raises(ApiError) as error:
        load(options, *urls)
    assert error.value.param == "here"
    return error.value


def web(*answer: Any) -> AbstractContextManager[tuple[int, list[bytes]]]:
    return http_server(lambda: response(*answer))


@pytest.fixture
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the address of the test's own web server as public."""
    monkeypatch.setattr(media, "is_public", lambda address: address == "127.0.0.1")


def test_a_data_url_is_decoded_and_a_broken_one_is_refused() -> None:
    encoded = base64.b64encode(b"picture").decode()
    for spelled in (encoded, f"{encoded[:5]}\r\n {encoded[5:]}\n"):
        assert decode(Media(f"data:image/png;base64,{spelled}", "here")) == b"picture"
    for wrong in (
        "data:image/png;base64",
        f"data:image/png,{encoded}",
        "data:;base64,AA!A",
        "data:;base64,é",
    ):
        with pytest.raises(ApiError, match="base64"):
            decode(Media(wrong, "here"))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "::",
        "::7f00:1",
        "fe80::1%eth0",
        "fec0::1",
        "fd00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "64:ff9b::a00:1",
        "2002:7f00:1::",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "192.0.0.8",
        "192.88.99.1",
        "3fff::1",
        "5f00::1",
    ],
)
def test_loopback_private_and_reserved_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)
    assert all(map(is_public, ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8")))


def test_nothing_is_fetched_from_a_host_that_is_not_allowed() -> None:
    options = GatewayOptions(image_hosts=("example.com",))
    for url in (
        "http://other.com/a.png",
        "http://example.com.other.com/a.png",
        "http://example.com@other.com/a.png",
        "http://example.com:8080/a.png",
        "http://2130706433/a.png",
    ):
        error = refused(options, url)
        assert error.code == "PERMISSION_DENIED"
        assert "--image-host allows: example.com" in error.message
    for url in ("ftp://example.com/a.png", "file:///etc/passwd", "a.png", "http://example.com/ä"):
        assert refused(options, url).code == "INVALID_ARG"


def test_an_allowed_name_of_a_private_address_is_not_connected_to() -> None:
    with web("200 OK", b"secret") as (port, requests):
        for host in ("localhost", "127.0.0.1"):
            options = GatewayOptions(image_hosts=(f"{host}:{port}",))
            error = refused(options, f"http://{host}:{port}/a.png")
            assert error.code == "PERMISSION_DENIED"
            assert "not public" in error.message
    assert requests == []


@pytest.mark.usefixtures("loopback_is_public")
def test_a_name_that_changes_its_address_is_connected_to_where_it_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DNS rebinding: the first answer is public, the second one is not."""
    answers, resolve = ["127.0.0.1", "127.0.0.2"], socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> Any:
        return resolve(answers.pop(0) if host == "a.example" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with (
        web("200 OK", b"picture") as (port, _),
        closing(socket.create_server(("127.0.0.2", port))) as private,
    ):
        private.setblocking(False)
        options = GatewayOptions(image_hosts=(f"a.example:{port}",))
        assert load(options, f"http://a.example:{port}/") == [b"picture"]
        assert "not public" in refused(options, f"http://a.example:{port}/").message
        with pytest.raises(BlockingIOError):
            private.accept()


@pytest.mark.usefixtures("loopback_is_public")
def test_an_image_is_fetched_and_a_redirect_is_not_followed() -> None:
    with web("200 OK", b"picture") as (port, requests):
        options = GatewayOptions(image_hosts=(f"localhost:{port}",))
        assert load(options, f"http://localhost:{port}/a.png?b=c") == [b"picture"]
    assert requests[0].startswith(b"GET /a.png?b=c HTTP/1.1\r\n")
    assert b"host: localhost" in requests[0].lower()
    with (
        web("200 OK", b"secret") as (elsewhere, reached),
        web("302 Found", b"", f"location: http://localhost:{elsewhere}/") as (port, _),
    ):
        options = GatewayOptions(image_hosts=(f"localhost:{port}", f"localhost:{elsewhere}"))
        assert "status 302" in refused(options, f"http://localhost:{port}/a.png").message
    assert reached == []


@pytest.mark.usefixtures("loopback_is_public")
def test_a_fetched_image_has_limits_of_size_and_time() -> None:
    with web("200 OK", b"x" * 1000) as (port, _):
        url, hosts = f"http://localhost:{port}/", (f"localhost:{port}",)
        options = GatewayOptions(image_hosts=hosts, max_fetch_bytes=999)
        assert "more than 999 bytes" in refused(options, url).message
        held = GatewayOptions(image_hosts=hosts, max_held_bytes=1500)
        with pytest.raises(ApiError, match="the bodies of all requests have more than 1500 bytes"):
            load(held, url, url)
        options = GatewayOptions(image_hosts=hosts, max_body_bytes=1500)
        assert "more than 500 bytes" in refused(options, url, url).message
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        options = GatewayOptions(image_hosts=(f"localhost:{port}",), fetch_seconds=0.1)
        assert "more than 0.1 s" in refused(options, f"http://localhost:{port}/").message


@pytest.mark.usefixtures("loopback_is_public")
def test_slow_files_of_one_tenant_delay_no_other_and_those_in_excess_are_unavailable() -> None:
    closed: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/slow" not in await reader.readline():
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 5"
            writer.write(head + b"\r\n\r\nvideo")
        await reader.read()
        writer.close()
        closed.append(writer)

    async def run() -> list[str]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        options = GatewayOptions(image_hosts=(f"localhost:{port}",), fetch_seconds=60.0)
        loader, bodies = MediaLoader(options), Bodies(options)

        async def fetch(tenant: str, path: str) -> list[bytes]:
            with bodies.holding(tenant) as held:
                url = Media(f"http://localhost:{port}/{path}", "video_url.url")
                return await loader.load([url], bodies, held)

        slow = [asyncio.create_task(fetch("slow", "slow")) for _ in range(3 * media.FETCH_SHARE)]
        await asyncio.sleep(0)
        assert await fetch("other", "fast") == [b"video"]
        assert not any(task.done() for task in slow)
        loop = asyncio.get_running_loop()
        clock = loop.time
        loop.time = lambda: clock() + 60.0  # type: ignore[method-assign]
        errors = await asyncio.gather(*slow, return_exceptions=True)
        await loader.close()
        bodies.close()
        server.close()
        while len(closed) <= media.FETCH_SHARE:
            await asyncio.sleep(0.01)
        return [error.code for error in errors if isinstance(error, ApiError)]

    codes = Counter(asyncio.run(run()))
    assert codes.total() == 3 * media.FETCH_SHARE
    assert codes["UNAVAILABLE"] >= media.FETCH_SHARE


def test_a_replayed_answer_and_neutral_fields_of_other_servers_are_accepted() -> None:
    """vLLM's router adds SGLang's fields, and clients send answers back with all their fields."""
    answer = {
        "role": "assistant",
        "content": "A star.",
        "id": "msg_1",
        "reasoning_content": "It has spikes.",
        "refusal": None,
        "tool_calls": [],
    }
    turns = [{"role": "user", "content": "What?"}, answer, {"role": "user", "content": "Why?"}]
    neutral = {"no_stop_trim": False, "chat_template_kwargs": {}, "rid": "x", "regex": None}
    ask = read_chat({"model": "base", "messages": turns, **neutral})
    sent = json.loads(ask.conversation.text)["messages"][1]
    assert sent == {
        "role": "assistant",
        "content": [text("A star.")],
        "reasoning_content": "It has spikes.",
    }
    assert ask.sampling == chat().sampling


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"no_stop_trim": True}, "UNSUPPORTED", "no_stop_trim"),
        ({"chat_template": "{{ x }}"}, "UNSUPPORTED", "chat_template"),
        ({"regex": "a+"}, "UNSUPPORTED", "regex"),
        ({"response_format": {"type": ["text"]}}, "INVALID_ARG", "response_format"),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "INVALID_ARG",
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "INVALID_ARG",
            "response_format.json_schema.x",
        ),
        (
            {"messages": [{"role": "user", "content": [{**text("a"), "color": "red"}]}]},
            "INVALID_ARG",
            "messages[0].content[0].color",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "contents": "b"}]},
            "INVALID_ARG",
            "messages[0].contents",
        ),
    ],
)
def test_what_other_fields_and_unknown_keys_ask_for_is_refused(
    fields: dict[str, Any], code: str, param: str
) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (code, param)


def test_tokens_that_are_parts_of_a_character_have_their_bytes_and_offsets() -> None:
    """The answer is `a星!`, whose second character is two tokens; a third begins like the first."""
    parts = [b"a", b"\xe6\x98", b"\x9f", b"!"]
    tokens = [
        {
            str(index): {"decoded_token": part.decode(errors="replace"), "logprob": -1.0, "rank": 1}
            | ({"bytes": list(part)} if index in (1, 2) else {}),
            "9": {"decoded_token": "\ufffd", "logprob": -2.0, "rank": 2, "bytes": [0xE7]},
        }
        for index, part in enumerate(parts)
    ]
    piece = Piece("a星!", "stop", 1, 4, tokens)
    plain = read_completion({"model": "base", "prompt": "x", "logprobs": 2})
    logprobs = CompletionWriter(plain, "id").whole([piece])["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", r"bytes:\xe6\x98", r"bytes:\x9f", "!"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert list(logprobs["top_logprobs"][1]) == [r"bytes:\xe6\x98", r"bytes:\xe7"]
    asked = chat(logprobs=True, top_logprobs=2)
    content = CompletionWriter(asked, "id").whole([piece])["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "a星!".encode()
    assert len(content[1]["top_logprobs"]) == 2


def test_an_empty_text_between_images_of_a_raw_prompt_is_only_empty() -> None:
    asked = chat(text("a"), IMAGE, text(""), IMAGE, task="raw")
    assert asked.conversation.text == "a<image><image>"
