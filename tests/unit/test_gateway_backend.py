"""Tests of the gateway's client with a server that listens but does nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from vlora.gateway import backend
from vlora.gateway.backend import Backend, Question
from vlora.gateway.errors import ApiError


class HungServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A server that reads no request and sends no response."""

    def __init__(self) -> None:
        self.calls = 0

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self.calls += 1
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait(60)
        return iter(())


@pytest.fixture
def hung() -> Iterator[tuple[HungServer, str]]:
    servicer, server = HungServer(), grpc.server(ThreadPoolExecutor(32))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("size", [1, 80_000_000])
def test_a_server_that_does_not_take_a_request_is_an_error_in_time(
    hung: tuple[HungServer, str], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """gRPC stores a small request in a buffer. A large one waits until the server reads it."""
    monkeypatch.setattr(backend, "CONTROL_SECONDS", 0.2)

    async def ask() -> None:
        client = Backend(hung[1], answer_seconds=0.5)
        try:
            async with asyncio.timeout(30):
                async for _ in client.ask(Question("a" * 32, "?", images=[bytes(size)])):
                    pass
        finally:
            await client.close()

    with pytest.raises(ApiError, match=r"sent nothing for 0\.5 s"):
        asyncio.run(ask())


def test_calls_that_wait_for_the_description_share_one_request_and_its_error(
    hung: tuple[HungServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "CONTROL_SECONDS", 0.5)

    async def describe() -> list[Any]:
        client = Backend(hung[1], answer_seconds=60)
        try:
            calls = [client.describe() for _ in range(8)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            with pytest.raises(ApiError):
                await client.describe()
            return results
        finally:
            await client.close()

    results = asyncio.run(describe())
    assert {type(result) for result in results} == {ApiError}
    assert hung[0].calls == 2
