"""Tests of the gateway's client: with a server that hangs, is missing, or starts late."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from tests.support.gateway import running
from tests.support.polling import until
from vlora.errors import ADAPTER_CHANGED, BY_CODE, CHANGE_REPEATS, SHUTTING_DOWN
from vlora.gateway import backend
from vlora.gateway.app import Gateway
from vlora.gateway.backend import (
    DESCRIPTION_SECONDS,
    RECONNECT_SECONDS,
    Backend,
    Question,
    wait_for_first_answer,
)
from vlora.gateway.errors import STATUSES, ApiError, from_grpc
from vlora.gateway.options import GatewayOptions
from vlora.net import (
    ROUTING_HEADER,
    Tls,
    choose_ports,
    grpc_options,
    load_grpc_stubs,
    routing_headers,
)

service_pb2, service_pb2_grpc = load_grpc_stubs()

RETRY_SECONDS = 0.05
CHANGED = f"adapter 'a' {ADAPTER_CHANGED}; send the request again"


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A server that answers every request with its description, or `hangs`, at once or after its
    first answer.

    calls, running: numbers of all calls, and of those that have not ended.
    refusals: errors of the next requests.
    """

    def __init__(self, hangs: bool, answers: bool) -> None:
        self.calls = self.running = 0
        self.description: dict[str, Any] = {}
        self.headers: list[dict[str, str]] = []
        self.refusals: list[str] = []
        self._hangs = hangs
        self._answers = answers

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        self.calls += 1
        self.running += 1
        self.headers.append(dict(context.invocation_metadata()))
        ended = threading.Event()
        context.add_callback(ended.set)
        try:
            for _ in requests if self._answers else ():
                if self.refusals:
                    yield service_pb2.ModelStreamInferResponse(error_message=self.refusals.pop())
                    break
                answer = service_pb2.ModelStreamInferResponse()
                final = answer.infer_response.parameters["triton_final_response"]
                final.bool_param = not self._hangs
                answer.infer_response.outputs.add(name="details", datatype="BYTES", shape=[1])
                raw = json.dumps(self.description).encode()
                answer.infer_response.raw_output_contents.append(
                    len(raw).to_bytes(4, "little") + raw
                )
                yield answer
                if self._hangs:
                    break
            if self._hangs:
                ended.wait(60)
        finally:  # A call that ends while its answer is sent does not go on after `yield`.
            self.running -= 1


@pytest.fixture
def address() -> str:
    """Return an address at which no server listens yet."""
    return f"127.0.0.1:{choose_ports({'port': 0}, '127.0.0.1')['port']}"


@contextmanager
def serving(
    address: str, *, hangs: bool = False, answers: bool | None = None, tls: Any = None
) -> Iterator[Server]:
    servicer = Server(hangs, not hangs if answers is None else answers)
    server = grpc.server(ThreadPoolExecutor(32))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    server.add_secure_port(address, tls) if tls else server.add_insecure_port(address)
    server.start()
    try:
        yield servicer
    finally:
        server.stop(0).wait()


@asynccontextmanager
async def client(address: str, answer_seconds: float = 5.0) -> AsyncIterator[Backend]:
    backend = Backend(address, answer_seconds=answer_seconds)
    try:
        yield backend
    finally:
        await backend.close()


def test_a_server_with_tls_is_asked_by_the_name_in_its_certificate(
    address: str, key_and_certificate: tuple[Path, Path]
) -> None:
    key, ca = key_and_certificate

    async def describe(tls: Tls | None) -> Any:
        asked = Backend(address, 5.0, tls)
        try:
            return await asked.describe()
        finally:
            await asked.close()

    pair = (key.read_bytes(), ca.read_bytes())
    with serving(address, tls=grpc.ssl_server_credentials([pair])):
        assert asyncio.run(describe(Tls(ca, "vlora"))) == {}
        for wrong in (None, Tls(ca)):
            with pytest.raises(ApiError):
                asyncio.run(describe(wrong))


def test_a_description_that_has_not_changed_is_the_same_object(address: str) -> None:
    async def describe() -> list[Any]:
        async with client(address) as asked:
            first = await asked.describe()
            asked._described = None
            return [first, await asked.describe()]

    with serving(address) as server:
        first, second = asyncio.run(describe())
    assert server.calls == 2
    assert first is second


def test_servers_with_one_name_are_asked_in_turn(address: str) -> None:
    other = f"127.0.0.2:{address.rpartition(':')[2]}"

    async def describe() -> None:
        async with client(f"ipv4:{address},{other}") as asked:
            for _ in range(20):
                asked._described = None
                await asked.describe()

    with serving(address) as one, serving(other) as two:
        asyncio.run(describe())
    assert one.calls > 0
    assert two.calls > 0
    assert dict(grpc_options("dns:///vlora:8001"))["grpc.lb_policy_name"] == "round_robin"


@pytest.mark.parametrize(
    ("refusals", "calls"),
    [
        ([SHUTTING_DOWN], 2),
        ([SHUTTING_DOWN] * 2, 2),
        (["the queue is full: 9"], 1),
        ([CHANGED] * CHANGE_REPEATS, CHANGE_REPEATS + 1),
        ([CHANGED] * (CHANGE_REPEATS + 1), CHANGE_REPEATS + 1),
    ],
)
def test_a_question_that_a_server_has_not_begun_is_sent_again(
    address: str, refusals: list[str], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlora.errors.CHANGE_PAUSE_SECONDS", 0.01)

    async def ask() -> list[Any]:
        sampling = {"lora_name": "Grüße/1", "stream_id": "gate 2"}
        async with client(address) as asked:
            try:
                return [one async for one in asked.ask(Question("a" * 32, "?", sampling=sampling))]
            finally:
                assert asked._kept_bytes == 0

    with serving(address) as server:
        server.refusals = [f"UNAVAILABLE: {refusal}" for refusal in refusals]
        # The fake's only answer has no finish reason.
        reason = "did not finish" if len(refusals) < calls else refusals[0]
        with pytest.raises(ApiError, match=reason):
            asyncio.run(ask())
    assert server.calls == calls
    assert {one[ROUTING_HEADER] for one in server.headers} == {"Gr%C3%BC%C3%9Fe%2F1/gate%202"}
    assert routing_headers("a") == ((ROUTING_HEADER, "a"),)
    assert routing_headers(None) == ()
    ((_, value),) = routing_headers("😀" * 4000, ["a" * 20_000])
    assert len(value) < 8192  # gRPC would refuse the request as an error of the server.


@pytest.mark.parametrize("size", [1, 80_000_000])
def test_a_server_that_does_not_take_a_request_is_an_error_in_time(
    address: str, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """gRPC stores a small request in a buffer. A large one waits until the server reads it."""
    monkeypatch.setattr(backend, "CONTROL_SECONDS", 0.2)

    async def ask() -> None:
        async with client(address, 0.5) as asked, asyncio.timeout(30):
            async for _ in asked.ask(Question("a" * 32, "?", images=[bytes(size)])):
                pass

    with serving(address, hangs=True), pytest.raises(ApiError, match=r"sent nothing for 0\.5 s"):
        asyncio.run(ask())


def test_a_question_that_is_given_up_ends_its_call_and_makes_no_other(address: str) -> None:
    """Many clients that disconnect at once would hold up all others with a call more for each."""

    async def give_up() -> None:
        async with client(address) as asked:
            answer = asked.ask(Question("a" * 32, "?"))
            await anext(answer)
            await answer.aclose()

    with serving(address, hangs=True, answers=True) as server:
        asyncio.run(give_up())
        until(lambda: server.running == 0)
    assert server.calls == 1


def test_calls_that_wait_for_the_description_share_one_request_and_its_error(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "CONTROL_SECONDS", 0.5)

    async def describe() -> list[Any]:
        async with client(address, 60) as asked:
            calls = [asked.describe() for _ in range(8)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            with pytest.raises(ApiError):
                await asked.describe()
            return results

    with serving(address, hangs=True) as hung:
        results = asyncio.run(describe())
    assert {type(result) for result in results} == {ApiError}
    assert hung.calls == 2


def test_a_server_that_has_just_answered_is_not_asked_whether_it_does(address: str) -> None:
    async def check() -> None:
        async with client(address) as asked:
            answer = asked.ask(Question("a" * 32, "?"))
            await anext(answer)
            await asked.check()
            await answer.aclose()
            assert server.calls == 1
            asked._heard -= DESCRIPTION_SECONDS
            await asked.check()

    with serving(address, hangs=True, answers=True) as server:
        asyncio.run(check())
    assert server.calls == 2


def test_a_missing_server_is_reported_once_and_so_is_its_first_answer(address: str) -> None:
    said: list[str] = []

    async def run() -> None:
        async with client(address) as asked:
            waiting = asyncio.create_task(
                wait_for_first_answer(asked, address, said.append, RETRY_SECONDS)
            )
            while not said:
                await asyncio.sleep(RETRY_SECONDS)
            await asyncio.sleep(5 * RETRY_SECONDS)
            assert len(said) == 1
            with serving(address):
                await asyncio.wait_for(waiting, timeout=30)
                # Nothing is said about a server that answers at once.
                await asyncio.wait_for(wait_for_first_answer(asked, address, said.append), 30)

    asyncio.run(run())
    missing, found = said
    assert f"no answer from the server at {address} yet" in missing
    assert "Connection refused" in missing
    assert "vlora serve" in missing
    assert "--grpc HOST:PORT" in missing
    assert found == f"the server at {address} answers now"


def test_the_gateway_reports_a_missing_server_and_still_starts_and_stops(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> str:
        gateway = Gateway(GatewayOptions(grpc=address), lambda error: None)
        said = ""
        async with gateway.running(None):  # type: ignore[arg-type]
            deadline = time.monotonic() + 30
            while not said and time.monotonic() < deadline:
                await asyncio.sleep(RETRY_SECONDS)
                said = capsys.readouterr().err
        return said

    assert f"no answer from the server at {address} yet" in asyncio.run(run())


@pytest.mark.parametrize("adapters", [{"adapters": [{"name": "base"}]}, {"broken": {"base": "?"}}])
def test_a_gateway_ends_if_an_adapter_has_the_name_of_the_base_model(
    address: str, adapters: dict[str, Any]
) -> None:
    command = [sys.executable, "-m", "vlora.cli", "gateway", "--port", "0", "--grpc", address]
    with serving(address) as server:
        server.description = adapters
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "an adapter is named 'base', which is the name of the base model" in ended.stderr


@pytest.mark.alone
@pytest.mark.slow
def test_a_server_that_starts_late_is_found_soon(address: str) -> None:
    """gRPC waits longer after each failed attempt; the gateway limits this."""

    async def first_answer(asked: Backend) -> float:
        started = time.monotonic()
        while True:
            try:
                await asked.describe()
            except ApiError:
                assert time.monotonic() - started < 60
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return time.monotonic() - started

    async def run() -> float:
        async with client(address) as asked:
            for _ in range(int(5 * RECONNECT_SECONDS / RETRY_SECONDS)):
                with pytest.raises(ApiError):
                    await asked.describe()
                await asyncio.sleep(RETRY_SECONDS)
            with serving(address):
                return await first_answer(asked)

    # gRPC adds up to 20 % to its waits.
    assert asyncio.run(run()) < 1.5 * RECONNECT_SECONDS


@pytest.mark.parametrize(
    ("code", "details", "expected", "message"),
    [
        ("UNAVAILABLE", "refused", "UNAVAILABLE", "the V-LoRA server cannot be reached: refused"),
        ("UNAVAILABLE", "Socket closed", "UNAVAILABLE", "Socket closed; is this the gRPC port?"),
        ("DEADLINE_EXCEEDED", "late", "UNAVAILABLE", "the V-LoRA server did not answer in time"),
        ("NOT_FOUND", "in ensemble 'x', NOT_FOUND: no 'a'", "NOT_FOUND", "no 'a'"),
        ("UNKNOWN", None, "INTERNAL", "no details"),
    ],
)
def test_an_error_of_grpc_is_one_of_the_api(
    code: str, details: str | None, expected: str, message: str
) -> None:
    status = grpc.StatusCode[code]
    error = from_grpc(SimpleNamespace(code=lambda: status, details=lambda: details))
    assert error.code == expected
    assert error.message.endswith(message)


def test_requests_that_outlast_the_grace_period_get_an_error(address: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving(address, hangs=True, answers=True))
        gateway = stack.enter_context(running(address, tmp_path, "--grace", "0"))

        def post(**fields: Any) -> HTTPConnection:
            connection = stack.enter_context(closing(HTTPConnection(gateway.address, timeout=60)))
            body = json.dumps({"model": "base", "prompt": "?", **fields})
            connection.request(
                "POST", "/v1/completions", body, {"content-type": "application/json"}
            )
            return connection

        stream, whole = post(stream=True, logprobs=0).getresponse(), post()
        assert stream.status == 200
        until(lambda: gateway.running() == 2)
        gateway.process.terminate()
        answer = whole.getresponse()
        assert answer.status == 503
        for error in (answer.read(), stream.read().removeprefix(b"data: ")):
            found = json.loads(error)["error"]
            assert (found["type"], found["code"]) == ("server_error", "UNAVAILABLE")
        until(lambda: server.running == 0)


class EndedCall:
    """A call that ends in one of the two steps of sending, before gRPC has noticed why."""

    def __init__(self, failing: str) -> None:
        self._failing = failing

    async def write(self, request: bytes) -> None:
        if self._failing == "write":
            nothing = grpc.aio.Metadata()
            code = grpc.StatusCode.INTERNAL
            raise grpc.aio.AioRpcError(code, nothing, nothing, "Internal error from Core")

    async def done_writing(self) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize("failing", ["write", "done_writing"])
def test_a_request_whose_call_ends_while_it_is_sent_may_be_tried_again(
    address: str, failing: str
) -> None:
    async def codes() -> list[str]:
        found = []
        async with client(address) as asker:
            asker._stream = lambda **_: EndedCall(failing)
            for asking in (asker.describe(), anext(asker.ask(Question("id", "text")))):
                with pytest.raises(ApiError) as caught:
                    await asking
                found.append(caught.value.code)
        return found

    assert asyncio.run(codes()) == ["UNAVAILABLE"] * 2


def test_every_error_of_the_server_has_a_status() -> None:
    assert set(BY_CODE) <= STATUSES.keys()
