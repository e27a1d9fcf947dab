"""The scale benchmark: Envoy's cost, replicas, many adapters on several servers, a rolling restart.

The servers are real, except for `envoy`, where one answers at once. Envoy is that of the extra
`scale`, with the chart's configuration.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

import typer

from benchmarks import llava
from benchmarks.frame import DEMO, Benchmark, Row, matching
from benchmarks.loads import BenchmarkError
from vlora.atmm.search.timing import rotated
from vlora.errors import ServerError
from vlora.interpreters import python_command
from vlora.launcher import envoy
from vlora.launcher.processes import start_tied
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer
from vlora.load.contents import Content, ContentMaker, TokenCount
from vlora.load.figures import summarize
from vlora.load.run import Asking, Measurement, Record, send
from vlora.load.targets import Answer, Question, TritonTarget
from vlora.load.trace import Traffic
from vlora.net import LOOPBACK, choose_ports, get

SEED = 0
START_SECONDS, RESTART_SECONDS = 300.0, 600.0
RESTARTED = "all replicas have been restarted"
METRICS_SECONDS = 1.5  # Servers write their metrics once a second.

# How Envoy chooses a server, as changes to the clusters of the chart, whose choice is the first.
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "bounded": {},
    "ring_hash": {"common_lb_config": {}},
    "least_request": {"lb_policy": "LEAST_REQUEST", "ring_hash_lb_config": None},
    "round_robin": {"lb_policy": "ROUND_ROBIN", "ring_hash_lb_config": None},
}


@dataclass(kw_only=True)
class Scale(Benchmark):
    """Several servers behind Envoy. A cell is a part of the benchmark.

    envoy: what Envoy adds to a call, in turn with the server's own port.
    bare: throughput of two servers of one core each behind Envoy, at their own ports, and of one
        of them with half as many clients (Table 3). The clients take part of the cores.
    adapters: three servers that hold 8 of 64 adapters each, by how Envoy chooses one.
    restart: unary calls and streams while two replicas restart in turn.
    """

    name = "scale"
    bars: ClassVar = {
        "envoy_over_bare": "≥ 0.95",
        "load_over_service": "≥ 3",
        "p95_over_least_request": "≤ 1",
        "p95_over_least_request_hot": "≤ 0.6",
        "restart_failed": "≤ 0",
    }
    shown: ClassVar = {
        "Envoy's cost of a call": "kind direct_ms envoy_ms added_ms",
        "two servers of one core": (
            "adapters one_per_s direct_per_s envoy_per_s envoy_over_bare two_over_one"
        ),
        "many adapters": (
            "hot rate_per_s service_ms load_ms resident answered hit_rate p50_ms p95_ms policy"
        ),
        "rolling restart": "requests restart_s longest_gap_s errors failed",
    }

    parts: Annotated[
        str, typer.Option(metavar="NAMES", help="Comma-separated parts of the benchmark.")
    ] = "envoy,bare,adapters,restart"

    def cells(self) -> Sequence[str]:
        if unknown := set(self.parts.split(",")) - self.values.keys():
            raise typer.BadParameter(
                f"--parts has {min(unknown)}; valid are {', '.join(self.values)}"
            )
        return self.parts.split(",")

    def measure(self, cell: str) -> Iterator[Row]:
        self.status(cell)
        grid = self.values[cell]
        yield from getattr(self, f"_{cell}")(grid | (grid["quick"] if self.quick else {}))

    def _envoy(self, grid: Mapping[str, Any]) -> Iterator[Row]:
        pictures = (os.urandom(grid["picture_bytes"]),)
        port = choose_ports({"port": 0}, LOOPBACK)["port"]
        with (
            program(sys.executable, "-m", "benchmarks.instant_server", str(port)),
            behind_envoy([(port, port)]) as address,
        ):
            for kind in ("unary", "picture", "stream"):
                content = Content("hello", pictures if kind == "picture" else ())
                targets = [target(one, kind != "stream") for one in (f"{LOOPBACK}:{port}", address)]
                spent = asyncio.run(in_turn(targets, Question(content, None), grid["calls"]))
                direct, behind = (1e3 * median(one) for one in spent)
                added = behind - direct
                yield {"kind": kind, "direct_ms": direct, "envoy_ms": behind, "added_ms": added}

    def _bare(self, grid: Mapping[str, Any]) -> Iterator[Row]:
        cores = sorted(os.sched_getaffinity(0))
        names = sorted(path.name for path in (DEMO / "adapters").iterdir() if path.is_dir())
        with (
            fleet(ServerOptions(), [cores[:1], cores[1:2]]) as pair,
            behind_envoy(
                [(one.options.http_port, one.options.grpc_port) for one in pair]
            ) as address,
        ):
            both = [one.grpc_url for one in pair]
            ways = {"one": both[:1], "direct": both, "envoy": [address]}
            for adapters in ([], names):
                rates: dict[str, list[float]] = {way: [] for way in ways}
                traffic = Traffic(rate=1e6, seconds=grid["requests"] / 1e6, adapters=len(adapters))
                traffic = replace(traffic, lengths=tuple(grid["tokens"]))
                for turn in range(grid["rounds"] + 1):
                    for way in rotated([*ways], turn):
                        clients = grid["clients"] * (1 if way == "one" else len(pair))
                        several = Several([target(one) for one in ways[way]], clients)
                        found = summarize(run(several, traffic, adapters, turn))
                        if found["errors"]:
                            raise BenchmarkError(f"requests failed: {found['errors']}")
                        if turn:  # The first round warms up.
                            rates[way].append(found["requests_per_s"])
                one, direct, behind = (median(rates[way]) for way in ways)
                yield {
                    "adapters": len(adapters),
                    "one_per_s": one,
                    "direct_per_s": direct,
                    "envoy_per_s": behind,
                    "envoy_over_bare": behind / direct,
                    "two_over_one": behind / one,
                }

    def _adapters(self, grid: Mapping[str, Any]) -> Iterator[Row]:
        sizes = llava.Sizes(**grid["sizes"] | {"ranks": tuple(grid["sizes"]["ranks"])})
        made, cores = llava.make(sizes, self.root), sorted(os.sched_getaffinity(0))
        names, tokens = made.adapter_names, grid["tokens"]
        # Files have two bytes a weight, and the pool four.
        size = 2 * (made.adapters / names[0] / "adapter_model.safetensors").stat().st_size
        keys = {"adapter_host_bytes": 0, "adapter_pool_bytes": grid["room"] * size}
        keys |= {"kv_cache_tokens": grid["kv_cache_tokens"], "engine_threads": 1, "merging": "off"}
        options = ServerOptions(model=made.folder, adapters=made.adapters, model_json=keys)
        with fleet(options, [cores] * grid["servers"]) as several:
            service, load = asyncio.run(probe(target(several[0].grpc_url), names, tokens))
            rate = grid["utilization"] * len(cores) / service
            shared = {"service_ms": 1e3 * service, "load_ms": 1e3 * load, "rate_per_s": rate}
            shared["load_over_service"] = load / service
            for hot in grid["hot"]:
                traffic = Traffic(rate=rate, seconds=grid["seconds"], lengths=tuple(tokens))
                traffic = replace(traffic, adapters=len(names), hot=hot, zipf=grid["zipf"])
                for row in self._policies(several, traffic, names, grid["rounds"]):
                    yield {**shared, "hot": hot or 0.0, **row}

    def _policies(
        self, servers: Sequence[TritonServer], traffic: Traffic, names: Sequence[str], rounds: int
    ) -> Iterator[Row]:
        """Send the same loads by each policy, in turn."""
        runs: dict[str, list[tuple[list[Record], list[float]]]] = {name: [] for name in POLICIES}
        ports = [(one.options.http_port, one.options.grpc_port) for one in servers]
        with ExitStack() as stack:
            ways = {name: stack.enter_context(behind_envoy(ports, name)) for name in POLICIES}
            for turn in range(rounds):
                for name in rotated([*ways], turn):
                    self.status(f"adapters, {name}, hot {traffic.hot}, round {turn + 1}")
                    # The first quarter brings the adapters to where this policy wants them.
                    first = replace(traffic, seconds=traffic.seconds / 4)
                    run(target(ways[name]), first, names, turn + 1000)
                    before = tiers(servers)
                    records = run(target(ways[name]), traffic, names, turn)
                    counts = [now - was for now, was in zip(tiers(servers), before, strict=True)]
                    runs[name].append((records, counts))
        for name, own in runs.items():
            found = summarize([one for records, _ in own for one in records])
            hits, *others = map(sum, zip(*(counts for _, counts in own), strict=True))
            yield {
                "policy": name,
                "resident": metric(servers, "adapters_resident") / len(servers),
                "answered": found["answered"],
                "errors": found["errors"],
                "hit_rate": hits / (hits + sum(others)),
                "p50_ms": 1e3 * found["end_to_end_s"]["p50"],
                "p95_ms": 1e3 * found["end_to_end_s"]["p95"],
            }

    def _restart(self, grid: Mapping[str, Any]) -> Iterator[Row]:
        names = sorted(path.name for path in (DEMO / "adapters").iterdir() if path.is_dir())
        ports = choose_ports(dict.fromkeys(("http", "grpc", "metrics"), 0), LOOPBACK)
        command = python_command("vlora.cli", "serve", "--replicas", "2")
        command += [word for name in ports for word in (f"--{name}-port", str(ports[name]))]
        seconds = grid["requests"] / grid["rate"]
        traffic = Traffic("poisson", grid["rate"], seconds, tuple(grid["tokens"]))
        traffic = replace(traffic, adapters=len(names), zipf=1.0, base_share=0.2)
        address = f"{LOOPBACK}:{ports['grpc']}"
        with program(*command) as (process, log), ThreadPoolExecutor(1) as pool:
            wait(lambda: "Press Ctrl-C" in log.read_text(), START_SECONDS, "the replicas start")

            def restart() -> float:
                time.sleep(seconds / 10)
                process.send_signal(signal.SIGUSR1)
                begun = time.monotonic()
                wait(lambda: RESTARTED in log.read_text(), RESTART_SECONDS, "they restart")
                return time.monotonic() - begun

            restarted = pool.submit(restart)
            unary, streams = (target(address, one) for one in (True, False))
            records: list[Record] = []
            gap, seed = 0.0, SEED
            while not records or not restarted.done():
                own = run(Several([unary, streams]), traffic, names, seed)
                ends = sorted(one.at + (one.end or 0.0) for one in own if one.error == "")
                gap = max(gap, *(two - one for one, two in pairwise(ends)))
                records, seed = records + own, seed + 1
        found = summarize(records)
        yield {
            "requests": found["sent"],
            "restart_s": restarted.result(),
            "longest_gap_s": gap,
            "errors": json.dumps(found["errors"]),
            "failed": found["sent"] - found["answered"],
        }

    def summarize(self) -> dict[str, Any]:
        """Return the figures with a bar, and what Envoy adds to each kind of call.

        The p95 of the chart's choice is divided by that of least request, without and with a hot
        adapter.
        """
        summary: dict[str, Any] = {
            f"envoy_added_ms_{row['kind']}": row["added_ms"] for row in self.rows if "kind" in row
        }
        for key in ("envoy_over_bare", "two_over_one", "load_over_service"):
            summary[key] = min((row[key] for row in self.rows if key in row), default=None)
        for hot in {row["hot"] for row in self.rows if "hot" in row}:
            p95 = {row["policy"]: row["p95_ms"] for row in matching(self.rows, hot=hot)}
            name = "p95_over_least_request" + ("_hot" if hot else "")
            summary[name] = p95["bounded"] / p95["least_request"]
        for row in self.rows:
            if "failed" in row:
                summary |= {"restart_failed": row["failed"], "longest_gap_s": row["longest_gap_s"]}
        return summary


class Several:
    """Targets that get the questions in turn, at most `clients` of them at the same time."""

    def __init__(self, targets: Sequence[TritonTarget], clients: int = 1 << 20) -> None:
        self._targets, self._clients, self._asked = targets, clients, 0

    async def open(self) -> None:
        self._free = asyncio.Semaphore(self._clients)
        for one in self._targets:
            await opened(one)

    async def close(self) -> None:
        for one in self._targets:
            await one.close()

    async def ask(self, question: Question, answer: Answer) -> None:
        self._asked += 1
        chosen = self._targets[self._asked % len(self._targets)]
        async with self._free:
            await chosen.ask(question, answer)


def target(address: str, unary: bool = True) -> TritonTarget:
    return TritonTarget(address, "lmm_unary" if unary else "lmm", unary=unary)


def run(
    to: TritonTarget | Several, traffic: Traffic, adapters: Sequence[str], seed: int
) -> list[Record]:
    """Send a load, and return its records."""
    trace = traffic.draw(seed)
    maker = ContentMaker(seed, TokenCount())
    contents = [maker.make(place, one) for place, one in enumerate(trace)]
    measurement = Measurement.of(trace, adapters)

    async def sent() -> None:
        await opened(to)
        try:
            await send(to, Asking(adapters), trace, contents, measurement)
        finally:
            await to.close()

    asyncio.run(sent())
    for code, message in measurement.messages.items():
        print(f"{code}: {message}", flush=True)
    return measurement.records


async def in_turn(
    targets: Sequence[TritonTarget], question: Question, calls: int
) -> list[list[float]]:
    """Return the seconds of calls to each of the targets, which are called in turn."""
    spent: list[list[float]] = [[] for _ in targets]
    for one in targets:
        await opened(one)
    for call in range(calls):
        for place in (0, 1) if call % 2 else (1, 0):
            started = time.perf_counter()
            await targets[place].ask(question, Answer())
            spent[place].append(time.perf_counter() - started)
    for one in targets:
        await one.close()
    return spent


async def opened(one: TritonTarget | Several) -> None:
    """Open a target, once its server answers."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return await one.open()
        except ServerError:
            if time.monotonic() > deadline:
                raise
            await one.close()
            await asyncio.sleep(0.1)


async def probe(
    one: TritonTarget, adapters: Sequence[str], tokens: Sequence[int]
) -> tuple[float, float]:
    """Return the median seconds of a request, and of loading its adapter, on an idle server."""
    await one.open()
    keys = {"temperature": 0, "max_tokens": tokens[1], "ignore_eos": True}
    spent: tuple[list[float], list[float]] = ([], [])
    for place, name in enumerate(adapters):
        for times in spent:
            content = Content(" ".join(["what"] * tokens[0] + [str(place), str(len(times))]))
            started = time.perf_counter()
            await one.ask(Question(content, name, keys), Answer())
            times.append(time.perf_counter() - started)
    await one.close()
    first, again = map(median, spent)
    return again, first - again


@contextmanager
def fleet(options: ServerOptions, cores: Sequence[Sequence[int]]) -> Iterator[list[TritonServer]]:
    """Start a server on each of these sets of cores, all at the same time."""
    servers = [TritonServer(replace(options, hand_over=True)) for _ in cores]

    def start(server: TritonServer, own: Sequence[int]) -> None:
        os.sched_setaffinity(0, own)  # Of this thread, and of what it starts.
        server.open()

    with ThreadPoolExecutor(len(servers)) as threads:
        try:
            list(threads.map(start, servers, cores))
            yield servers
        finally:
            list(threads.map(TritonServer.kill, servers))


@contextmanager
def behind_envoy(ports: Sequence[tuple[int, int]], policy: str = "bounded") -> Iterator[str]:
    """Yield the address of an Envoy in front of servers, given by their ports of HTTP and gRPC."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), choose_ports({"port": 0}, LOOPBACK)["port"]
        path = envoy.write_configuration(folder, LOOPBACK, [port], health_checks=False)
        config = json.loads(path.read_text())
        for cluster in config["static_resources"]["clusters"]:
            cluster |= POLICIES[policy]
        path.write_text(json.dumps(config))
        envoy.write_servers(folder, [envoy.Server(LOOPBACK, *pair) for pair in ports])
        command = [str(envoy.program()), "-c", str(path), "--concurrency", "2"]
        with program(*command, "--disable-hot-restart", "--log-level", "error"):
            address = f"{LOOPBACK}:{port}"
            yield address


@contextmanager
def program(*command: str) -> Iterator[Any]:
    """Run a program; yield its process and the file of its output."""
    with tempfile.NamedTemporaryFile() as log:
        process = start_tied([*command], os.environ, log)
        try:
            yield process, Path(log.name)
        finally:
            process.terminate()
            process.wait(START_SECONDS)


def wait(is_done: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > deadline:
            raise BenchmarkError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)


def metric(servers: Sequence[TritonServer], name: str) -> float:
    """Return the sum of a metric of all servers."""
    sample = re.compile(rf"^vlora:{name}\S* (\S+)$", re.MULTILINE)
    pages = (get(one.metrics_url, 30, True).decode() for one in servers)
    return sum(float(value) for page in pages for value in sample.findall(page))


def tiers(servers: Sequence[TritonServer]) -> list[float]:
    """Return how many requests have found their adapter in the pool, in host memory, on disk."""
    time.sleep(METRICS_SECONDS)
    names = ("hits", "host_hits", "misses")
    return [metric(servers, f"adapter_{name}_total") for name in names]
