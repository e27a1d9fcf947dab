"""Tests of `vlora probe` on small gRPC servers in the states that it distinguishes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from typer.testing import CliRunner

from vlora.cli import app
from vlora.launcher.probe import ENSEMBLE, PROGRESS, Health, probe
from vlora.launcher.run_folder import run_folder, starting_file
from vlora.net import choose_ports, get, is_local

Answer = Callable[[Any, grpc.ServicerContext], Any]


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A server that is live, with a given readiness and answer."""

    def __init__(self, ready: bool, answer: Answer) -> None:
        self._ready, self._answer = ready, answer
        self.requests: list[Any] = []

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerReadyResponse(ready=self._ready)

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        return self._answer(request, context)


def answers(request: Any, context: Any) -> Any:
    return service_pb2.ModelInferResponse(model_name=request.model_name)


def refuses(code: grpc.StatusCode, details: str) -> Answer:
    return lambda request, context: context.abort(code, details)


@contextmanager
def serving(ready: bool = True, answer: Answer = answers) -> Iterator[tuple[str, Server]]:
    servicer = Server(ready, answer)
    server = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        server.stop(0).wait()


def test_a_server_that_answers_is_ready() -> None:
    with serving() as (address, server):
        finding = probe(address)
    assert finding.health is Health.READY
    assert [request.model_name for request in server.requests] == [ENSEMBLE]
    assert len(server.requests[0].id) >= 16


def test_a_server_that_loads_its_models_is_alive_and_gets_no_request() -> None:
    with serving(ready=False) as (address, server):
        finding = probe(address)
    assert finding.health is Health.ALIVE
    assert server.requests == []


@pytest.mark.parametrize(
    "details",
    [
        "in ensemble 'video_analytics', UNAVAILABLE: the queue is full",
        "Server is stopping, scheduler for model has stopped accepting new inference requests",
    ],
)
def test_a_full_queue_and_a_draining_server_are_alive(details: str) -> None:
    with serving(answer=refuses(grpc.StatusCode.UNAVAILABLE, details)) as (address, _):
        assert probe(address).health is Health.ALIVE


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.INTERNAL, "Stub process 'lmm_0_0' is not healthy."),
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model"),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed"),
        (grpc.StatusCode.INTERNAL, ""),
    ],
)
def test_a_server_with_a_dead_model_is_dead(code: grpc.StatusCode, details: str) -> None:
    with serving(answer=refuses(code, details)) as (address, _):
        finding = probe(address)
    assert finding.health is Health.DEAD
    assert details in finding.reason


def test_a_server_that_hangs_is_dead_within_the_deadline() -> None:
    released = threading.Event()

    def hangs(request: Any, context: Any) -> Any:
        released.wait(30)
        return answers(request, context)

    with serving(answer=hangs) as (address, _):
        finding = probe(address, deadline=0.5)
        released.set()
    assert finding.health is Health.DEAD
    assert "within 0.5 s" in finding.reason


def test_a_free_port_is_dead(free_port: int) -> None:
    assert probe(f"127.0.0.1:{free_port}", deadline=2).health is Health.DEAD


@pytest.mark.parametrize("address", ["http://localhost:8001", "localhost", "localhost:70000"])
def test_an_address_that_is_not_host_and_port_is_refused_with_its_form(address: str) -> None:
    done = CliRunner().invoke(app, ["probe", address])
    assert done.exit_code == 2
    assert "HOST:PORT" in done.output
    assert address in done.output


def test_for_an_http_port_the_reason_asks_for_the_grpc_port() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        finding = probe(f"127.0.0.1:{server.server_port}", deadline=5)
        server.shutdown()
    assert finding.health is Health.DEAD
    assert finding.reason.endswith("is this the gRPC port?")


@pytest.mark.parametrize(
    ("ready", "options", "status", "word"),
    [(True, [], 0, "ready"), (False, [], 3, "alive"), (False, ["--alive"], 0, "alive")],
)
def test_the_exit_status_distinguishes_ready_from_alive(
    ready: bool, options: list[str], status: int, word: str
) -> None:
    with serving(ready=ready) as (address, _):
        result = CliRunner().invoke(app, ["probe", address, *options])
    assert result.exit_code == status
    assert result.output.startswith(f"{word} in ")


def test_the_exit_status_of_a_dead_server_is_one_even_with_alive(free_port: int) -> None:
    arguments = ["probe", f"127.0.0.1:{free_port}", "--alive", "--deadline", "1"]
    assert CliRunner().invoke(app, arguments).exit_code == 1


@pytest.fixture
def free_port() -> int:
    return choose_ports({"grpc_port": 0})["grpc_port"]


class Metrics(BaseHTTPRequestHandler):
    """HTTP handler of metrics: each request increases the named counter by `per_look`."""

    counter = ""
    per_look = 1
    looks = 0

    def do_GET(self) -> None:
        type(self).looks += 1
        self.send_response(200)
        self.end_headers()
        for name in PROGRESS:
            count = 7 + self.looks * self.per_look * (name == self.counter)
            self.wfile.write(f'{name}{{model="lmm"}} {count}\n'.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("counter", PROGRESS)
@pytest.mark.parametrize(("per_look", "health"), [(3, Health.ALIVE), (0, Health.DEAD)])
def test_a_server_without_an_answer_is_alive_if_it_works(
    per_look: int, health: Health, counter: str
) -> None:
    """Forward passes and encoded images are both work."""
    released = threading.Event()

    def hangs(request: Any, context: Any) -> Any:
        released.wait(30)
        return answers(request, context)

    handler = type("Handler", (Metrics,), {"per_look": per_look, "counter": counter})
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as metrics,
        serving(answer=hangs) as (
            address,
            _,
        ),
    ):
        threading.Thread(target=metrics.serve_forever).start()
        finding = probe(address, deadline=1, metrics_port=metrics.server_port)
        released.set()
        metrics.shutdown()
    assert finding.health is health
    assert finding.seconds < 1.5


def test_a_server_that_starts_on_this_machine_is_alive_and_a_dead_run_is_not(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    address = f"localhost:{free_port}"
    with run_folder() as folder:
        starting_file(folder, free_port).touch()
        assert probe(address, deadline=2).health is Health.ALIVE
        assert probe(f"localhost:{free_port + 1}", deadline=2).health is Health.DEAD
        left = folder.with_name("0" * 16)
        shutil.copytree(folder, left)
    assert starting_file(left, free_port).exists()
    assert probe(address, deadline=2).health is Health.DEAD


def test_proxies_of_the_environment_do_not_carry_requests_to_this_machine() -> None:
    """A process of its own: gRPC and urllib read the variables once."""
    names = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
    closed = {**os.environ, **dict.fromkeys(names, "http://127.0.0.1:9"), "no_proxy": ""}
    handler = type("Handler", (Metrics,), {"counter": next(iter(PROGRESS))})
    slow = refuses(grpc.StatusCode.DEADLINE_EXCEEDED, "")
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as metrics,
        serving(answer=slow) as (address, _),
    ):
        threading.Thread(target=metrics.serve_forever).start()
        command = [sys.executable, "-m", "vlora.cli", "probe", address]
        command += ["--metrics-port", str(metrics.server_port), "--deadline", "30"]
        done = subprocess.run(command, env=closed, capture_output=True, text=True, timeout=60)
        metrics.shutdown()
    assert "the server is working" in done.stdout, done
    assert done.returncode == Health.ALIVE


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
    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(answer, listener)
        with pytest.raises(OSError, match="not valid HTTP"):
            get(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics", 5.0, direct=True)
