"""Tests of Envoy's routing and retries, with the configuration of `vlora envoy`."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support import deploy_kit as kit
from tests.support.polling import until
from vlora.launcher.envoy import Server, write_configuration, write_servers
from vlora.net import LOOPBACK, load_grpc_stubs

service_pb2, service_pb2_grpc = load_grpc_stubs()
ADAPTERS = [f"adapter-{index}" for index in range(24)]
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
MIB = 1 << 20


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A server that answers with its own name. It may refuse, wait, or fail after an answer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.refuses = self.breaks = False
        self.open = threading.Event()
        self.open.set()
        self.port = kit.free_ports(name)[name]
        self._server = grpc.server(ThreadPoolExecutor(64), options=UNLIMITED)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"{LOOPBACK}:{self.port}")
        self._server.start()

    def stop(self) -> None:
        self.open.set()
        self._server.stop(0).wait()

    def _begin(self, context: Any) -> None:
        self.calls += 1
        self.open.wait(60)
        if self.refuses:
            context.abort(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE: the queue is full: 9")

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._begin(context)
        return service_pb2.ModelInferResponse(id=self.name)

    def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelStatisticsResponse(model_stats=[{"name": self.name}])

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        next(requests)
        self._begin(context)
        answer = service_pb2.ModelStreamInferResponse()
        answer.infer_response.id = self.name
        yield answer
        if self.breaks:
            context.abort(grpc.StatusCode.UNAVAILABLE, "broken")


@pytest.fixture
def fakes() -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        servers = [FakeServer(name) for name in ("one", "two", "three")]
        for server in servers:
            stack.callback(server.stop)
        yield servers


class Proxy:
    """Envoy in front of fake servers, and a client of it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"http://{LOOPBACK}:{port}/"
        self.channel = grpc.insecure_channel(f"{LOOPBACK}:{port}", UNLIMITED)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def use(self, fakes: list[FakeServer], draining: tuple[FakeServer, ...] = ()) -> None:
        servers = [Server(LOOPBACK, one.port, one.port, one in draining) for one in fakes]
        write_servers(self.folder, servers)

    def begin(self, adapter: str | None, size: int = 0, **options: Any) -> Future[Any]:
        request = service_pb2.ModelInferRequest(model_name="lmm", raw_input_contents=[bytes(size)])
        metadata = [] if adapter is None else [("x-lora-adapter", adapter)]
        future: Future[Any] = self._stub.ModelInfer.future(request, metadata=metadata, **options)
        return future

    def ask(self, adapter: str | None, size: int = 0, **options: Any) -> str:
        """Return the name of the server that answers a request with a body of this size."""
        return str(self.begin(adapter, size, **options).result(timeout=60).id)

    def server_within(self, seconds: float) -> str | None:
        """Send a request. Return the name of the server that answers it in time, or None."""
        try:
            return self.ask(None, timeout=seconds)
        except grpc.RpcError:
            return None

    def server_of_statistics(self, adapter: str | None) -> str:
        metadata = [] if adapter is None else [("x-lora-adapter", adapter)]
        request = service_pb2.ModelStatisticsRequest()
        return str(self._stub.ModelStatistics(request, metadata=metadata).model_stats[0].name)

    def stream(self, adapter: str) -> Iterator[Any]:
        request = service_pb2.ModelInferRequest(model_name="lmm")
        stream: Iterator[Any] = self._stub.ModelStreamInfer(
            iter([request]), metadata=[("x-lora-adapter", adapter)]
        )
        return stream


@pytest.fixture
def proxy(tools: Path, fakes: list[FakeServer], tmp_path: Path) -> Iterator[Proxy]:
    ports = kit.free_ports("grpc", "http")
    path = write_configuration(tmp_path, LOOPBACK, [*ports.values()], health_checks=False)
    command = [tools / "envoy", "-c", path, "--concurrency", "2", "--disable-hot-restart"]
    with kit.running(command, tmp_path / "envoy.log"):
        envoy = Proxy(tmp_path, ports["grpc"])
        envoy.use(fakes)
        envoy.ask(None, wait_for_ready=True, timeout=60)
        for fake in fakes:
            fake.calls = 0
        yield envoy
        envoy.channel.close()


def test_an_adapter_goes_to_one_server_and_the_base_model_to_all(
    proxy: Proxy, fakes: list[FakeServer]
) -> None:
    homes = {adapter: proxy.ask(adapter) for adapter in ADAPTERS}
    assert set(homes.values()) == {fake.name for fake in fakes}
    assert homes == {adapter: proxy.ask(adapter) for adapter in ADAPTERS}
    assert len({proxy.ask(None) for _ in range(40)}) == len(fakes)


def test_statistics_that_perf_analyzer_subtracts_come_from_one_server(proxy: Proxy) -> None:
    assert len({proxy.server_of_statistics(None) for _ in range(40)}) == 1
    homes = [proxy.ask(adapter) for adapter in ADAPTERS]
    assert homes == [proxy.server_of_statistics(adapter) for adapter in ADAPTERS]


def test_a_hot_adapter_takes_no_server_beyond_its_bound(
    proxy: Proxy, fakes: list[FakeServer]
) -> None:
    for fake in fakes:
        fake.open.clear()
    waiting = []
    for number in range(1, 31):  # One by one, because the counts of two threads of Envoy differ.
        waiting.append(proxy.begin("hot"))
        until(lambda sent=number: sum(fake.calls for fake in fakes) == sent)
    assert sorted(fake.calls for fake in fakes)[1] >= 14, "the second takes what the first may not"
    assert max(fake.calls for fake in fakes) <= 1.5 * 10 + 1
    for fake in fakes:
        fake.open.set()
    for one in waiting:
        one.result(timeout=60)


@pytest.mark.parametrize("size", [0, 8 * MIB, 60 * MIB])
def test_a_request_that_a_server_refuses_goes_to_another_one(
    proxy: Proxy, fakes: list[FakeServer], size: int
) -> None:
    # Five refusals in a row eject a server.
    adapters = [adapter for adapter in ADAPTERS if proxy.ask(adapter) == "one"][:3]
    fakes[0].refuses = True
    fakes[0].calls = 0
    assert {proxy.ask(adapter, size) for adapter in adapters} <= {"two", "three"}
    assert next(proxy.stream(adapters[0])).infer_response.id in ("two", "three")
    assert fakes[0].calls == len(adapters) + 1


def test_a_refused_request_is_sent_twice_at_most(proxy: Proxy, fakes: list[FakeServer]) -> None:
    for fake in fakes:
        fake.refuses = True
    with pytest.raises(grpc.RpcError) as raised:
        proxy.ask("a")
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    assert raised.value.details() == "UNAVAILABLE: the queue is full: 9"
    assert sorted(fake.calls for fake in fakes) == [0, 1, 1]


def test_a_queue_that_is_handed_over_at_once_is_answered_by_another_server(
    proxy: Proxy, fakes: list[FakeServer]
) -> None:
    first, second, _ = fakes
    proxy.use([first])
    until(lambda: {proxy.ask(None) for _ in range(8)} == {"one"})
    first.open.clear()
    first.calls = 0
    waiting = [proxy.begin(adapter) for adapter in ADAPTERS * 2]
    until(lambda: first.calls == len(waiting))
    proxy.use([first, second], draining=(first,))
    until(lambda: {proxy.server_within(1.0) for _ in range(8)} == {"two"})
    proxy.use([second])  # Requests to a server outlast its removal.
    time.sleep(0.5)
    first.refuses = True
    first.open.set()
    assert {one.result(timeout=60).id for one in waiting} == {"two"}


def test_nothing_is_sent_again_after_its_first_output(
    proxy: Proxy, fakes: list[FakeServer]
) -> None:
    for fake in fakes:
        fake.breaks = True
    stream = proxy.stream("a")
    next(stream)
    with pytest.raises(grpc.RpcError):
        next(stream)
    assert sum(fake.calls for fake in fakes) == 1


def test_compressed_bodies_are_refused(proxy: Proxy, fakes: list[FakeServer]) -> None:
    with pytest.raises(grpc.RpcError, match="INVALID_ARG: the body is compressed"):
        proxy.ask("a", size=MIB, compression=grpc.Compression.Gzip)
    headers = {"content-encoding": "gzip"}
    request = urllib.request.Request(f"{proxy.url}v2/models/lmm/generate", b"x" * 100, headers)
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=60)
    with raised.value as answer:
        assert answer.code == 415
    assert sum(fake.calls for fake in fakes) == 0
    assert proxy.ask("a", compression=grpc.Compression.NoCompression)
