"""The gateway benchmark: latency that the gateway adds, and how many connections it holds.

Rounds over gRPC to the server and rounds through the gateway alternate within one run, so that
other load on the machine affects both alike. Client, gateway and server share the machine, as with
`vlora serve`. The clients have little overhead: they run in one event loop, and requests are
prepared before any is sent. A request is timed from just before it is sent.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import numpy as np
import psutil

from benchmarks.frame import DEMO, Benchmark, Row, matching
from benchmarks.llava import Checkpoint
from benchmarks.loads import (
    BenchmarkError,
    GrpcClient,
    Load,
    LoadRequest,
    LoadTimes,
    times_since,
)
from vlora.launcher.processes import start_tied
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer
from vlora.net import LOOPBACK, choose_ports, get

CUT_TOKENS = 400
"""Number of tokens of an answer whose connection is closed early."""
SETTLE_SECONDS, POLL_SECONDS = 60.0, 0.05
"""Maximum wait until no request runs."""
CONNECT_AT_ONCE = 50
"""Maximum number of connections that are opened, or used, at the same time."""
DEMO_SIDE = 256
"""Side of the demo model's random images in pixels."""
START_SECONDS, STOP_SECONDS = 60.0, 10.0
TEXT, NO_TEXT, DONE, END = b'"content": "', b'"content": ""', b"data: [DONE]", b"0\r\n\r\n"


@dataclass(kw_only=True)
class Gateway(Benchmark):
    """Token latency and time to first token through the gateway, compared with gRPC.

    A cell is a model of `Serving`, a measurement ("latency", "idle" or "cut"), the kind of the
    requests and their number.
    """

    name = "gateway"
    bars: ClassVar = {
        "token_latency_ratio_mid-size": "≤ 1.03",
        "token_latency_ratio_demo": "≤ 1.03",
        "first_token_added_ms_mid-size": "≤ 5",
        "first_token_added_ms_demo": "≤ 5",
        "first_token_added_ms_instant": "≤ 5",
        "idle_share_held": "≥ 1",
        "left_running": "≤ 0",
    }

    shown: ClassVar = {
        "average token latency and time to first token": (
            "model kind number token_ms_grpc token_ms_gateway token_ratio token_ratio_each_token"
            " first_ms_grpc first_ms_gateway first_added_ms gateway_cpu_us_per_token"
        ),
        "idle connections": "number held memory_kib_each cpu_share seconds",
        "cut streams": "number running_at_cut seconds_until_none aborted finished left_running",
    }

    def prepare(self) -> None:
        super().prepare()
        self._runner = self.stack.enter_context(asyncio.Runner())
        self._servers = self.stack.enter_context(ExitStack())
        self._running: Serving | None = None
        self._seed = 0

    def cells(self) -> Sequence[tuple[str, str, str, int]]:
        cells: list[tuple[str, str, str, int]] = []
        for model in self.values["models"]:
            numbers = [1] if model == "instant" else self.values["concurrency"]
            cells += [(model, "latency", kind, n) for kind in self.values["kinds"] for n in numbers]
            if model == "demo":
                cells.append((model, "idle", "text", self.values["idle_connections"]))
                cells.append((model, "cut", "text", self.values["cut_streams"]))
        return cells

    def measure(self, cell: tuple[str, str, str, int]) -> Iterator[Row]:
        model, measurement, kind, number = cell
        self.status(f"{model}, {measurement}, {kind}, {number} at once")
        if self._running is None or self._running.name != model:
            self._servers.close()
            checkpoint = self.generated() if model == "mid-size" else None
            self._running = self._servers.enter_context(Serving(model, checkpoint, self._runner))
        serving = self._running
        row: Row = {"model": model, "measurement": measurement, "kind": kind, "number": number}
        if measurement == "latency":
            yield row | self._latency(serving, kind, number)
        elif measurement == "idle":
            yield row | self._runner.run(idle(serving, number, self.values["idle_seconds"]))
        else:
            requests = serving.draw("text", self.values["adapters"], number, 1 << 20)
            yield row | self._runner.run(cut(serving, requests))

    def _latency(self, serving: Serving, kind: str, number: int) -> Row:
        """Alternate rounds over gRPC and the gateway. The first round of each is not counted.

        Over gRPC each token is a message. The gateway is measured twice: with the default, which
        joins the tokens of an interval, and (`each_token`) with each token in its own chunk.
        """
        ways: dict[str, Callable[[Sequence[LoadRequest]], Coroutine[Any, Any, LoadTimes]]] = {
            "grpc": serving.client.run,
            "gateway": serving.over_gateway,
            "each_token": partial(serving.over_gateway, each_token=True),
        }
        token: dict[str, list[float]] = {way: [] for way in ways}
        first: dict[str, list[float]] = {way: [] for way in ways}
        gateway_seconds, tokens = 0.0, 0
        for turn in range(self.values["rounds"][str(number)] + 1):
            for way in (*ways,) if turn % 2 else (*reversed(ways),):
                self._seed += 1
                requests = serving.draw(kind, self.values["adapters"], number, self._seed)
                before = serving.gateway_seconds()
                times = self._runner.run(ways[way](requests))
                if not turn:
                    continue
                token[way].append(times.token_latency * 1e3)
                first[way].append(fmean(times.first) * 1e3)
                if way == "gateway":
                    gateway_seconds += serving.gateway_seconds() - before
                    tokens += sum(request.tokens for request in requests)
        token_ms = {way: median(of_way) for way, of_way in token.items()}
        first_ms = {way: median(of_way) for way, of_way in first.items()}
        return {
            **{f"token_ms_{way}": token_ms[way] for way in ways},
            **{f"first_ms_{way}": first_ms[way] for way in ways},
            "token_ratio": token_ms["gateway"] / token_ms["grpc"],
            "token_ratio_each_token": token_ms["each_token"] / token_ms["grpc"],
            "first_added_ms": first_ms["gateway"] - first_ms["grpc"],
            "gateway_cpu_us_per_token": gateway_seconds / tokens * 1e6,
        }

    def summarize(self) -> dict[str, Any]:
        """Return each model's latency figures, and the figures of connections.

        Ratios of token latencies are those at the highest concurrency. The times that the gateway
        adds to the first token are those of a single request. Each is the largest one of all kinds
        of requests.
        """

        def worst(model: str, key: str, number: int) -> float | None:
            rows = matching(self.rows, measurement="latency", model=model, number=number)
            return max((row[key] for row in rows), default=None)

        def first_of(measurement: str) -> Row:
            return next(iter(matching(self.rows, measurement=measurement)), {})

        highest, idle_row = max(self.values["concurrency"]), first_of("idle")
        summary: dict[str, Any] = {}
        for model in ("mid-size", "demo"):
            summary[f"token_latency_ratio_{model}"] = worst(model, "token_ratio", highest)
        for model in ("mid-size", "demo", "instant"):
            summary[f"first_token_added_ms_{model}"] = worst(model, "first_added_ms", 1)
        summary["idle_share_held"] = idle_row["held"] / idle_row["number"] if idle_row else None
        summary["left_running"] = first_of("cut").get("left_running")
        return summary


async def idle(serving: Serving, number: int, seconds: float) -> Row:
    """Open connections, leave them idle, then check each with a request.

    Return how many still work, the gateway's memory per connection, and its share of a core while
    they were idle.
    """
    before = serving.gateway.memory_info().rss
    connections = await _open(serving, number)
    await _in_groups([connection.health() for connection in connections])
    grown = serving.gateway.memory_info().rss - before
    busy = serving.gateway_seconds()
    await asyncio.sleep(seconds)
    busy = serving.gateway_seconds() - busy
    answers = await _in_groups([connection.health() for connection in connections])
    for connection in connections:
        connection.close()
    return {
        "held": sum(isinstance(answer, bytes) and b"ok" in answer for answer in answers),
        "seconds": seconds,
        "memory_kib_each": grown / number / 1024,
        "cpu_share": busy / seconds,
    }


async def cut(serving: Serving, requests: Sequence[LoadRequest]) -> Row:
    """Start streams, close all their connections, and wait until no request runs."""
    connections = await _open(serving, len(requests))
    for request, connection in zip(requests, connections, strict=True):
        connection.send(http(replace(request, tokens=CUT_TOKENS)))
    counters = ("aborted", "finished")
    before = {name: serving.metric(f"vlora:requests_{name}_total") for name in counters}
    heads = [asyncio.ensure_future(connection.head()) for connection in connections]
    await next(asyncio.as_completed(heads))  # One of the streams has its first token.
    for head in heads:
        head.cancel()
    await asyncio.gather(*heads, return_exceptions=True)
    at_cut = serving.running()
    for connection in connections:
        connection.close()
    started = time.perf_counter()
    while (left := serving.running()) and time.perf_counter() - started < SETTLE_SECONDS:
        await asyncio.sleep(POLL_SECONDS)
    seconds = time.perf_counter() - started
    row = {"running_at_cut": at_cut, "left_running": left, "seconds_until_none": seconds}
    after = {name: serving.metric(f"vlora:requests_{name}_total") for name in counters}
    return row | {name: after[name] - before[name] for name in counters}


async def _open(serving: Serving, number: int) -> list[Connection]:
    connections = [Connection() for _ in range(number)]
    await _in_groups([connection.open(serving.port) for connection in connections])
    return connections


async def _in_groups(work: Sequence[Any]) -> list[Any]:
    """Await all items, CONNECT_AT_ONCE at a time. Return the result or the error of each."""
    done: list[Any] = []
    for start in range(0, len(work), CONNECT_AT_ONCE):
        group = work[start : start + CONNECT_AT_ONCE]
        done += await asyncio.gather(*group, return_exceptions=True)
    return done


class Serving:
    """A running server of one model, its gateway and clients. Use as a context manager.

    name: `demo`, `mid-size`, or `instant` for a server that answers at once, without a model.
    checkpoint: that of the model `mid-size`.
    runner: event loop of the clients.
    """

    def __init__(self, name: str, checkpoint: Checkpoint | None, runner: asyncio.Runner) -> None:
        self.name, self._checkpoint, self._runner = name, checkpoint, runner
        self._stack = ExitStack()
        self._connections: list[Connection] = []
        ports = choose_ports({"gateway": 0, "grpc": 0}, LOOPBACK)
        self.port, self._grpc_port = ports["gateway"], ports["grpc"]

    def __enter__(self) -> Serving:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            log = stack.enter_context((Path(folder) / "log").open("wb"))

            def start(*words: str) -> int:
                process = start_tied([sys.executable, "-m", *words], os.environ, log)
                stack.callback(process.wait, STOP_SECONDS)
                stack.callback(process.terminate)
                return int(process.pid)

            command = ["vlora.cli", "gateway", "--port", str(self.port)]
            if self.name == "instant":
                address = f"{LOOPBACK}:{self._grpc_port}"
                start("benchmarks.instant_server", str(self._grpc_port))
            else:
                options = ServerOptions()
                if (made := self._checkpoint) is not None:
                    options = ServerOptions(model=made.folder, adapters=made.adapters)
                server = stack.enter_context(TritonServer(options))
                address = server.grpc_url
                command += ["--metrics-url", server.metrics_url]
            self.gateway = psutil.Process(start(*command, "--grpc", address))
            self._wait()

            self.client = GrpcClient(address)
            self._runner.run(self.client.open())
            stack.callback(lambda: self._runner.run(self.client.close()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self._connections:
            connection.close()
        self._stack.close()

    def _wait(self) -> None:
        """Wait until the gateway answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                get(f"http://{LOOPBACK}:{self.port}/health", 5.0, True)
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise BenchmarkError(f"the gateway does not answer: {error}") from error
                time.sleep(0.1)

    def draw(self, kind: str, adapters: int, number: int, seed: int) -> list[LoadRequest]:
        """Return requests that rotate over the adapters; each seed has its own texts or images."""
        if self._checkpoint is not None:
            return Load(kind, adapters, number).draw(self._checkpoint, seed)
        known = sorted(path.name for path in (DEMO / "adapters").iterdir() if path.is_dir())
        names = [None] if self.name == "instant" or not adapters else known[:adapters]
        rng = np.random.default_rng(seed)
        requests = []
        for i in range(number):
            text = f"How many objects are there in picture {rng.integers(1 << 30)}?"
            pixels = rng.integers(0, 256, (DEMO_SIDE, DEMO_SIDE, 3), np.uint8)
            image = pixels if kind == "image" else None
            requests.append(LoadRequest(text, image, names[i % len(names)], "vqa"))
        return requests

    async def over_gateway(
        self, requests: Sequence[LoadRequest], each_token: bool = False
    ) -> LoadTimes:
        """Send all requests at once, each on its own connection, and return their times."""
        self._connections += await _open(self, max(0, len(requests) - len(self._connections)))
        bodies = [http(request, each_token) for request in requests]
        pairs = zip(self._connections, bodies, strict=False)
        started = time.perf_counter()
        return times_since(started, await asyncio.gather(*(c.chat(body) for c, body in pairs)))

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples in the gateway's /metrics."""
        page = get(f"http://{LOOPBACK}:{self.port}/metrics", 10.0, True).decode()
        lines = [line.split() for line in page.splitlines()]
        return sum(float(line[-1]) for line in lines if line and line[0].partition("{")[0] == name)

    def running(self) -> float:
        """Return the number of requests in the gateway and in the server."""
        names = ("vlora_gateway_requests_running", "vllm:num_requests_running")
        running = sum(map(self.metric, (*names, "vllm:num_requests_waiting")))
        return running - 1  # The request for the metrics counts itself.

    def gateway_seconds(self) -> float:
        """Return the CPU time in seconds that the gateway's process has taken so far."""
        times = self.gateway.cpu_times()
        return float(times.user + times.system)


def http(request: LoadRequest, each_token: bool = False) -> bytes:
    """Return a request as the bytes of an HTTP request.

    each_token: whether each token is sent in a chunk of its own.
    """
    content: list[dict[str, Any]] = [{"type": "text", "text": request.prompt}]
    if request.file is not None:
        url = f"data:image/png;base64,{base64.b64encode(request.file).decode()}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    values = {
        "model": request.adapter or "base",
        "messages": [{"role": "user", "content": content}],
        "task": request.task,
        "max_tokens": request.tokens,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(values | ({"stream_interval_ms": 0} if each_token else {})).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {LOOPBACK}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """One HTTP connection to the gateway, which is kept open between requests."""

    async def open(self, port: int) -> None:
        """Open the connection to the gateway."""
        self._reader, self._writer = await asyncio.open_connection(LOOPBACK, port)

    def close(self) -> None:
        """Close the connection immediately, even in the middle of an answer."""
        self._writer.transport.abort()

    def send(self, request: bytes) -> None:
        """Send a request."""
        self._writer.write(request)

    async def head(self) -> bytes:
        """Return the head of the answer, which arrives with the first token.

        Raise BenchmarkError if the request failed.
        """
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise BenchmarkError(f"the gateway answered {head!r}")
        return head.lower()

    async def health(self) -> bytes:
        """Ask whether the gateway is ready, and return its answer."""
        self.send(f"GET /health HTTP/1.1\r\nHost: {LOOPBACK}\r\n\r\n".encode())
        _, _, after = (await self.head()).partition(b"content-length:")
        return await self._reader.readexactly(int(after.split()[0]))

    async def chat(self, request: bytes) -> tuple[float, float]:
        """Send a request and return the moments of its first token and of its end."""
        self.send(request)
        await self.head()
        first = 0.0
        while DONE not in (event := await self._reader.readuntil(b"\n\n")):
            if not first and TEXT in event and NO_TEXT not in event:
                first = time.perf_counter()
        await self._reader.readuntil(END)
        end = time.perf_counter()
        return first or end, end
