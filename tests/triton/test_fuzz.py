"""A short seeded run of the fuzzer; `python -m tests.support.fuzz` takes any number of requests."""

from __future__ import annotations

from tests.support.fuzz import known_adapters, run, whole_text
from vlora.errors import known_names
from vlora.launcher.server import TritonServer

REQUESTS = 400


def test_mutated_requests_are_answered_or_refused_with_a_code(server: TritonServer) -> None:
    report = run(server.grpc_url, server.http_url, REQUESTS, seed=1)
    print("\n".join(report.lines()))
    assert not report.wrong, "\n".join(report.examples[:20])
    assert sum(report.codes.values()) == REQUESTS
    assert report.codes["answered"] > REQUESTS // 8, report.codes
    assert server.poll() is None
    assert server.failure() is None


def test_an_answer_is_the_same_in_however_many_pieces_it_came() -> None:
    once = 'data: {"text_output":"a \\"red\\" star"}\n\n'
    pieces = 'data: {"text_output":"a \\"re"}\n\ndata: {"text_output":"d\\" star"}\n\n'
    assert whole_text(once) == whole_text(pieces) == 'a "red" star'
    assert whole_text('data: {"text_output":""}') == ""
    assert whole_text('{"error":"NOT_FOUND: no"}') is None


def test_the_adapters_asked_for_are_those_of_the_server() -> None:
    message = f"NOT_FOUND: unknown adapter 'x'{known_names('x', ['actions', 'b-r8'])}"
    assert known_adapters(f'{{"error":"{message}"}}') == ["actions", "b-r8"]
    many = [f"a{number}" for number in range(30)]
    assert known_adapters(known_names("x", many)) == many[:20]
    assert known_adapters(known_names("x", [])) == []
