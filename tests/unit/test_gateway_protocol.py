"""Connections of the gateway end when a request's head is too large or too slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra `gateway` is not installed")

from uvicorn import Config
from uvicorn.server import ServerState

from vlora.gateway.protocol import MAX_SMALL_CHUNKS, MAX_WAITING, LimitedConnection

START = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
MESSAGE = "the head has more than 65536 bytes, the limit"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]


class Impatient(LimitedConnection):
    head_seconds = 0.1


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the size of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"%d" % size
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def talk(
    client: Talk, protocol: type[LimitedConnection] = LimitedConnection, answer: Any = app
) -> bytes:
    """Return what `client` received from a server with connections of the class `protocol`."""

    async def run() -> bytes:
        config = Config(answer, log_config=None, access_log=False)
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                return await asyncio.wait_for(client(reader, writer), 60)
            finally:
                writer.transport.abort()

    return asyncio.run(run())


def sending(*parts: bytes) -> Talk:
    """Return a client that sends parts, and then reads until the connection is closed."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        received = b""
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            while part := await reader.read(1 << 16):
                received += part
        except ConnectionError:
            pass
        return received

    return client


def message_of(received: bytes) -> str:
    """Return the message of the only response, an error of the API that ends the connection."""
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n")
    assert head.endswith(b"content-length: %d\r\nconnection: close" % len(body))
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "INVALID_ARG")
    return str(error["message"])


@pytest.mark.parametrize(
    "parts",
    [
        [START, b"X: ", *[b"a" * (1 << 16)] * 40],
        [START, b"", *[b"X: y\r\n" * 11_000] * 40],
        [b"GET /", b"", *[b"a" * (1 << 16)] * 40],
        [POST, b"1\r\nx\r\n0\r\n", *[b"X: y\r\n" * 11_000] * 40],
        [b"", b"", *[b"\r\n" * 40_000] * 40],
    ],
    ids=["one header", "many headers", "a URL", "trailers", "empty lines"],
)
def test_a_head_that_is_too_large_ends_the_connection(parts: list[bytes]) -> None:
    """A client that keeps sending may lose the message: unread data resets the connection."""
    received = talk(sending(*parts))
    assert not received or message_of(received) == MESSAGE


def test_a_body_may_be_larger_than_a_head_also_in_small_chunks() -> None:
    chunks = [b"10\r\n0123456789abcdef\r\n" * 400] * 10
    close = POST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert talk(sending(close, *chunks, b"0\r\n\r\n")).endswith(b"\r\n\r\n64000")
    one = b"%x\r\n" % 3_000_000 + b"x" * 3_000_000 + b"\r\n0\r\n\r\n"
    assert talk(sending(close, one)).endswith(b"\r\n\r\n3000000")


def test_the_sizes_of_the_heads_on_a_connection_are_not_added_up() -> None:
    head = START + b"X: " + b"a" * 40_000
    last = head + b"\r\nConnection: close\r\n\r\n"
    received = talk(sending(*[head + b"\r\n\r\n"] * 5, last))
    assert received.count(b"200 OK") == 6


@pytest.mark.parametrize("parts", [[], [b"GET / HT"], [START]], ids=["none", "a line", "a header"])
def test_a_head_that_does_not_arrive_ends_the_connection(parts: list[bytes]) -> None:
    assert talk(sending(*parts), Impatient) == b""


@pytest.mark.parametrize("rest", [b"\r\n", b"GET / HT"])
def test_a_later_head_that_does_not_arrive_ends_the_connection(rest: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(START + b"\r\n")
        received = await reader.readuntil(b"\r\n\r\n0")
        writer.write(rest)
        return received + await reader.read()

    assert talk(client, Impatient).count(b"200 OK") == 1


def test_a_running_request_of_a_lost_connection_is_notified() -> None:
    """The client sends two requests, and leaves while the first one is running."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        running, notified = asyncio.Event(), asyncio.Event()
        state.extend((running, notified))
        writer.write((START + b"\r\n") * 2)
        await running.wait()
        writer.transport.abort()
        await notified.wait()
        return b"notified"

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        running, notified = state
        running.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        notified.set()

    state: list[asyncio.Event] = []
    assert talk(client, answer=waiting) == b"notified"


def test_a_limited_number_of_requests_may_wait_on_a_connection() -> None:
    last = START + b"Connection: close\r\n\r\n"
    few = (START + b"\r\n") * MAX_WAITING + last
    assert talk(sending(few)).count(b"200 OK") == MAX_WAITING + 1
    # The gateway reads all of this at once, so the client does not lose the answer.
    received = talk(sending((START + b"\r\n") * (MAX_WAITING + 2)))
    assert message_of(received) == "more than 16 requests wait on this connection, the limit"
    assert received.count(b"200 OK") == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        START + b"Content-Length: -5\r\n\r\n",
        START + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        POST + b"no length\r\n",
        POST + b"f" * 40 + b"\r\n",
    ],
    ids=["TLS", "HTTP/2", "a length", "two lengths", "a chunk", "a large chunk"],
)
def test_what_is_not_http_gets_an_error_of_the_api(garbage: bytes) -> None:
    assert message_of(talk(sending(garbage))).startswith("the request is not valid HTTP: ")


def test_a_body_with_too_many_small_chunks_is_refused() -> None:
    small, large = b"1\r\nx\r\n" * 1024, b"400\r\n" + b"x" * 1024 + b"\r\n"
    message = message_of(talk(sending(POST, *[small] * (MAX_SMALL_CHUNKS // 1024), small[:30])))
    assert message.startswith("the body has 4101 chunks with 4100 bytes; ")
    close = POST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    received = talk(sending(close, *[large * 512] * 10, small * 3, b"0\r\n\r\n"))
    assert received.endswith(b"\r\n\r\n%d" % (5120 * 1024 + 3072))


@pytest.mark.parametrize("cut", [0, 3, 30])
def test_an_offer_of_another_protocol_is_ignored(cut: int) -> None:
    """The request keeps its body, and the connection is used again."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    request = POST.replace(b"\r\n\r\n", b"\r\n" + offer + b"\r\n") + b"5\r\nhello\r\n0\r\n\r\n"
    last = START + b"Connection: close\r\n\r\n"
    received = talk(sending(request[: len(request) - cut], request[len(request) - cut :], last))
    assert [part[-1:] for part in received.split(b"HTTP/1.1 200 OK")[1:]] == [b"5", b"0"]
    many = talk(sending((START + offer + b"\r\n") * (MAX_WAITING + 2)))
    assert message_of(many) == "more than 16 requests wait on this connection, the limit"
    assert "CONNECT" in message_of(talk(sending(b"CONNECT /x HTTP/1.1\r\n\r\n")))
