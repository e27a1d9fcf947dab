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
    "idle_connections": 5,
    "idle_seconds": 0.2,
    "cut_streams": 4,
}


def test_server_and_gateway_are_measured_and_no_request_is_left_running(tmp_path: Path) -> None:
    grid, out = tmp_path / "grid.json", tmp_path / "figures.json"
    grid.write_text(json.dumps(GRID))
    words = ["--grid", str(grid), "--json", str(out)]
    done = CliRunner().invoke(command_line("gateway"), words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    latency = [row for row in written["rows"] if row["measurement"] == "latency"]
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
        assert row["token_ratio_each_token"] == pytest.approx(
            row["token_ms_each_token"] / row["token_ms_grpc"], rel=0.01
        )
    assert [row["model"] for row in latency] == ["instant"] * 2 + ["demo"] * 4
    summary = written["summary"]
    assert summary["first_token_added_ms_instant"] is not None
    assert summary["idle_share_held"] == 1
    assert summary["left_running"] == 0
    (cut,) = (row for row in written["rows"] if row["measurement"] == "cut")
    assert cut["running_at_cut"] > 0
    assert cut["aborted"] + cut["finished"] == GRID["cut_streams"]
