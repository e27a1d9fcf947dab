"""Tests of `vlora probe` on a real server in each of its states, within the deadline."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from typer.testing import CliRunner

from tests.support.triton_client import asking
from vlora.cli import app
from vlora.launcher.probe import Finding, Health, probe
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer
from vlora.net import choose_ports

DEADLINE = 10.0


def probe_within(server: TritonServer, deadline: float = DEADLINE) -> Finding:
    started = time.monotonic()
    finding = probe(server.grpc_url, deadline, metrics_port=server.options.metrics_port)
    assert time.monotonic() - started < deadline + 1, finding
    return finding


def test_a_server_that_answers_is_ready(server: TritonServer) -> None:
    assert probe_within(server).health is Health.READY
    result = CliRunner().invoke(app, ["probe", server.grpc_url, "--deadline", str(DEADLINE)])
    assert result.exit_code == 0, result.output


def test_a_free_port_and_an_http_port_are_dead(server: TritonServer) -> None:
    (free,) = choose_ports({"grpc_port": 0}).values()
    for port in (free, server.options.http_port):
        finding = probe(f"localhost:{port}", DEADLINE)
        assert finding.health is Health.DEAD, finding
        assert finding.seconds < DEADLINE + 1


def test_a_starting_server_is_alive_and_a_hung_or_killed_one_is_dead(
    checkpoint: Path, adapters_dir: Path, tmp_path: Path
) -> None:
    options = ServerOptions(model=checkpoint, adapters=adapters_dir, log=tmp_path / "log")
    server = TritonServer(options)
    server.start()
    try:
        finding = probe_within(server)
        assert finding.health is Health.ALIVE, finding
        assert "starting" in finding.reason
        server.wait_ready()
        assert probe_within(server).health is Health.READY

        # The process is stopped, then killed. Continuing it instead would crash Triton 2.51.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(server.models["lmm"], number)
            finding = probe_within(server)
            assert finding.health is Health.DEAD, finding
        with asking(server) as asker:
            assert asker.client.is_server_ready(), "Triton still reports that it is ready"
    finally:
        server.kill()
    assert probe_within(server).health is Health.DEAD
