"""Short run of the fuzzer with a fixed seed. `python -m tests.programs.fuzz` runs longer ones."""

from __future__ import annotations

from tests.programs.fuzz import known_adapters, run, whole_text
from tests.support.gateway import Gateway
from vlora.errors import known_names
from vlora.launcher.server import TritonServer

REQUESTS = 400


def check(server: TritonServer, gateway_url: str = "") -> None:
    report = run(server.grpc_url, server.http_url, REQUESTS, seed=1, gateway_url=gateway_url)
    print("\n".join(report.lines()))
    assert not report.wrong, "\n".join(report.examples[:20])
    assert sum(report.codes.values()) == REQUESTS
    assert report.codes["answered"] > REQUESTS // 8, report.codes
    assert server.poll() is None
    assert server.failure() is None


def test_mutated_requests_are_answered_or_rejected_with_a_code(server: TritonServer) -> None:
    check(server)


def test_mutated_requests_to_the_gateway_are_answered_or_rejected_with_a_code(
    server: TritonServer, gateway: Gateway
) -> None:
    check(server, gateway.address)


def test_the_text_of_an_answer_is_joined_from_its_responses() -> None:
    once = 'data: {"text_output":"a \\"red\\" star"}\n\n'
    pieces = 'data: {"text_output":"a \\"re"}\n\ndata: {"text_output":"d\\" star"}\n\n'
    assert whole_text(once) == whole_text(pieces) == 'a "red" star'
    assert whole_text('data: {"text_output":""}') == ""
    assert whole_text('{"error":"NOT_FOUND: no"}') is None


def test_the_servers_adapters_are_read_from_an_error_message() -> None:
    message = f"NOT_FOUND: unknown adapter 'x'{known_names('x', ['actions', 'b-r8'])}"
    assert known_adapters(f'{{"error":"{message}"}}') == ["actions", "b-r8"]
    many = [f"a{number}" for number in range(30)]
    assert known_adapters(known_names("x", many)) == many[:20]
    assert known_adapters(known_names("x", [])) == []
