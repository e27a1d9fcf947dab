"""Tests of addresses, ports and closed protocols, without a server."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.http_server import http_server
from vlora import net
from vlora.errors import ServerError
from vlora.net import (
    check_host,
    choose_ports,
    closing_arguments,
    get,
    is_local,
    listen_arguments,
    reachable_host,
)
from vlora.server_run import shared_memory_prefix


@pytest.mark.parametrize(
    ("host", "http", "grpc", "reached"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0", "0.0.0.0", "127.0.0.1"),
        ("192.0.2.7", "192.0.2.7", "192.0.2.7", "192.0.2.7"),
        ("::", "ipv6:::", "[::]", "[::1]"),
        ("::1", "ipv6:::1", "[::1]", "[::1]"),
    ],
)
def test_each_listener_gets_the_address_as_triton_reads_it(
    host: str, http: str, grpc: str, reached: str
) -> None:
    check_host(host)
    assert reachable_host(host) == reached
    assert listen_arguments(host, {"http": 1, "grpc": 2, "metrics": 3}) == [
        *(f"--http-address={http}", "--http-port=1"),
        *(f"--grpc-address={grpc}", "--grpc-port=2"),
        *(f"--metrics-address={http}", "--metrics-port=3"),
    ]


@pytest.mark.parametrize("host", ["localhost", "", "0", "256.0.0.1", "127.0.0.1:8000"])
def test_a_host_that_is_not_an_address_is_rejected(host: str) -> None:
    with pytest.raises(ServerError, match=r"--host .* is not an IP address; use 127\.0\.0\.1"):
        check_host(host)


def test_an_address_of_another_machine_is_rejected() -> None:
    with pytest.raises(ServerError, match=r"--host 192\.0\.2\.7 is not an address of this machine"):
        choose_ports({"http_port": 0}, "192.0.2.7")


def test_restrictions_of_the_operator_replace_ours() -> None:
    """Triton refuses to start if two arguments restrict the same protocol."""
    given = ["--http-restricted-api", "trace,logging:k=v", "--grpc-restricted-protocol=trace:k=v"]
    given += ["--grpc-restricted-protocol=shared-memory,logging,model-repository:k=w"]
    (http,) = closing_arguments(False, given)
    assert http.partition(":")[0] == "--http-restricted-api=shared-memory,model-repository"


def test_regions_have_the_prefix_that_triton_reserves() -> None:
    prefix = shared_memory_prefix(Path("/tmp/0123456789abcdef"))
    assert prefix == "triton_python_backend_shm_region_vlora_0123456789abcdef_"


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        ({"http_port": 65536}, "--http-port 65536 is not a port.* 1 to 65535, or 0"),
        ({"http_port": 9000, "metrics_port": 9000}, "--http-port and --metrics-port are both 9000"),
    ],
)
def test_ports_that_cannot_be_used_are_rejected(ports: dict[str, int], message: str) -> None:
    with pytest.raises(ServerError, match=message):
        choose_ports(ports)


def test_chosen_ports_are_not_zero_and_different() -> None:
    chosen = choose_ports({"http_port": 0, "grpc_port": 0, "metrics_port": 0})
    assert len(set(chosen.values())) == 3
    assert all(chosen.values())


def test_free_ports_are_not_those_that_the_kernel_gives_to_other_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another socket could get such a port before the server opens it."""
    file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(net, "EPHEMERAL_RANGE", file)
    file.write_text("24000\t60999\n")
    for _ in range(20):
        assert choose_ports({"grpc_port": 0})["grpc_port"] < 24000
    file.write_text("1024\t60999\n")
    assert choose_ports({"grpc_port": 0})["grpc_port"] >= 1024


def test_a_taken_port_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ip_local_port_range"
    file.write_text("32768\t60999\n")
    monkeypatch.setattr(net, "EPHEMERAL_RANGE", file)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", choose_ports({"grpc_port": 0})["grpc_port"]))
        port = taken.getsockname()[1]
        monkeypatch.setattr(net, "FREE_PORTS", range(port, port + 1))
        assert choose_ports({"grpc_port": 0})["grpc_port"] not in (0, port)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *(("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("[::1]", True)),
        *(("10.0.0.1", False), ("example.org", False), ("", False), ("localhost.evil", False)),
    ],
)
def test_only_this_machine_is_local(host: str, local: bool) -> None:
    assert is_local(host) is local


@pytest.mark.parametrize(
    "reply", [b"SSH-2.0-server\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut off"]
)
def test_an_answer_that_is_not_valid_http_is_an_oserror(reply: bytes) -> None:
    with (
        http_server(lambda: reply) as (port, _),
        pytest.raises(OSError, match="not valid HTTP"),
    ):
        get(f"http://127.0.0.1:{port}/metrics", 5.0, direct=True)
