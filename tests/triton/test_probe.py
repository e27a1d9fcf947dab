"""Tests of `vlora probe` on a server that answers, and on ports without one.

test_text_only.py tests the other states of a server.
"""

from __future__ import annotations

from typer.testing import CliRunner

from vlora.cli import app
from vlora.launcher.probe import Health, probe
from vlora.launcher.server import TritonServer
from vlora.net import choose_ports

DEADLINE = 10.0


def test_a_server_that_answers_is_ready(server: TritonServer) -> None:
    result = CliRunner().invoke(app, ["probe", server.grpc_url, "--deadline", str(DEADLINE)])
    assert result.exit_code == 0, result.output


def test_a_free_port_and_an_http_port_are_dead(server: TritonServer) -> None:
    (free,) = choose_ports({"grpc_port": 0}).values()
    for port in (free, server.options.http_port):
        finding = probe(f"localhost:{port}", DEADLINE)
        assert finding.health is Health.DEAD, finding
        assert finding.seconds < DEADLINE + 1
