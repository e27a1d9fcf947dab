"""The gateway benchmark: latency that the gateway adds, and how many connections it holds.

Rounds over gRPC to the server and rounds through the gateway alternate within one run, so that
other load on the machine affects both alike. Client, gateway and server share the machine, as with
`vlora serve`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import RenderableType

from benchmarks.benchmark import (
    GRIDS,
    Bar,
    Benchmark,
    GridOption,
    QuickOption,
    RootOption,
    Row,
    at_least,
    at_most,
    load_grid_values,
)

if TYPE_CHECKING:
    from benchmarks.engine.load import LoadTimes
    from benchmarks.gateway.clients import Ask, Clients, Connection
    from benchmarks.gateway.serving import Serving

Cell = tuple[str, str, str, int]
"""(Name of a model of `serving`; measurement: "latency", "idle" or "cut"; kind of the requests;
number of requests).
"""

CUT_TOKENS = 400
"""Number of tokens of an answer whose connection is closed early."""
SETTLE_SECONDS = 60.0
"""Maximum wait until no request runs."""
POLL_SECONDS = 0.05
CONNECT_AT_ONCE = 50
"""Maximum number of connections that are opened, or used, at the same time."""


class GatewayBenchmark(Benchmark[Cell]):
    """Token latency and time to first token through the gateway, compared with gRPC."""

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

    def __init__(
        self, *, quick: QuickOption = False, grid: GridOption = None, root: RootOption = None
    ) -> None:
        super().__init__(quick=quick, grid=grid or GRIDS / "gateway.json")
        self._grid = load_grid_values(self.grid_path, quick=quick)
        self._root = root
        self._runner = asyncio.Runner()
        self._stack = ExitStack()
        self._serving: Serving | None = None
        self._clients: Clients | None = None
        self._seed = 0

    def cells(self) -> Sequence[Cell]:
        cells: list[Cell] = []
        for model in self._grid["models"]:
            for kind in self._grid["kinds"]:
                numbers = [1] if model == "instant" else self._grid["concurrency"]
                cells += [(model, "latency", kind, n) for n in numbers]
            if model == "demo":
                cells.append((model, "idle", "text", self._grid["idle_connections"]))
                cells.append((model, "cut", "text", self._grid["cut_streams"]))
        return cells

    def run(self, cell: Cell) -> Iterator[Row]:
        model, measurement, kind, number = cell
        self.status(f"{model}, {measurement}, {kind}, {number} at once")
        serving, clients = self._start(model)
        row: Row = {"model": model, "measurement": measurement, "kind": kind, "number": number}
        if measurement == "latency":
            yield row | self._latency(serving, clients, kind, number)
        elif measurement == "idle":
            yield row | self._runner.run(self._idle(serving, number))
        else:
            yield row | self._runner.run(self._cut(serving, number))

    def _start(self, name: str) -> tuple[Serving, Clients]:
        """Return the server of the model `name` and its clients. The first call starts them."""
        from benchmarks.gateway.serving import Model, Serving

        if self._serving is None or self._serving.model.name != name:
            self._stack.close()
            self._serving = self._stack.enter_context(Serving(Model(name, self._root)))
            self._clients = self._runner.run(_clients(self._serving))
            self._stack.callback(self._close, self._clients)
        assert self._clients is not None
        return self._serving, self._clients

    def _close(self, clients: Clients) -> None:
        self._runner.run(clients.close())

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
        for turn in range(self._grid["rounds"][str(number)] + 1):
            for way in (*ways,) if turn % 2 else (*reversed(ways),):
                self._seed += 1
                asks = serving.model.draw(kind, self._grid["adapters"], number, self._seed)
                before = serving.gateway_seconds()
                times = self._runner.run(ways[way](asks))
                if not turn:
                    continue
                token[way].append(times.token_latency)
                first[way].append(statistics.fmean(times.first))
                if way == "gateway":
                    gateway_seconds += serving.gateway_seconds() - before
                    tokens += sum(ask.max_tokens for ask in asks)
        pairs = zip(token["gateway"], token["grpc"], strict=True)
        return {
            **{f"token_ms_{way}": round(_median_ms(token[way]), 3) for way in ways},
            **{f"first_ms_{way}": round(_median_ms(first[way]), 2) for way in ways},
            "token_ratio": round(_median_ms(token["gateway"]) / _median_ms(token["grpc"]), 4),
            "token_ratio_of_pairs": round(statistics.median(a / b for a, b in pairs), 4),
            "token_ratio_each_token": round(
                _median_ms(token["each_token"]) / _median_ms(token["grpc"]), 4
            ),
            "first_added_ms": round(_median_ms(first["gateway"]) - _median_ms(first["grpc"]), 2),
            "gateway_cpu_us_per_token": round(gateway_seconds / tokens * 1e6, 1),
            "spread_grpc": round(_spread(token["grpc"]), 3),
            "spread_gateway": round(_spread(token["gateway"]), 3),
        }

    async def _idle(self, serving: Serving, number: int) -> Row:
        """Open connections, leave them idle, then check each with a request.

        Return how many still work, the gateway's memory per connection, and its share of a core
        while they were idle.
        """
        before = serving.gateway.memory_info().rss
        connections = await self._open(serving, number)
        try:
            await _in_groups([connection.get("/health") for connection in connections])
            grown = serving.gateway.memory_info().rss - before
            busy = serving.gateway_seconds()
            await asyncio.sleep(self._grid["idle_seconds"])
            busy = serving.gateway_seconds() - busy
            answers = await _in_groups([connection.get("/health") for connection in connections])
            held = sum(isinstance(answer, bytes) and b"ok" in answer for answer in answers)
        finally:
            for connection in connections:
                connection.close()
        return {
            "held": held,
            "seconds": self._grid["idle_seconds"],
            "memory_kib_each": round(grown / number / 1024, 1),
            "cpu_share": round(busy / self._grid["idle_seconds"], 4),
        }

    async def _cut(self, serving: Serving, number: int) -> Row:
        """Start streams, close all their connections, and wait until no request runs."""
        connections = await self._open(serving, number)
        asks = serving.model.draw("text", self._grid["adapters"], number, 1 << 20)
        host = f"{connections[0].host}:{serving.port}"
        for ask, connection in zip(asks, connections, strict=True):
            long = type(ask)(ask.text, None, ask.adapter, ask.task, CUT_TOKENS)
            await connection.send(long.http(host))
        aborted = serving.metric("vlora:requests_aborted_total")
        finished = serving.metric("vlora:requests_finished_total")
        await _first_answer(connections)
        at_cut = _running(serving)
        for connection in connections:
            connection.close()
        cut = time.perf_counter()
        while (left := _running(serving)) and time.perf_counter() - cut < SETTLE_SECONDS:
            await asyncio.sleep(POLL_SECONDS)
        return {
            "running_at_cut": at_cut,
            "left_running": left,
            "seconds_until_none": round(time.perf_counter() - cut, 2),
            "aborted": serving.metric("vlora:requests_aborted_total") - aborted,
            "finished": serving.metric("vlora:requests_finished_total") - finished,
        }

    async def _open(self, serving: Serving, number: int) -> list[Connection]:
        from benchmarks.gateway.clients import Connection
        from vlora.net import LOOPBACK

        connections = [Connection(LOOPBACK, serving.port) for _ in range(number)]
        await _in_groups([connection.open() for connection in connections])
        return connections

    def summarize(self) -> dict[str, Any]:
        """Return each model's latency figures, and the figures of connections.

        Ratios of token latencies are those at the highest concurrency. The times that the gateway
        adds to the first token are those of a single request. Each is the largest one of all kinds
        of requests.
        """
        highest = max(self._grid["concurrency"])

        def worst(model: str, key: str, number: int) -> float | None:
            return max(
                (
                    row[key]
                    for row in self.rows
                    if row["measurement"] == "latency"
                    and (row["model"], row["number"]) == (model, number)
                ),
                default=None,
            )

        def first_of(measurement: str) -> Row:
            return next((row for row in self.rows if row["measurement"] == measurement), {})

        summary: dict[str, Any] = {}
        for model in ("mid-size", "demo"):
            summary[f"token_latency_ratio_{model}"] = worst(model, "token_ratio", highest)
        for model in ("mid-size", "demo", "instant"):
            summary[f"first_token_added_ms_{model}"] = worst(model, "first_added_ms", 1)
        idle = first_of("idle")
        summary["idle_share_held"] = idle["held"] / idle["number"] if idle else None
        summary["left_running"] = first_of("cut").get("left_running")
        return summary

    def tables(self) -> Iterable[RenderableType]:
        from benchmarks.report import figure_table

        keys = {
            "token_ms_grpc": "token, ms: gRPC",
            "token_ms_gateway": "gateway",
            "token_ratio": "ratio",
            "token_ratio_of_pairs": "of pairs",
            "token_ratio_each_token": "each token",
            "first_ms_grpc": "first token, ms: gRPC",
            "first_ms_gateway": "gateway",
            "first_added_ms": "added",
            "gateway_cpu_us_per_token": "CPU µs/token",
        }
        columns = ("model", "kind", "at once", *keys.values())
        latency = figure_table(columns, "average token latency and time to first token", 2)
        for row in self.rows:
            if row["measurement"] == "latency":
                figures = (f"{row[key]:.4g}" for key in keys)
                latency.add_row(row["model"], row["kind"], str(row["number"]), *figures)
        other = figure_table(("measurement", "number", "result"), "connections and cuts")
        for row in self.rows:
            if row["measurement"] != "latency":
                known = ("model", "measurement", "kind", "number")
                result = ", ".join(f"{key} {row[key]:g}" for key in row if key not in known)
                other.add_row(row["measurement"], str(row["number"]), result)
        return [latency, other]

    def close(self) -> None:
        self._stack.close()
        self._runner.close()


async def _clients(serving: Serving) -> Clients:
    """Return new clients for the running event loop, since a gRPC channel belongs to one loop."""
    from benchmarks.gateway.clients import Clients
    from vlora.net import LOOPBACK

    return Clients(serving.server.grpc_url, LOOPBACK, serving.port)


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
    metrics_request = 1  # The request for the metrics counts itself.
    return (
        serving.metric("vlora_gateway_requests_running")
        - metrics_request
        + serving.metric("vllm:num_requests_running")
        + serving.metric("vllm:num_requests_waiting")
    )


def _median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def _spread(values: Sequence[float]) -> float:
    """Return the interquartile range divided by the median."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle
