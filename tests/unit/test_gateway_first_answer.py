"""Tests of a gateway that starts before its server, and of one that cannot find it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import pytest

from vlora.gateway.app import Gateway
from vlora.gateway.backend import RECONNECT_SECONDS, Backend, wait_for_first_answer
from vlora.gateway.errors import ApiError
from vlora.gateway.options import GatewayOptions
from vlora.net import choose_ports, load_grpc_stubs

service_pb2, service_pb2_grpc = load_grpc_stubs()

RETRY_SECONDS = 0.05


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A server that answers every request with an empty description."""

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        for _ in requests:
            answer = service_pb2.ModelStreamInferResponse()
            answer.infer_response.outputs.add(name="details", datatype="BYTES", shape=[1])
            raw = json.dumps({}).encode()
            answer.infer_response.raw_output_contents.append(len(raw).to_bytes(4, "little") + raw)
            yield answer


@pytest.fixture
def address() -> str:
    """Return an address at which no server listens yet."""
    return f"127.0.0.1:{choose_ports({'port': 0}, '127.0.0.1')['port']}"


@contextmanager
def serving(address: str) -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Server(), server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


@asynccontextmanager
async def client(address: str) -> AsyncIterator[Backend]:
    backend = Backend(address, answer_seconds=5.0)
    try:
        yield backend
    finally:
        await backend.close()


def test_a_missing_server_is_reported_once_and_so_is_its_first_answer(address: str) -> None:
    said: list[str] = []

    async def run() -> None:
        async with client(address) as backend:
            waiting = asyncio.create_task(
                wait_for_first_answer(backend, address, said.append, RETRY_SECONDS)
            )
            await asyncio.sleep(6 * RETRY_SECONDS)
            assert len(said) == 1
            with serving(address):
                await asyncio.wait_for(waiting, timeout=30)

    asyncio.run(run())
    missing, found = said
    assert f"no answer from the server at {address} yet" in missing
    assert "Connection refused" in missing
    assert "vlora serve" in missing
    assert "--grpc HOST:PORT" in missing
    assert found == f"the server at {address} answers now"


def test_nothing_is_said_about_a_server_that_answers_at_once(address: str) -> None:
    said: list[str] = []

    async def run() -> None:
        async with client(address) as backend:
            await asyncio.wait_for(wait_for_first_answer(backend, address, said.append), 30)

    with serving(address):
        asyncio.run(run())
    assert said == []


def test_the_gateway_reports_a_missing_server_and_still_starts_and_stops(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> str:
        gateway = Gateway(GatewayOptions(grpc=address))
        said = ""
        async with gateway.running(None):  # type: ignore[arg-type]
            deadline = time.monotonic() + 30
            while not said and time.monotonic() < deadline:
                await asyncio.sleep(RETRY_SECONDS)
                said = capsys.readouterr().err
        return said

    assert f"no answer from the server at {address} yet" in asyncio.run(run())


@pytest.mark.slow
def test_a_server_that_starts_late_is_found_soon(address: str) -> None:
    """gRPC waits longer after each failed attempt; the gateway limits this."""

    async def first_answer(backend: Backend) -> float:
        started = time.monotonic()
        while True:
            try:
                await backend.describe()
            except ApiError:
                assert time.monotonic() - started < 60
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return time.monotonic() - started

    async def run() -> float:
        async with client(address) as backend:
            for _ in range(int(5 * RECONNECT_SECONDS / RETRY_SECONDS)):
                with pytest.raises(ApiError):
                    await backend.describe()
                await asyncio.sleep(RETRY_SECONDS)
            with serving(address):
                return await first_answer(backend)

    # gRPC adds up to 20 % to its waits.
    assert asyncio.run(run()) < 1.5 * RECONNECT_SECONDS


def test_the_port_of_another_protocol_is_named_as_the_likely_reason(address: str) -> None:
    async def run() -> str:
        host, _, port = address.rpartition(":")

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, host, int(port)), client(address) as backend:
            with pytest.raises(ApiError) as failed:
                await backend.describe()
        return failed.value.message

    assert asyncio.run(run()).endswith("; is this the gRPC port?")
