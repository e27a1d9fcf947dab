"""The gateway benchmark: latency that the gateway adds.

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
from dataclasses import dataclass
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

CONNECT_AT_ONCE = 50
"""Maximum number of connections that are opened at the same time."""
DEMO_SIDE = 256
"""Side of the demo model's random images in pixels."""
START_SECONDS, STOP_SECONDS = 60.0, 10.0
TEXT, NO_TEXT, DONE, END = b'"content": "', b'"content": ""', b"data: [DONE]", b"0\r\n\r\n"


@dataclass(kw_only=True)
class Gateway(Benchmark):
    """Token latency and time to first token through the gateway, compared with gRPC.

    A cell is a model of `Serving`, the kind of the requests and their number.
    """

    name = "gateway"
    bars: ClassVar = {
        "token_latency_ratio_mid-size": "≤ 1.03",
        "token_latency_ratio_demo": "≤ 1.03",
        "first_token_added_ms_mid-size": "≤ 5",
        "first_token_added_ms_demo": "≤ 5",
        "first_token_added_ms_instant": "≤ 5",
    }

    shown: ClassVar = {
        "average token latency and time to first token": (
            "model kind number token_ms_grpc token_ms_gateway token_ratio"
            " first_ms_grpc first_ms_gateway first_added_ms gateway_cpu_us_per_token"
        ),
    }

    def prepare(self) -> None:
        super().prepare()
        self._runner = self.stack.enter_context(asyncio.Runner())
        self._servers = self.stack.enter_context(ExitStack())
        self._running: Serving | None = None
        self._seed = 0

    def cells(self) -> Sequence[tuple[str, str, int]]:
        kinds, several = self.values["kinds"], self.values["concurrency"]
        return [
            (model, kind, number)
            for model in self.values["models"]
            for kind in kinds
            for number in ([1] if model == "instant" else several)
        ]

    def measure(self, cell: tuple[str, str, int]) -> Iterator[Row]:
        model, kind, number = cell
        self.status(f"{model}, {kind}, {number} at once")
        if self._running is None or self._running.name != model:
            self._servers.close()
            checkpoint = self.generated() if model == "mid-size" else None
            self._running = self._servers.enter_context(Serving(model, checkpoint, self._runner))
        row: Row = {"model": model, "kind": kind, "number": number}
        yield row | self._latency(self._running, kind, number)

    def _latency(self, serving: Serving, kind: str, number: int) -> Row:
        """Alternate rounds over gRPC and the gateway. The first round of each is not counted.

        Over gRPC each token is a message. The gateway joins the tokens of an interval.
        """
        ways: dict[str, Callable[[Sequence[LoadRequest]], Coroutine[Any, Any, LoadTimes]]] = {
            "grpc": serving.client.run,
            "gateway": serving.over_gateway,
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
            "first_added_ms": first_ms["gateway"] - first_ms["grpc"],
            "gateway_cpu_us_per_token": gateway_seconds / tokens * 1e6,
        }

    def summarize(self) -> dict[str, Any]:
        """Return each model's latency figures.

        Ratios of token latencies are those at the highest concurrency. The times that the gateway
        adds to the first token are those of a single request. Each is the largest one of all kinds
        of requests.
        """

        def worst(model: str, key: str, number: int) -> float | None:
            rows = matching(self.rows, model=model, number=number)
            return max((row[key] for row in rows), default=None)

        highest = max(self.values["concurrency"])
        summary: dict[str, Any] = {}
        for model in ("mid-size", "demo"):
            summary[f"token_latency_ratio_{model}"] = worst(model, "token_ratio", highest)
        for model in ("mid-size", "demo", "instant"):
            summary[f"first_token_added_ms_{model}"] = worst(model, "first_added_ms", 1)
        return summary


async def _open(serving: Serving, number: int) -> list[Connection]:
    connections = [Connection() for _ in range(number)]
    for start in range(0, number, CONNECT_AT_ONCE):
        group = connections[start : start + CONNECT_AT_ONCE]
        await asyncio.gather(*(connection.open(serving.port) for connection in group))
    return connections


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

    async def over_gateway(self, requests: Sequence[LoadRequest]) -> LoadTimes:
        """Send all requests at once, each on its own connection, and return their times."""
        self._connections += await _open(self, max(0, len(requests) - len(self._connections)))
        bodies = [http(request) for request in requests]
        pairs = zip(self._connections, bodies, strict=False)
        started = time.perf_counter()
        return times_since(started, await asyncio.gather(*(c.chat(body) for c, body in pairs)))

    def gateway_seconds(self) -> float:
        """Return the CPU time in seconds that the gateway's process has taken so far."""
        times = self.gateway.cpu_times()
        return float(times.user + times.system)


def http(request: LoadRequest) -> bytes:
    """Return a request as the bytes of an HTTP request."""
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
    body = json.dumps(values).encode()
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
        """Close the connection immediately."""
        self._writer.transport.abort()

    async def chat(self, request: bytes) -> tuple[float, float]:
        """Send a request and return the moments of its first token and of its end.

        Raise BenchmarkError if the request failed.
        """
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise BenchmarkError(f"the gateway answered {head!r}")
        first = 0.0
        while DONE not in (event := await self._reader.readuntil(b"\n\n")):
            if not first and TEXT in event and NO_TEXT not in event:
                first = time.perf_counter()
        await self._reader.readuntil(END)
        end = time.perf_counter()
        return first or end, end
