"""Tests of `vlora probe` on small gRPC servers in the states that it distinguishes."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2
from typer.testing import CliRunner

from tests.support.fake_triton import FakeTriton
from tests.support.http_server import http_server, response
from vlora.cli import app
from vlora.launcher.probe import ENSEMBLE, PROGRESS, Health, probe
from vlora.launcher.run_folder import run_folder, starting_file
from vlora.net import choose_ports

Answer = Callable[[Any, grpc.ServicerContext], Any]


class Server(FakeTriton):
    """A server with a given readiness and answer. It stores the requests as they came."""

    def __init__(self, ready: bool, answer: Answer) -> None:
        super().__init__()
        self._ready, self._answer = ready, answer

    def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerReadyResponse(ready=self._ready)

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        return self._answer(request, context)


def answers(request: Any, context: Any) -> Any:
    return service_pb2.ModelInferResponse(model_name=request.model_name)


@pytest.fixture
def hangs() -> Iterator[Answer]:
    """Return an answer that comes after the test."""
    released = threading.Event()

    def answer(request: Any, context: Any) -> Any:
        released.wait(30)
        return answers(request, context)

    yield answer
    released.set()


def refuses(code: grpc.StatusCode, details: str) -> Answer:
    return lambda request, context: context.abort(code, details)


@pytest.mark.parametrize(
    "details",
    [
        "in ensemble 'video_analytics', UNAVAILABLE: the queue is full",
        "Server is stopping, scheduler for model has stopped accepting new inference requests",
    ],
)
def test_a_full_queue_and_a_draining_server_are_alive(details: str) -> None:
    with Server(True, refuses(grpc.StatusCode.UNAVAILABLE, details)) as server:
        assert probe(server.url).health is Health.ALIVE


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
    with Server(True, refuses(code, details)) as server:
        finding = probe(server.url)
    assert finding.health is Health.DEAD
    assert details in finding.reason


@pytest.mark.parametrize("address", ["http://localhost:8001", "localhost", "localhost:70000"])
def test_an_address_that_is_not_host_and_port_is_refused_with_its_form(address: str) -> None:
    done = CliRunner().invoke(app, ["probe", address])
    assert done.exit_code == 2
    assert "HOST:PORT" in done.output
    assert address in done.output


@pytest.mark.parametrize(
    ("ready", "options", "status", "word"),
    [(True, [], 0, "ready"), (False, [], 3, "alive"), (False, ["--alive"], 0, "alive")],
)
def test_the_exit_status_distinguishes_ready_from_alive(
    ready: bool, options: list[str], status: int, word: str
) -> None:
    with Server(ready, answers) as server:
        result = CliRunner().invoke(app, ["probe", server.url, *options])
    assert result.exit_code == status
    assert result.output.startswith(f"{word} in ")
    # A server that loads its models gets no request.
    assert [request.model_name for request in server.requests] == [ENSEMBLE] * ready
    assert all(len(request.id) >= 16 for request in server.requests)


def test_the_exit_status_of_a_dead_server_is_one_even_with_alive(free_port: int) -> None:
    arguments = ["probe", f"127.0.0.1:{free_port}", "--alive", "--deadline", "1"]
    assert CliRunner().invoke(app, arguments).exit_code == 1


@pytest.fixture
def free_port() -> int:
    return choose_ports({"grpc_port": 0})["grpc_port"]


def metrics_of(counter: str, per_look: int) -> AbstractContextManager[tuple[int, list[bytes]]]:
    """Return a server of metrics: each request increases the named counter by `per_look`."""
    looks = itertools.count(1)

    def page() -> bytes:
        grown = next(looks) * per_look
        lines = [f'{name}{{model="lmm"}} {7 + grown * (name == counter)}\n' for name in PROGRESS]
        return response("200 OK", "".join(lines).encode())

    return http_server(page)


@pytest.mark.alone
@pytest.mark.parametrize("counter", PROGRESS)
@pytest.mark.parametrize(("per_look", "health"), [(3, Health.ALIVE), (0, Health.DEAD)])
def test_a_server_without_an_answer_is_alive_if_it_works(
    per_look: int, health: Health, counter: str, hangs: Answer
) -> None:
    """Forward passes and encoded images are both work."""
    with (
        metrics_of(counter, per_look) as (port, _),
        Server(True, hangs) as server,
    ):
        finding = probe(server.url, deadline=1, metrics_port=port)
    assert finding.health is health
    assert finding.seconds < 1.5
    assert health is Health.ALIVE or "within 1 s" in finding.reason


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
    slow = refuses(grpc.StatusCode.DEADLINE_EXCEEDED, "")
    with (
        metrics_of(next(iter(PROGRESS)), 1) as (port, _),
        Server(True, slow) as server,
    ):
        command = [sys.executable, "-m", "vlora.cli", "probe", server.url]
        command += ["--metrics-port", str(port), "--deadline", "30"]
        done = subprocess.run(command, env=closed, capture_output=True, text=True, timeout=300)
    assert "the server is working" in done.stdout, done
    assert done.returncode == Health.ALIVE
