"""Envoy with the chart's configuration in front of two real servers."""

from __future__ import annotations

import os
import queue
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
import yaml
from tritonclient.utils import InferenceServerException

from tests.support import deploy_kit as kit
from tests.support.chart import EVERYTHING, TLS, render
from tests.support.polling import until
from tests.support.triton_client import to_inputs
from vlora.launcher.server import ServerOptions, TritonServer

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


def adapted_to(servers: list[TritonServer], config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration for these servers.

    It has their addresses instead of one name in the cluster's DNS, and health checks every second
    instead of every ten. The rest is the chart's.
    """
    for cluster in config["static_resources"]["clusters"]:
        protocol = cluster["name"].removeprefix("servers_")
        cluster["type"] = "STATIC"
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
            {
                "endpoint": {
                    "address": _socket(getattr(server.options, f"{protocol}_port")),
                    "health_check_config": {"port_value": server.options.http_port},
                }
            }
            for server in servers
        ]
        for check in cluster["health_checks"]:
            check["interval"] = check["no_traffic_interval"] = "1s"
    config["admin"]["address"]["socket_address"]["address"] = "127.0.0.1"
    return config


def _socket(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@dataclass(frozen=True)
class Proxy:
    """A running Envoy."""

    port: int
    admin_port: int

    def admin(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/{path}") as answer:
            return str(answer.read().decode())

    def is_healthy(self, server: TritonServer) -> bool:
        """Return whether Envoy sends requests to this server."""
        return self._read(server, "health_flags") == "healthy"

    def streams_to(self, server: TritonServer) -> int:
        """Return the number of streams that Envoy sent to it, without health checks."""
        return int(self._read(server, "rq_total"))

    def _read(self, server: TritonServer, what: str) -> str:
        name = f"servers_grpc::127.0.0.1:{server.options.grpc_port}::{what}::"
        (line,) = (line for line in self.admin("clusters").splitlines() if line.startswith(name))
        return line.removeprefix(name)


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


@pytest.fixture
def proxy(tools: Path, servers: list[TritonServer], tmp_path: Path) -> Iterator[Proxy]:
    port, admin = kit.free_ports("http_port", "grpc_port").values()
    values = {"envoy": {"enabled": True, "port": port, "adminPort": admin, "hashHeader": HEADER}}
    file = tmp_path / "envoy.yaml"
    file.write_text(yaml.safe_dump(adapted_to(servers, configuration(tools, values))))
    command = [tools / "envoy", "-c", file, "--concurrency", "1", "--use-dynamic-base-id"]
    with kit.running(command, tmp_path / "envoy.log") as process:
        envoy = Proxy(port, admin)

        def is_up() -> bool:
            assert process.poll() is None, (tmp_path / "envoy.log").read_text()[-3000:]
            try:
                return all(envoy.is_healthy(server) for server in servers)
            except (OSError, ValueError):
                return False

        until(is_up)
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
