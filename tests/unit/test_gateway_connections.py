"""Tests of the gateway's connections: which requests it admits, and when a connection ends."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import socket
import string
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from tests.support.polling import until
from vlora.errors import ServerError
from vlora.gateway import app as gateway_app
from vlora.gateway import bodies, door
from vlora.gateway.app import Disconnected, Gateway, _Events, connected, make_app
from vlora.gateway.door import (
    AccessLog,
    Door,
    GatewayMetrics,
    KeyFile,
    Keys,
    Message,
    RateLimit,
    Receive,
    Scope,
    Send,
    load_keys,
)
from vlora.gateway.errors import ApiError
from vlora.gateway.options import GatewayOptions
from vlora.gateway.server import listen
from vlora.http_connection import MAX_SMALL_CHUNKS, MAX_WAITING, LimitedConnection

KEY, OTHER = "k" * 16, "o" * 16
PAGE = "https://page.example"


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application that answers every request, in place of the gateway's routes."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


class Caller:
    """Sends requests through a `Door`, the gateway's outermost layer."""

    def __init__(
        self,
        keys: Keys | KeyFile | None = None,
        limit: RateLimit | None = None,
        origins: frozenset[str] = frozenset(),
        log: AccessLog | None = None,
    ) -> None:
        self.log = io.StringIO()
        self._door = Door(answer, keys, limit, origins, GatewayMetrics(), log or self.log)

    def __call__(
        self,
        path: str = "/v1/models",
        host: str = "localhost:8080",
        method: str = "GET",
        **headers: str,
    ) -> int:
        """Send a request with a body of five parts, and return the status of its answer.

        host: values of its Host headers. `events` has the parts received and the messages sent.
        """
        pairs = [(b"host", one.encode()) for one in host.split(" ")]
        pairs += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": pairs}
        self.events: list[str] = []
        statuses: list[int] = []
        self.headers: dict[bytes, bytes] = {}

        async def receive() -> Message:
            self.events.append("part")
            return {"type": "http.request", "body": b" ", "more_body": len(self.events) < 5}

        async def send(message: Message) -> None:
            self.events.append(message["type"])
            statuses.append(message.get("status", 0))
            self.headers = dict(message.get("headers", self.headers))

        asyncio.run(self._door(scope, receive, send))
        return statuses[0]


def test_a_request_with_two_hosts_is_refused() -> None:
    """Otherwise, a proxy in front of the gateway could check one, and the gateway the other."""
    assert Caller()(host="localhost localhost:8080") == 400


@pytest.mark.parametrize(
    ("headers", "received"),
    [
        ({"content-length": "5"}, 5),
        ({"transfer-encoding": "chunked"}, 5),
        ({"content-length": "5", "expect": "100-continue"}, 0),
        ({"content-length": "0"}, 0),
        ({}, 0),
    ],
)
def test_a_refused_request_is_received_to_its_end(headers: dict[str, str], received: int) -> None:
    """Otherwise most clients report a broken connection instead of the answer."""
    call = Caller()
    assert call(host="attacker.example", **headers) == 403
    assert call.events == ["part"] * received + ["http.response.start", "http.response.body"]


def test_a_body_without_an_end_is_discarded_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "DISCARD_SECONDS", 0.05)
    monkeypatch.setattr(bodies, "MAX_DISCARDED_BYTES", 1000)
    headers = [(b"transfer-encoding", b"chunked")]

    async def silent() -> Message:
        await asyncio.sleep(3600)
        raise AssertionError

    async def endless() -> Message:
        return {"type": "http.request", "body": b" " * 300, "more_body": True}

    async def discard() -> None:
        await bodies.BodyReceiver(headers, silent).discard_rest()
        await bodies.BodyReceiver(headers, endless).discard_rest()

    asyncio.run(asyncio.wait_for(discard(), timeout=30))


def test_without_keys_only_requests_to_this_machine_are_served() -> None:
    """A web page could otherwise reach a loopback gateway through a name that it controls."""
    call = Caller()
    for host in ("localhost:8080", "127.0.0.1", "[::1]:8080"):
        assert call(host=host) == 200
    for host in ("attacker.example:8080", "192.168.0.7", "localhost.attacker.example", "", "[::1"):
        assert call(host=host) == 403


def test_web_pages_of_other_origins_are_refused_unless_they_are_allowed() -> None:
    assert Caller()(origin="http://localhost:8080") == 200
    assert Caller()(origin="https://page.example") == 403
    assert Caller()(origin="null") == 403
    call = Caller(origins=frozenset({PAGE}))
    assert call(origin=PAGE) == 200
    # Not only answers of the routes: Starlette adds none to those of status 500.
    assert call.headers[b"access-control-allow-origin"] == PAGE.encode()


def test_a_page_of_an_allowed_origin_may_send_the_headers_of_openais_client() -> None:
    app = make_app(GatewayOptions(cors_origins=(PAGE,)), lambda error: None)
    names = {"access-control-request-method": "POST", "host": "localhost", "origin": PAGE}
    names["access-control-request-headers"] = "authorization,x-stainless-lang,x-stainless-timeout"
    headers = [(name.encode(), value.encode()) for name, value in names.items()]
    scope = {"type": "http", "method": "OPTIONS", "path": "/v1/models", "headers": headers}
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 200
    allowed = dict(sent[0]["headers"])[b"access-control-allow-headers"].decode()
    assert allowed == names["access-control-request-headers"]


def test_a_key_is_required_except_for_health_and_its_tenant_is_logged() -> None:
    call = Caller(Keys({KEY: "alice", OTHER: "bob"}))
    assert call("/health", host="gateway.example") == 200
    for authorization in ("", KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer ", "Bearer ÿ"):
        assert call(authorization=authorization) == 401
        assert call("/metrics", authorization=authorization) == 401
        assert call("/healthy", authorization=authorization) == 401
    assert call(authorization=f"Bearer {OTHER}") == 200
    assert call(authorization=f"bearer {KEY}") == 200
    lines = [json.loads(line) for line in call.log.getvalue().splitlines()]
    assert [line["tenant"] for line in lines[-2:]] == ["bob", "alice"]
    assert KEY not in call.log.getvalue()


def test_only_whole_keys_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 drawn keys that resemble known ones, through the whole door for some of them."""
    rng, alphabet = random.Random(40), string.ascii_letters + string.digits
    known = {"".join(rng.choices(alphabet, k=rng.randint(16, 40))): f"t{i}" for i in range(20)}
    keys = Keys(known)
    call = Caller(keys)

    def wrong(key: str, other: str) -> str:
        at = rng.randrange(len(key))
        flipped = key[:at] + chr(ord(key[at]) ^ 1 << rng.randrange(7)) + key[at + 1 :]
        joined = (key + other, key + rng.choice(alphabet), rng.choice(alphabet) + key)
        cut = (key[:at], key[at + 1 :], key[:at] + other[at:], key.swapcase(), key * 2)
        return rng.choice((flipped, *joined, *cut))

    for index in range(10_000):
        drawn = wrong(*rng.sample(list(known), 2))
        assert keys.tenant(drawn) == known.get(drawn), drawn
        if index % 50 == 0 and drawn not in known:
            assert call(authorization=f"Bearer {drawn}") == 401
    assert all(keys.tenant(key) == tenant for key, tenant in known.items())
    # Digests that differ in one byte only, wherever it is.
    digest = bytes(range(32))
    monkeypatch.setattr(door, "_digest", lambda key: digest)
    one = Keys({KEY: "alice"})
    assert one.tenant("any") == "alice"
    for at in range(32):
        other = digest[:at] + bytes([digest[at] ^ 1]) + digest[at + 1 :]
        monkeypatch.setattr(door, "_digest", lambda key, other=other: other)
        assert one.tenant(KEY) is None


def test_wrong_keys_are_limited_and_two_are_refused() -> None:
    call = Caller(Keys({KEY: "alice"}), RateLimit(2, lambda: 0.0), frozenset({PAGE}))
    assert [call(authorization="Bearer x", origin=PAGE) for _ in range(3)] == [401, 401, 429]
    assert call.headers[b"access-control-allow-origin"] == PAGE.encode()
    assert call(authorization=f"Bearer {KEY}") == 200
    assert call(authorization=f"Bearer {KEY}", Authorization=f"Bearer {KEY}") == 400
    # A browser asks without a key whether a page may send a request, so tenants share no limit.
    assert [call(method="OPTIONS", origin=PAGE) for _ in range(4)] == [200] * 4


def test_a_changed_file_of_keys_holds_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice {KEY}\nbob {OTHER}")
    call = Caller(KeyFile(path))
    assert [call(authorization=f"Bearer {key}") for key in (KEY, OTHER)] == [200, 200]
    path.write_text(f"bob {OTHER}")
    assert [call(authorization=f"Bearer {key}") for key in (KEY, OTHER)] == [401, 200]
    path.chmod(0o666)
    assert call(authorization=f"Bearer {OTHER}") == 401
    with pytest.raises(ServerError, match="anybody may write"):
        KeyFile(path)


def test_each_tenant_has_its_own_limit_which_refills() -> None:
    now = 0.0
    limit = RateLimit(2, lambda: now)
    call = Caller(Keys({KEY: "alice", OTHER: "bob"}), limit)
    alice, bob = f"Bearer {KEY}", f"Bearer {OTHER}"
    assert [call(authorization=alice) for _ in range(3)] == [200, 200, 429]
    assert call(authorization=bob) == 200
    assert call("/metrics", authorization=alice) == 200
    now = 30.0
    assert [call(authorization=alice) for _ in range(2)] == [200, 429]
    with pytest.raises(ApiError) as refused:
        limit.count("alice")
    assert refused.value.retry_after == pytest.approx(30)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no keys"),
        ("alice short", "line 1 .* at least 16 characters"),
        (f"# keys\nalice {KEY} more", "line 2 "),
        (f"alice {KEY}\nbob {KEY}", "line 2 .* repeats"),
        (f"alice {KEY}é", "byte 22 is not ASCII"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_an_error_without_the_keys(
    content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ServerError, match="cannot be read"):
        load_keys(path)
    path.write_text(content)
    with pytest.raises(ServerError, match=message) as refused:
        load_keys(path)
    assert KEY not in str(refused.value)


def test_an_access_log_that_cannot_be_written_stops_nothing_and_tells_how_many_lines_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "MAX_LOG_LINES", 10)
    unread, end = os.pipe()
    os.set_blocking(unread, False)
    lines = b""
    for raw in (io.FileIO("/dev/full", "w"), io.FileIO(end, "w")):
        metrics = GatewayMetrics()
        log = AccessLog(io.TextIOWrapper(raw, write_through=True), metrics.lost_lines)
        call = Caller(log=log)
        assert [call("/x" * 40_000) for _ in range(100)] == [200] * 100

    def told() -> int:
        """Return how many lines are lost, once the log tells of all."""
        nonlocal lines
        with suppress(BlockingIOError):
            lines += os.read(unread, 1 << 20)
        found = [json.loads(line) for line in lines.split(b"\n")[:-1]]
        lost = [line["lost_lines"] for line in found if "lost_lines" in line]
        return sum(lost) if len(found) - len(lost) + sum(lost) == 100 else 0

    lost = until(told)
    assert f"lost_log_lines_total {lost:.1f}\n" in metrics.text().decode()
    os.close(unread)


def test_connections_send_without_delay() -> None:
    with (
        listen("127.0.0.1", 0) as listener,
        closing(socket.create_connection(listener.getsockname())),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


START = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
MESSAGE = "the head has more than 65536 bytes, the limit"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]


class Impatient(LimitedConnection):
    head_seconds = send_seconds = 0.1


class ImpatientLater(LimitedConnection):
    """Impatient from the first head on, which may come late on a busy machine."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.head_seconds = self.send_seconds = 0.1


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

    assert talk(client, ImpatientLater).count(b"200 OK") == 1


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


@pytest.mark.parametrize("leaves", [True, False])
def test_the_request_of_a_client_that_has_left_is_not_begun(leaves: bool) -> None:
    begun: list[bool] = []

    async def work() -> bool:
        begun.append(True)
        return False

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        try:
            left.set_result(await connected(receive, work()))
        except Disconnected:
            left.set_result(True)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        nonlocal left
        left = asyncio.get_running_loop().create_future()
        writer.write(START + b"\r\n")
        if leaves:
            writer.transport.abort()
        assert await left is leaves
        return b""

    left: asyncio.Future[bool]
    talk(client, answer=app)
    assert bool(begun) is not leaves


@pytest.mark.parametrize("protocol", [ImpatientLater, LimitedConnection])
def test_a_client_that_reads_nothing_is_disconnected_and_one_that_half_closes_at_once(
    protocol: type[LimitedConnection],
) -> None:
    """Much of the answer waits to be sent. A patient gateway hears that the client half closes."""
    running = sent = 0

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal running, sent
        running += 1
        try:
            while True:
                sent += 1
                await asyncio.sleep(0)
                yield b"x" * (1 << 16)
        finally:
            running -= 1

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await _Events(events(), events(), GatewayMetrics())(scope, receive, send)  # type: ignore[arg-type]

    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(START + b"\r\n")
        await reader.readuntil(b"200 OK")
        while not running:
            await asyncio.sleep(0)
        opened, before = files(), 0
        if protocol is LimitedConnection:
            while sent != before:
                before = sent
                await asyncio.sleep(0.05)
            writer.write_eof()
        while running:
            await asyncio.sleep(0.01)
        assert (await reader.read(1 << 16)).endswith(b"x" * 100)
        with suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        assert files() == opened - 1
        return b"%d" % running

    assert talk(client, protocol, endless) == b"0"


@pytest.mark.parametrize("encoding", [b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked"])
def test_a_body_with_another_transfer_encoding_is_refused(encoding: bytes) -> None:
    head = START + b"Transfer-Encoding: " + encoding + b"\r\n\r\n0\r\n\r\n"
    assert "must be chunked, not 'gzip" in message_of(talk(sending(head)))


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


def test_trailers_are_no_headers() -> None:
    """A proxy that checks keys or hosts looks only at headers. Here one packet has both."""

    async def names(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body", False):
            pass
        body = b" ".join(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    request = POST + b"1\r\nx\r\n0\r\nAuthorization: Bearer x\r\nHost: other\r\n\r\n"
    last = START + b"Connection: close\r\nX: y\r\n\r\n"
    received = talk(sending(request + last), answer=names)
    assert b"host transfer-encoding\r\n" in received
    assert b"host connection x\r\n" in received


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


def test_scrapes_read_the_servers_metrics_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def get(url: str, *_: object) -> bytes:
        read.append(url)
        return b"of_the_server 1\n"

    async def scrape(url: str) -> None:
        gateway = Gateway(GatewayOptions(metrics_url=url), lambda error: None)
        pages = await asyncio.gather(*(gateway.metrics_page() for _ in range(50)))
        assert all(bytes(page.body).endswith(b"\nof_the_server 1\n") for page in pages)
        assert read == [url]
        monkeypatch.setattr(gateway_app, "METRICS_AGE_SECONDS", -1.0)
        await gateway.metrics_page()
        assert read == [url] * 2

    monkeypatch.setattr(gateway_app, "get", get)
    monkeypatch.setattr(gateway_app, "METRICS_AGE_SECONDS", 60.0)
    asyncio.run(scrape("http://127.0.0.1:8002/metrics"))
