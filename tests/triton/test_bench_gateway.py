"""Test of the gateway benchmark on a tiny grid, with the demo model, a real server and gateway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.frame import command_line

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

GRID = {
    "models": ["instant", "demo"],
    "kinds": ["text", "image"],
    "adapters": 2,
    "concurrency": [1, 2],
    "rounds": {"1": 2, "2": 2},
}


def test_server_and_gateway_are_measured(tmp_path: Path) -> None:
    grid, out = tmp_path / "grid.json", tmp_path / "figures.json"
    grid.write_text(json.dumps(GRID))
    words = ["--grid", str(grid), "--json", str(out)]
    done = CliRunner().invoke(command_line("gateway"), words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    latency = written["rows"]
    assert [(row["kind"], row["number"]) for row in latency] == [
        ("text", 1),
        ("image", 1),
        ("text", 1),
        ("text", 2),
        ("image", 1),
        ("image", 2),
    ]
    for row in latency:
        assert 0 < row["token_ms_grpc"] < row["first_ms_grpc"] * 100
        assert row["token_ratio"] == pytest.approx(
            row["token_ms_gateway"] / row["token_ms_grpc"], rel=0.01
        )
    assert [row["model"] for row in latency] == ["instant"] * 2 + ["demo"] * 4
    assert written["summary"]["first_token_added_ms_instant"] is not None
