"""Tests of a request's images: data URLs, and addresses that the gateway may or may not fetch."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from vlora.gateway import media
from vlora.gateway.errors import ApiError
from vlora.gateway.media import Media, MediaLoader, decode, is_public
from vlora.gateway.options import GatewayOptions


def load(options: GatewayOptions, *urls: str) -> list[bytes]:
    async def loaded() -> list[bytes]:
        loader = MediaLoader(options)
        try:
            return await loader.load([Media(url, "here") for url in urls])
        finally:
            await loader.close()

    return asyncio.run(loaded())


def refused(options: GatewayOptions, *urls: str) -> ApiError:
    with pytest.raises(ApiError) as error:
        load(options, *urls)
    assert error.value.param == "here"
    return error.value


@contextmanager
def web(response: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the port of a web server with one response, and the requests that it got."""
    requests: list[bytes] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    requests.append(connection.recv(65536))
                    connection.sendall(response)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1], requests
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def http(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.fixture
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the address of the test's own web server as public."""
    monkeypatch.setattr(media, "is_public", lambda address: address == "127.0.0.1")


def test_a_data_url_is_decoded_and_a_broken_one_is_refused() -> None:
    encoded = base64.b64encode(b"picture").decode()
    assert decode(Media(f"data:image/png;base64,{encoded}", "here")) == b"picture"
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
    ],
)
def test_loopback_private_and_reserved_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_other_addresses_are_public(address: str) -> None:
    assert is_public(address)


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
        assert "allowed hosts: example.com" in error.message
    for url in ("ftp://example.com/a.png", "file:///etc/passwd", "a.png", "http://example.com/ä"):
        assert refused(options, url).code == "INVALID_ARG"


def test_an_allowed_name_of_a_private_address_is_not_connected_to() -> None:
    with web(http("200 OK", b"secret")) as (port, requests):
        for host in ("localhost", "127.0.0.1"):
            options = GatewayOptions(image_hosts=(f"{host}:{port}",))
            error = refused(options, f"http://{host}:{port}/a.png")
            assert error.code == "PERMISSION_DENIED"
            assert "not public" in error.message
    assert requests == []


@pytest.mark.usefixtures("loopback_is_public")
def test_an_image_is_fetched_and_a_redirect_is_not_followed() -> None:
    with web(http("200 OK", b"picture")) as (port, requests):
        options = GatewayOptions(image_hosts=(f"localhost:{port}",))
        assert load(options, f"http://localhost:{port}/a.png?b=c") == [b"picture"]
    assert requests[0].startswith(b"GET /a.png?b=c HTTP/1.1\r\n")
    assert b"host: localhost" in requests[0].lower()
    with (
        web(http("200 OK", b"secret")) as (elsewhere, reached),
        web(http("302 Found", b"", f"location: http://localhost:{elsewhere}/")) as (port, _),
    ):
        options = GatewayOptions(image_hosts=(f"localhost:{port}", f"localhost:{elsewhere}"))
        assert "status 302" in refused(options, f"http://localhost:{port}/a.png").message
    assert reached == []


@pytest.mark.usefixtures("loopback_is_public")
def test_a_fetched_image_has_limits_of_size_and_time() -> None:
    with web(http("200 OK", b"x" * 1000)) as (port, _):
        url, hosts = f"http://localhost:{port}/", (f"localhost:{port}",)
        options = GatewayOptions(image_hosts=hosts, max_fetch_bytes=999)
        assert "more than 999 bytes" in refused(options, url).message
        options = GatewayOptions(image_hosts=hosts, max_body_bytes=1500)
        assert "more than 500 bytes" in refused(options, url, url).message
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        options = GatewayOptions(image_hosts=(f"localhost:{port}",), fetch_seconds=0.1)
        assert "more than 0.1 s" in refused(options, f"http://localhost:{port}/").message
