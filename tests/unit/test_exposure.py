"""Tests of addresses and closed protocols, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlora.errors import ServerError
from vlora.net import check_host, choose_ports, closing_arguments, listen_arguments, reachable_host
from vlora.server_run import shared_memory_prefix

ALL = "model-repository,trace,logging"


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


def test_each_start_closes_the_protocols_with_other_keys() -> None:
    arguments = [*closing_arguments(False, ()), *closing_arguments(False, ())]
    options, keys = zip(*(each.rsplit("=", 1) for each in arguments), strict=True)
    assert len(set(keys)) == 4
    assert set(options) == {
        f"--http-restricted-api=shared-memory,{ALL}:vlora-closed",
        f"--grpc-restricted-protocol=shared-memory,{ALL}:vlora-closed",
    }


def test_shared_memory_is_open_where_it_is_allowed_and_no_other_protocol() -> None:
    assert [each.partition(":")[0] for each in closing_arguments(True, ())] == [
        f"--http-restricted-api={ALL}",
        f"--grpc-restricted-protocol={ALL}",
    ]


def test_restrictions_of_the_operator_replace_ours() -> None:
    """Triton refuses to start if two arguments restrict the same protocol."""
    given = ["--http-restricted-api", "trace,logging:k=v", "--grpc-restricted-protocol=trace:k=v"]
    given += ["--grpc-restricted-protocol=shared-memory,logging,model-repository:k=w"]
    (http,) = closing_arguments(False, given)
    assert http.partition(":")[0] == "--http-restricted-api=shared-memory,model-repository"


def test_regions_have_the_prefix_that_triton_reserves() -> None:
    prefix = shared_memory_prefix(Path("/tmp/0123456789abcdef"))
    assert prefix == "triton_python_backend_shm_region_vlora_0123456789abcdef_"
