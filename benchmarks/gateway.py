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
import statistics
import sys
import tempfile
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
from rich.console import RenderableType

from benchmarks import frame, llava
from benchmarks.frame import DEMO, Bar, Benchmark, Row, at_least, at_most
from benchmarks.instant_server import InstantServer
from benchmarks.loads import OUTPUT, Load, LoadTimes, png, sampling
from vlora.atmm.search.timing import Timing
from vlora.gateway.backend import Backend, Question
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
TEXT, NO_TEXT, END, SEPARATOR = b'"content": "', b'"content": ""', b"data: [DONE]", b"\r\n"


class BenchmarkError(Exception):
    """Raised when a request of the benchmark fails."""


@dataclass(kw_only=True)
class Gateway(Benchmark):
    """Token latency and time to first token through the gateway, compared with gRPC.

    A cell is a model of `Serving`, a measurement ("latency", "idle" or "cut"), the kind of the
    requests and their number.
    """

    name = "gateway"
    bars: ClassVar[Mapping[str, Bar]] = {
        "token_latency_ratio_mid-size": at_most(1.03),
        "token_latency_ratio_demo": at_most(1.03),
        "first_token_added_ms_mid-size": at_most(5),
        "first_token_added_ms_demo": at_most(5),
        "first_token_added_ms_instant": at_most(5),
        "idle_share_held": at_least(1),
        "left_running": at_most(0),
    }

    root: frame.Root = None

    def prepare(self) -> None:
        super().prepare()
        self._runner = asyncio.Runner()
        self._stack = ExitStack()
        self._started: tuple[Serving, Clients] | None = None
        self._seed = 0

    def cells(self) -> Sequence[tuple[str, str, str, int]]:
        cells: list[tuple[str, str, str, int]] = []
        for model in self.values["models"]:
            for kind in self.values["kinds"]:
                numbers = [1] if model == "instant" else self.values["concurrency"]
                cells += [(model, "latency", kind, n) for n in numbers]
            if model == "demo":
                cells.append((model, "idle", "text", self.values["idle_connections"]))
                cells.append((model, "cut", "text", self.values["cut_streams"]))
        return cells

    def measure(self, cell: tuple[str, str, str, int]) -> Iterator[Row]:
        model, measurement, kind, number = cell
        self.status(f"{model}, {measurement}, {kind}, {number} at once")
        serving, clients = self._start(model)
        row: Row = {"model": model, "measurement": measurement, "kind": kind, "number": number}
        if measurement == "latency":
            yield row | self._latency(serving, clients, kind, number)
        elif measurement == "idle":
            yield row | self._runner.run(idle(serving, number, self.values["idle_seconds"]))
        else:
            asks = serving.draw("text", self.values["adapters"], number, 1 << 20)
            yield row | self._runner.run(cut(serving, asks))

    def _start(self, name: str) -> tuple[Serving, Clients]:
        """Return the server of the model `name` and its clients. The first call starts them."""
        if self._started is None or self._started[0].name != name:
            self._stack.close()
            serving = self._stack.enter_context(Serving(name, self.root))

            async def connect() -> Clients:  # A gRPC channel belongs to one event loop.
                return Clients(serving.server.grpc_url, serving.port)

            clients = self._runner.run(connect())
            self._stack.callback(lambda: self._runner.run(clients.close()))
            self._started = serving, clients
        return self._started

    def _latency(self, serving: Serving, clients: Clients, kind: str, number: int) -> Row:
        """Alternate rounds over gRPC and the gateway. The first round of each is not counted.

        Over gRPC each token is a message. The gateway is measured twice: with the default, which
        joins the tokens of an interval, and (`each_token`) with each token in its own chunk.
        """
        ways: dict[str, Callable[[Sequence[Ask]], Coroutine[Any, Any, LoadTimes]]] = {
            "grpc": clients.over_grpc,
            "gateway": clients.over_gateway,
            "each_token": partial(clients.over_gateway, each_token=True),
        }
        token: dict[str, list[float]] = {way: [] for way in ways}
        first: dict[str, list[float]] = {way: [] for way in ways}
        gateway_seconds, tokens = 0.0, 0
        for turn in range(self.values["rounds"][str(number)] + 1):
            for way in (*ways,) if turn % 2 else (*reversed(ways),):
                self._seed += 1
                asks = serving.draw(kind, self.values["adapters"], number, self._seed)
                before = serving.gateway_seconds()
                times = self._runner.run(ways[way](asks))
                if not turn:
                    continue
                token[way].append(times.token_latency)
                first[way].append(statistics.fmean(times.first))
                if way == "gateway":
                    gateway_seconds += serving.gateway_seconds() - before
                    tokens += sum(ask.max_tokens for ask in asks)
        token_ms, first_ms = (
            {way: statistics.median(seconds) * 1e3 for way, seconds in of.items()}
            for of in (token, first)
        )
        return {
            **{f"token_ms_{way}": round(token_ms[way], 3) for way in ways},
            **{f"first_ms_{way}": round(first_ms[way], 2) for way in ways},
            "token_ratio": round(token_ms["gateway"] / token_ms["grpc"], 4),
            "token_ratio_each_token": round(token_ms["each_token"] / token_ms["grpc"], 4),
            "first_added_ms": round(first_ms["gateway"] - first_ms["grpc"], 2),
            "gateway_cpu_us_per_token": round(gateway_seconds / tokens * 1e6, 1),
            "spread_grpc": round(Timing(tuple(token["grpc"])).noise, 3),
            "spread_gateway": round(Timing(tuple(token["gateway"])).noise, 3),
        }

    def summarize(self) -> dict[str, Any]:
        """Return each model's latency figures, and the figures of connections.

        Ratios of token latencies are those at the highest concurrency. The times that the gateway
        adds to the first token are those of a single request. Each is the largest one of all kinds
        of requests.
        """

        def worst(model: str, key: str, number: int) -> float | None:
            at = ("latency", model, number)
            rows = [r for r in self.rows if (r["measurement"], r["model"], r["number"]) == at]
            return max((row[key] for row in rows), default=None)

        def first_of(measurement: str) -> Row:
            return next((row for row in self.rows if row["measurement"] == measurement), {})

        highest, idle_row = max(self.values["concurrency"]), first_of("idle")
        summary: dict[str, Any] = {}
        for model in ("mid-size", "demo"):
            summary[f"token_latency_ratio_{model}"] = worst(model, "token_ratio", highest)
        for model in ("mid-size", "demo", "instant"):
            summary[f"first_token_added_ms_{model}"] = worst(model, "first_added_ms", 1)
        summary["idle_share_held"] = idle_row["held"] / idle_row["number"] if idle_row else None
        summary["left_running"] = first_of("cut").get("left_running")
        return summary

    def tables(self) -> Iterable[RenderableType]:
        columns = {
            "model": "model",
            "kind": "kind",
            "at once": "number",
            "token, ms: gRPC": "token_ms_grpc",
            "gateway": "token_ms_gateway",
            "ratio": "token_ratio",
            "each token": "token_ratio_each_token",
            "first token, ms: gRPC": "first_ms_grpc",
            "first through gateway": "first_ms_gateway",
            "added": "first_added_ms",
            "CPU µs/token": "gateway_cpu_us_per_token",
        }
        latency = [row for row in self.rows if row["measurement"] == "latency"]
        yield frame.table("average token latency and time to first token", latency, columns, 2)
        known = ("model", "measurement", "kind", "number")
        other = [
            row | {"result": ", ".join(f"{key} {row[key]:g}" for key in row if key not in known)}
            for row in self.rows
            if row["measurement"] != "latency"
        ]
        columns = {name: name for name in ("measurement", "number", "result")}
        yield frame.table("connections and cuts", other, columns)

    def close(self) -> None:
        self._stack.close()
        self._runner.close()


async def idle(serving: Serving, number: int, seconds: float) -> Row:
    """Open connections, leave them idle, then check each with a request.

    Return how many still work, the gateway's memory per connection, and its share of a core while
    they were idle.
    """
    before = serving.gateway.memory_info().rss
    connections = await _open(serving, number)
    try:
        await _in_groups([connection.get("/health") for connection in connections])
        grown = serving.gateway.memory_info().rss - before
        busy = serving.gateway_seconds()
        await asyncio.sleep(seconds)
        busy = serving.gateway_seconds() - busy
        answers = await _in_groups([connection.get("/health") for connection in connections])
    finally:
        for connection in connections:
            connection.close()
    return {
        "held": sum(isinstance(answer, bytes) and b"ok" in answer for answer in answers),
        "seconds": seconds,
        "memory_kib_each": round(grown / number / 1024, 1),
        "cpu_share": round(busy / seconds, 4),
    }


async def cut(serving: Serving, asks: Sequence[Ask]) -> Row:
    """Start streams, close all their connections, and wait until no request runs."""
    connections = await _open(serving, len(asks))
    for ask, connection in zip(asks, connections, strict=True):
        await connection.send(replace(ask, max_tokens=CUT_TOKENS).http(serving.port))
    counters = ("aborted", "finished")
    before = {name: serving.metric(f"vlora:requests_{name}_total") for name in counters}
    await _first_answer(connections)
    at_cut = _running(serving)
    for connection in connections:
        connection.close()
    started = time.perf_counter()
    while (left := _running(serving)) and time.perf_counter() - started < SETTLE_SECONDS:
        await asyncio.sleep(POLL_SECONDS)
    seconds = round(time.perf_counter() - started, 2)
    row = {"running_at_cut": at_cut, "left_running": left, "seconds_until_none": seconds}
    after = {name: serving.metric(f"vlora:requests_{name}_total") for name in counters}
    return row | {name: after[name] - before[name] for name in counters}


async def _open(serving: Serving, number: int) -> list[Connection]:
    connections = [Connection(serving.port) for _ in range(number)]
    await _in_groups([connection.open() for connection in connections])
    return connections


async def _in_groups(work: Sequence[Any]) -> list[Any]:
    """Await all items, CONNECT_AT_ONCE at a time. Return the result or the error of each."""
    done: list[Any] = []
    for start in range(0, len(work), CONNECT_AT_ONCE):
        group = work[start : start + CONNECT_AT_ONCE]
        done += await asyncio.gather(*group, return_exceptions=True)
    return done


async def _first_answer(connections: Sequence[Connection]) -> None:
    """Wait until one of the streams has its first token."""
    heads = [asyncio.ensure_future(connection.head()) for connection in connections]
    try:
        await next(asyncio.as_completed(heads))
    finally:
        for head in heads:
            head.cancel()
        await asyncio.gather(*heads, return_exceptions=True)


def _running(serving: Serving) -> float:
    """Return the number of requests in the gateway and in the server."""
    names = ("vlora_gateway_requests_running", "vllm:num_requests_running")
    running = sum(map(serving.metric, (*names, "vllm:num_requests_waiting")))
    return running - 1  # The request for the metrics counts itself.


class Serving:
    """A running server of one model and its gateway. Use as a context manager.

    name: `demo`, `mid-size`, or `instant` for a server that answers at once, without a model.
    """

    def __init__(self, name: str, root: Path | None) -> None:
        self.name = name
        self._checkpoint: llava.Checkpoint | None = None
        self.server: TritonServer | InstantServer
        if name == "instant":
            self.server = InstantServer()
        elif name == "demo":
            self.server = TritonServer(ServerOptions())
        else:
            self._checkpoint = llava.make(llava.MODELS["whole"], root)
            model, adapters = self._checkpoint.folder, self._checkpoint.adapters
            self.server = TritonServer(ServerOptions(model=model, adapters=adapters))
        self.port = choose_ports({"port": 0}, LOOPBACK)["port"]
        self.gateway: psutil.Process
        self._stack = ExitStack()

    def __enter__(self) -> Serving:
        with ExitStack() as stack:
            stack.enter_context(self.server)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            log = stack.enter_context((Path(folder) / "gateway.log").open("wb"))
            command = [sys.executable, "-m", "vlora.cli", "gateway", "--port", str(self.port)]
            command += ["--grpc", self.server.grpc_url]
            if self.server.metrics_url is not None:
                command += ["--metrics-url", self.server.metrics_url]
            process = start_tied(command, os.environ, log)
            stack.callback(process.wait, STOP_SECONDS)
            stack.callback(process.terminate)
            self._wait()
            self.gateway = psutil.Process(process.pid)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def draw(self, kind: str, adapters: int, requests: int, seed: int) -> list[Ask]:
        """Return requests that rotate over the adapters; each seed has its own texts or images."""
        if self._checkpoint is not None:
            load = Load(kind, adapters, requests).draw(self._checkpoint, seed)
            return [Ask(one.prompt, one.file(), one.adapter, "raw", OUTPUT) for one in load]
        known = sorted(path.name for path in (DEMO / "adapters").iterdir() if path.is_dir())
        names = [None] if self.name == "instant" or not adapters else known[:adapters]
        rng = np.random.default_rng(seed)
        asks = []
        for i in range(requests):
            text = f"How many objects are there in picture {rng.integers(1 << 30)}?"
            pixels = rng.integers(0, 256, (DEMO_SIDE, DEMO_SIDE, 3), np.uint8)
            image = png(pixels) if kind == "image" else None
            asks.append(Ask(text, image, names[i % len(names)], "vqa", OUTPUT))
        return asks

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples in the gateway's /metrics."""
        page = get(f"http://{LOOPBACK}:{self.port}/metrics", 10.0, True).decode()
        lines = [line.split() for line in page.splitlines()]
        return sum(float(line[-1]) for line in lines if line and line[0].partition("{")[0] == name)

    def gateway_seconds(self) -> float:
        """Return the CPU time in seconds that the gateway's process has taken so far."""
        times = self.gateway.cpu_times()
        return float(times.user + times.system)

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


@dataclass(frozen=True)
class Ask:
    """One request, with an encoded image and the name of an adapter, or None."""

    text: str
    image: bytes | None
    adapter: str | None
    task: str
    max_tokens: int

    def question(self, id: str) -> Question:
        """Return the request as the gateway sends it over gRPC."""
        images = () if self.image is None else (self.image,)
        keys = sampling(self.adapter, self.max_tokens)
        return Question(id, self.text, self.task, images, (), keys, stream=True)

    def http(self, port: int, each_token: bool = False) -> bytes:
        """Return the request as the bytes of an HTTP request.

        each_token: whether each token is sent in a chunk of its own.
        """
        content: list[dict[str, Any]] = [{"type": "text", "text": self.text}]
        if self.image is not None:
            url = f"data:image/png;base64,{base64.b64encode(self.image).decode()}"
            content.insert(0, {"type": "image_url", "image_url": {"url": url}})
        values = {
            "model": self.adapter or "base",
            "messages": [{"role": "user", "content": content}],
            "task": self.task,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        body = json.dumps(values | ({"stream_interval_ms": 0} if each_token else {})).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {LOOPBACK}:{port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Connection:
    """One HTTP connection to the gateway, which is kept open between requests."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Open the connection to the gateway."""
        self._reader, self._writer = await asyncio.open_connection(LOOPBACK, self._port)

    def close(self) -> None:
        """Close the connection immediately, even in the middle of an answer."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def send(self, request: bytes) -> None:
        """Send a request."""
        assert self._writer is not None
        self._writer.write(request)
        await self._writer.drain()

    async def head(self) -> bytes:
        """Return the head of the answer, which arrives with the first token.

        Raise BenchmarkError if the request failed.
        """
        head = await self._reader.readuntil(2 * SEPARATOR)
        if not head.startswith(b"HTTP/1.1 200"):
            raise BenchmarkError(f"the gateway answered {head!r}")
        return head

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the parts of the answer's body as they arrive."""
        lines = (await self.head()).lower().split(SEPARATOR)
        lengths = [line.partition(b":")[2] for line in lines if line.startswith(b"content-length")]
        if lengths:
            yield await self._reader.readexactly(int(lengths[0]))
            return
        while size := int(await self._reader.readuntil(SEPARATOR), 16):
            part = await self._reader.readexactly(size + len(SEPARATOR))
            yield part[: -len(SEPARATOR)]
        await self._reader.readuntil(SEPARATOR)

    async def get(self, path: str) -> bytes:
        """Send a GET request and return the body of its answer."""
        await self.send(f"GET {path} HTTP/1.1\r\nHost: {LOOPBACK}:{self._port}\r\n\r\n".encode())
        return b"".join([part async for part in self.body()])

    async def chat(self, request: bytes) -> tuple[float, float]:
        """Send a request and return the times of its first token and of its end."""
        await self.send(request)
        first, ended = 0.0, False
        async for part in self.body():
            if not first and part.count(TEXT) > part.count(NO_TEXT):
                first = time.perf_counter()
            ended = ended or END in part
        if not ended:
            raise BenchmarkError("the stream ended before its answer")
        end = time.perf_counter()
        return first or end, end


class Clients:
    """Clients that send requests through the gateway or over gRPC, on one event loop."""

    def __init__(self, grpc: str, port: int) -> None:
        self._port = port
        self._backend = Backend(grpc, answer_seconds=600.0)
        self._connections: list[Connection] = []
        self._asked = 0

    async def close(self) -> None:
        for connection in self._connections:
            connection.close()
        await self._backend.close()

    async def over_grpc(self, asks: Sequence[Ask]) -> LoadTimes:
        """Send all requests at once, each on its own stream, and return their times."""
        started = time.perf_counter()
        return _times(started, await asyncio.gather(*map(self._question, asks)))

    async def over_gateway(self, asks: Sequence[Ask], each_token: bool = False) -> LoadTimes:
        """Send all requests at once, each on its own connection, and return their times."""
        while len(self._connections) < len(asks):
            self._connections.append(Connection(self._port))
            await self._connections[-1].open()
        pairs = [
            (connection, ask.http(self._port, each_token))
            for connection, ask in zip(self._connections, asks, strict=False)
        ]
        started = time.perf_counter()
        return _times(started, await asyncio.gather(*(c.chat(body) for c, body in pairs)))

    async def _question(self, ask: Ask) -> tuple[float, float]:
        self._asked += 1
        first, tokens = 0.0, 0
        async for piece in self._backend.ask(ask.question(f"benchmark-{self._asked:016}")):
            if piece.text:
                first = first or time.perf_counter()
            tokens += piece.num_output_tokens
        if tokens != ask.max_tokens:
            raise BenchmarkError(f"the answer has {tokens} tokens instead of {ask.max_tokens}")
        end = time.perf_counter()
        return first or end, end


def _times(started: float, moments: Sequence[tuple[float, float]]) -> LoadTimes:
    firsts, ends = zip(*moments, strict=True)
    return LoadTimes([one - started for one in firsts], [one - started for one in ends])
