"""Tests of Envoy with the chart's configuration, in front of two real servers."""

from __future__ import annotations

import os
import queue
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import tritonclient.grpc as grpcclient
import yaml
from tritonclient.utils import InferenceServerException

from tests.support import deploy_kit as kit
from tests.support.chart import EVERYTHING, TLS, render
from tests.support.polling import until
from tests.support.triton_client import to_inputs
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

HEADER = "x-lora-adapter"
ADAPTERS = [f"adapter-{index}" for index in range(16)]
SHORT = {"max_tokens": 2, "temperature": 0}
LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}


def configuration(tools: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return Envoy's configuration from the chart's ConfigMap."""
    for resource in render(tools, values)["resources"]:
        if resource["kind"] == "ConfigMap" and "envoy.yaml" in resource["data"]:
            config: dict[str, Any] = yaml.safe_load(resource["data"]["envoy.yaml"])
            return config
    raise AssertionError("the chart renders no configuration for Envoy")


@dataclass(frozen=True)
class Ports:
    """Ports of a server behind Envoy."""

    http_port: int
    grpc_port: int


def adapted_to(servers: list[Ports], config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration for these servers.

    It has their addresses instead of one name in the cluster's DNS, and health checks every second
    instead of every ten. The rest is the chart's.
    """
    for cluster in config["static_resources"]["clusters"]:
        if cluster["name"] == "admin":
            continue
        protocol = cluster["name"].removeprefix("servers_")
        cluster["type"] = "STATIC"
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
            {
                "endpoint": {
                    "address": _socket(getattr(server, f"{protocol}_port")),
                    "health_check_config": {"port_value": server.http_port},
                }
            }
            for server in servers
        ]
        for check in cluster["health_checks"]:
            check["interval"] = check["no_traffic_interval"] = "1s"
    return config


def _socket(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@dataclass(frozen=True)
class Proxy:
    """A running Envoy."""

    port: int
    admin_port: int
    health_port: int
    pid: int

    def admin(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/{path}") as answer:
            return str(answer.read().decode())

    def is_healthy(self, server: TritonServer) -> bool:
        """Return whether Envoy sends streams to this server."""
        return self.read("grpc", server.options.grpc_port, "health_flags") == "healthy"

    def streams_to(self, server: TritonServer) -> int:
        """Return the number of streams, without health checks, that Envoy sent to this server."""
        return int(self.read("grpc", server.options.grpc_port, "rq_total"))

    def read(self, protocol: str, port: int, what: str) -> str:
        name = f"servers_{protocol}::127.0.0.1:{port}::{what}::"
        (line,) = (line for line in self.admin("clusters").splitlines() if line.startswith(name))
        return line.removeprefix(name)

    def post(self, path: str, body: bytes) -> int:
        """Return the status of a request over HTTP."""
        return status_of(f"http://127.0.0.1:{self.port}/{path}", body)


def status_of(url: str, body: bytes | None = None) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


class Stream:
    """One request through Envoy, on its own gRPC stream."""

    def __init__(self, proxy: Proxy, adapter: str, sampling: dict[str, Any]) -> None:
        self._arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = grpcclient.InferenceServerClient(f"127.0.0.1:{proxy.port}")
        self._client.start_stream(
            lambda result, error: self._arrived.put((result, error)), headers={HEADER: adapter}
        )
        values = {"text_input": "hello", "stream": True, "sampling_parameters": sampling}
        self._client.async_stream_infer("lmm", to_inputs(values), enable_empty_final_response=True)

    def next(self) -> bool:
        """Wait for a response; return whether it was the final one. Raises an error response."""
        result, error = self._arrived.get(timeout=60)
        if error is not None:
            self._client.close()
            raise error
        final = result.get_response().parameters["triton_final_response"].bool_param
        if final:
            self._client.close()
        return bool(final)

    def finish(self) -> None:
        while not self.next():
            pass


def home_of(proxy: Proxy, adapter: str, servers: list[TritonServer]) -> TritonServer:
    """Return the only server that answers this adapter's streams."""
    before = [proxy.streams_to(server) for server in servers]
    for _ in range(3):
        Stream(proxy, adapter, SHORT).finish()
    added = [proxy.streams_to(server) - then for server, then in zip(servers, before, strict=True)]
    assert sorted(added) == [*[0] * (len(servers) - 1), 3], added
    return servers[added.index(3)]


@pytest.fixture
def servers(checkpoint: Path, adapters_dir: Path, tmp_path: Path) -> Iterator[list[TritonServer]]:
    options = ServerOptions(
        model=checkpoint, adapters=adapters_dir, model_json={"engine_threads": 1}
    )
    started: list[TritonServer] = []
    try:
        for name in ("one", "two"):
            started.append(TritonServer(replace(options, log=tmp_path / f"{name}.log")))
            started[-1].start()
            started[-1].wait_ready()
        yield started
    finally:
        for server in started:
            server.kill()


@contextmanager
def envoy_before(tools: Path, servers: list[Ports], folder: Path) -> Iterator[Proxy]:
    """Run Envoy with the chart's configuration for these servers; yield it when all are healthy."""
    ports = kit.free_ports("port", "adminPort", "healthPort")
    values = {"envoy": {"enabled": True, "hashHeader": HEADER, **ports}}
    file = folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(adapted_to(servers, configuration(tools, values))))
    command = [tools / "envoy", "-c", file, "--concurrency", "1", "--disable-hot-restart"]
    with kit.running(command, folder / "envoy.log") as process:
        envoy = Proxy(ports["port"], ports["adminPort"], ports["healthPort"], process.pid)

        def is_up() -> bool:
            assert process.poll() is None, (folder / "envoy.log").read_text()[-3000:]
            try:
                flags = [envoy.read("grpc", one.grpc_port, "health_flags") for one in servers]
            except (OSError, ValueError):
                return False
            return set(flags) == {"healthy"}

        until(is_up)
        yield envoy


@pytest.fixture
def proxy(tools: Path, servers: list[TritonServer], tmp_path: Path) -> Iterator[Proxy]:
    ports = [Ports(one.options.http_port, one.options.grpc_port) for one in servers]
    with envoy_before(tools, ports, tmp_path) as envoy:
        yield envoy


@pytest.fixture
def failing() -> Iterator[list[ThreadingHTTPServer]]:
    """Yield two servers whose health checks pass; other requests get the status in their path."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status = self.path.rpartition("/")[2]
            self.send_response(int(status) if status.isdigit() else 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with ExitStack() as stack:
        servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        for server in servers:
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever).start()
        yield servers


@pytest.fixture
def proxy_of_failing(
    tools: Path, failing: list[ThreadingHTTPServer], tmp_path: Path
) -> Iterator[Proxy]:
    ports = [server.server_port for server in failing]
    with envoy_before(tools, [Ports(port, port) for port in ports], tmp_path) as envoy:
        yield envoy


@pytest.mark.parametrize(
    "values", [{"envoy": {"enabled": True}}, {"envoy": {"enabled": True}, "tls": TLS}, EVERYTHING]
)
def test_envoy_accepts_the_charts_configuration(
    tools: Path, values: dict[str, Any], tmp_path: Path
) -> None:
    names = ("tls.crt", "ca.crt", "clients.crt")
    key = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=vlora"]
    kit.output_of([*key, "-keyout", tmp_path / "tls.key", "-out", tmp_path / names[0]])
    for name in names[1:]:
        (tmp_path / name).write_bytes((tmp_path / names[0]).read_bytes())
    text = yaml.safe_dump(configuration(tools, values)).replace("/tls/", f"{tmp_path}/")
    (tmp_path / "envoy.yaml").write_text(text)
    kit.output_of([tools / "envoy", "--mode", "validate", "-c", tmp_path / "envoy.yaml"])


def test_only_the_probes_paths_of_the_admin_interface_leave_the_pod(
    proxy_of_failing: Proxy,
) -> None:
    listening = {
        one.laddr.port: one.laddr.ip
        for one in psutil.Process(proxy_of_failing.pid).net_connections(kind="tcp")
        if one.status == psutil.CONN_LISTEN
    }
    assert listening == {
        proxy_of_failing.port: "0.0.0.0",
        proxy_of_failing.health_port: "0.0.0.0",
        proxy_of_failing.admin_port: "127.0.0.1",
    }
    url = f"http://127.0.0.1:{proxy_of_failing.health_port}/"
    assert [status_of(url + path) for path in ("ready", "alive")] == [200, 200]
    for path in ("", "config_dump", "ready/../config_dump", "alive/quitquitquit", "quitquitquit"):
        assert status_of(url + path, b"") == 404, path


def test_unavailable_servers_are_ejected_and_those_with_internal_errors_are_not(
    proxy_of_failing: Proxy, failing: list[ThreadingHTTPServer]
) -> None:
    def flags() -> list[str]:
        return sorted(
            proxy_of_failing.read("http", server.server_port, "health_flags") for server in failing
        )

    assert [proxy_of_failing.post("500", b"") for _ in range(20)] == [500] * 20
    assert flags() == ["healthy", "healthy"]
    assert [proxy_of_failing.post("503", b"") for _ in range(5)] == [503] * 5
    until(lambda: flags() == ["/failed_outlier_check", "healthy"])


def test_malformed_requests_eject_no_server(proxy: Proxy, servers: list[TritonServer]) -> None:
    path = "v2/models/video_analytics/infer"
    assert {proxy.post(path, b"{") for _ in range(20)} == {500}, "Triton's answer"
    for server in servers:
        assert proxy.read("http", server.options.http_port, "health_flags") == "healthy"


def test_an_adapter_stays_on_its_server_until_that_ends(
    proxy: Proxy, servers: list[TritonServer]
) -> None:
    homes = {adapter: home_of(proxy, adapter, servers) for adapter in ADAPTERS}
    assert {server.pid for server in homes.values()} == {server.pid for server in servers}
    assert homes == {adapter: home_of(proxy, adapter, servers) for adapter in ADAPTERS}
    dying, staying = servers
    of = {server.pid: adapter for adapter, server in homes.items()}
    lost, finished = (Stream(proxy, of[server.pid], LONG) for server in servers)
    assert not lost.next()
    assert not finished.next()
    before = proxy.streams_to(staying)
    os.kill(dying.pid, signal.SIGKILL)
    with pytest.raises(InferenceServerException) as raised:
        lost.finish()
    # Once an answer has started, Envoy can only reset the stream, which is INTERNAL.
    assert raised.value.status() in ("StatusCode.INTERNAL", "StatusCode.UNAVAILABLE"), raised.value
    # Requests sent while the server ends are in flight as well. Later ones find no connection there
    # and are sent to the other server, even before a health check has failed.
    until(lambda: dying.poll() is not None)
    for _ in range(5):
        Stream(proxy, of[dying.pid], SHORT).finish()
    finished.finish()
    assert proxy.streams_to(staying) - before == 5, "requests in flight are not sent again"
    until(lambda: not proxy.is_healthy(dying))
    with urllib.request.urlopen(f"http://127.0.0.1:{proxy.port}/v2/health/ready") as answer:
        assert answer.status == 200


def test_a_server_with_a_dead_model_gets_no_requests_although_triton_reports_it_ready(
    proxy: Proxy, servers: list[TritonServer]
) -> None:
    adapter = next(one for one in ADAPTERS if home_of(proxy, one, servers) is servers[0])
    os.kill(servers[0].models["lmm"], signal.SIGKILL)
    until(lambda: not proxy.is_healthy(servers[0]))
    with urllib.request.urlopen(f"http://{servers[0].http_url}/v2/health/ready") as answer:
        assert answer.status == 200
    assert home_of(proxy, adapter, servers[1:]) is servers[1]
