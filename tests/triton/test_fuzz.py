"""A short seeded run of the fuzzer; `python -m tests.triton.fuzz` takes any number of requests."""

from __future__ import annotations

from tests.triton.fuzz import run
from vlora.serving.server import TritonServer

REQUESTS = 400


def test_mutated_requests_are_answered_or_refused_with_a_code(server: TritonServer) -> None:
    report = run(server.grpc_url, server.http_url, REQUESTS, seed=1)
    print("\n".join(report.lines()))
    assert not report.wrong, "\n".join(report.examples[:20])
    assert sum(report.codes.values()) == REQUESTS
    assert report.codes["answered"] > REQUESTS // 8, report.codes
    assert server.poll() is None
    assert server.failure() is None
