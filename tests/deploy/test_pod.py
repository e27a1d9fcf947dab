"""Tests of the container of the chart's pod, run here: arguments, probes, metrics, TLS."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support import deploy_kit as kit
from tests.support.chart import TLS, render
from tests.support.polling import until
from vlora.launcher.probe import Health

VLORA = kit.ROOT / ".venv" / "bin" / "vlora"
NAME = "vision.shop.svc"
ENGINE = {"max_num_seqs": 3, "engine_threads": 1}


def certificates(folder: Path) -> Path:
    """Create the files of a secret like cert-manager's, with the same authority for clients."""
    folder.mkdir()
    openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={NAME}"]
    openssl += ["-addext", f"subjectAltName=DNS:{NAME}"]
    kit.output_of([*openssl, "-keyout", folder / "tls.key", "-out", folder / "tls.crt"])
    for name in ("ca.crt", TLS["clientCa"]):
        (folder / name).write_bytes((folder / "tls.crt").read_bytes())
    return folder


@contextmanager
def pod(tools: Path, values: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Run the server's container and yield it; its mounted files are in `folder`."""
    ports = kit.free_ports("http", "grpc", "metrics")
    resources = render(tools, {**values, "ports": ports, "engine": ENGINE})["resources"]
    (container,) = next(
        one["spec"]["template"]["spec"]["containers"]
        for one in resources
        if one["kind"] == "Deployment" and one["metadata"]["name"] == "vision"
    )
    options = next(one["data"] for one in resources if "model.json" in one.get("data", {}))
    (folder / "model.json").write_text(options["model.json"])
    text = json.dumps(container)
    for mounted in ("/etc/vlora/", "/tls/"):
        text = text.replace(mounted, f"{folder if 'etc' in mounted else folder / 'tls'}/")
    container = json.loads(text)
    container["ports"] = {one["name"]: one["containerPort"] for one in container["ports"]}
    with kit.running([VLORA, *container["args"]], folder / "serve.log") as process:

        def is_up() -> bool:
            assert process.poll() is None, (folder / "serve.log").read_text()[-3000:]
            return passes(container, "startupProbe")

        until(is_up, seconds=120)
        yield container


def passes(container: dict[str, Any], name: str) -> bool:
    """Return whether the probe succeeds, as the kubelet would decide."""
    http_get = container[name].get("httpGet")
    if http_get is None:
        command = container[name]["exec"]["command"]
        assert command[0] == "vlora"
        seconds = container[name]["timeoutSeconds"]
        return subprocess.run([VLORA, *command[1:]], timeout=seconds).returncode == 0
    try:
        url = f"http://127.0.0.1:{container['ports'][http_get['port']]}{http_get['path']}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_the_pod_serves_its_probes_pass_and_the_monitor_finds_its_metrics(
    tools: Path, tmp_path: Path
) -> None:
    with pod(tools, {}, tmp_path) as container:
        assert all(passes(container, f"{kind}Probe") for kind in ("readiness", "liveness"))
        monitor = render(tools, {"monitoring": {"podMonitor": True}})["resources"]
        (where,) = next(one for one in monitor if one["kind"] == "PodMonitor")["spec"][
            "podMetricsEndpoints"
        ]
        url = f"http://127.0.0.1:{container['ports'][where['port']]}{where['path']}"
        with urllib.request.urlopen(url) as answer:
            assert "vllm:num_requests_waiting" in answer.read().decode()
        with grpc.insecure_channel(f"127.0.0.1:{container['ports']['grpc']}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError, match="protocol is restricted"):
                stub.RepositoryIndex(service_pb2.RepositoryIndexRequest())
        http = f"http://127.0.0.1:{container['ports']['http']}/v2/repository/index"
        with pytest.raises(urllib.error.HTTPError, match="403") as raised:
            urllib.request.urlopen(http, data=b"")
        raised.value.close()
    assert "SIGKILL" not in (tmp_path / "serve.log").read_text()


def test_with_tls_only_clients_with_a_certificate_are_answered(tools: Path, tmp_path: Path) -> None:
    certificates(tmp_path / "tls")
    with pod(tools, {"tls": TLS}, tmp_path) as container:
        assert passes(container, "livenessProbe")
        address = f"127.0.0.1:{container['ports']['grpc']}"
        without = subprocess.run([VLORA, "probe", address, "--deadline", "3"])
        assert without.returncode == Health.DEAD
