"""Tests that the gateway admits the right requests, logs no secrets, and sends without delay."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from vlora.errors import ServerError
from vlora.gateway import bodies
from vlora.gateway.door import (
    Door,
    GatewayMetrics,
    Keys,
    Message,
    RateLimit,
    Receive,
    Scope,
    Send,
    load_keys,
)
from vlora.gateway.errors import ApiError
from vlora.gateway.server import listen

KEY, OTHER = "k" * 16, "o" * 16


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application that answers every request, in place of the gateway's routes."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


class Caller:
    """Sends requests through a `Door`, the gateway's outermost layer."""

    def __init__(
        self,
        keys: Keys | None = None,
        limit: RateLimit | None = None,
        origins: frozenset[str] = frozenset(),
    ) -> None:
        self.log = io.StringIO()
        self._door = Door(answer, keys, limit, origins, GatewayMetrics(), self.log)

    def __call__(
        self, path: str = "/v1/models", host: str = "localhost:8080", **headers: str
    ) -> int:
        """Return the status of a request. host: values of its Host headers."""
        pairs = [(b"host", one.encode()) for one in host.split(" ")]
        pairs += [(name.encode(), value.encode()) for name, value in headers.items()]
        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "headers": pairs}
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request"}

        async def send(message: Message) -> None:
            sent.append(message)

        asyncio.run(self._door(scope, receive, send))
        return int(sent[0]["status"])


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
    events: list[str] = []

    async def receive() -> Message:
        events.append("part")
        return {"type": "http.request", "body": b" ", "more_body": events.count("part") < 5}

    async def send(message: Message) -> None:
        events.append(message["type"])

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": pairs}
    door = Door(answer, None, None, frozenset(), GatewayMetrics(), io.StringIO())
    asyncio.run(door(scope, receive, send))
    assert events == ["part"] * received + ["http.response.start", "http.response.body"]


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
    assert Caller(origins=frozenset({"https://page.example"}))(origin="https://page.example") == 200


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


def test_connections_send_without_delay() -> None:
    with (
        listen("127.0.0.1", 0) as listener,
        closing(socket.create_connection(listener.getsockname())),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
