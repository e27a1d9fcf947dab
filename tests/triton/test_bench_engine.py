"""Test of the engine benchmark over gRPC, on a tiny model in a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import llava
from benchmarks.frame import command_line

TINY = llava.tiny(llava.Sizes(layers=2, kv_heads=16, context=512))


def test_the_same_load_is_measured_in_process_and_over_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llava, "MODELS", {"whole": TINY})
    values = {"kinds": ["text", "image"], "adapters": [2], "repeats": 1, "requests": 3}
    grid, out = tmp_path / "grid.json", tmp_path / "figures.json"
    grid.write_text(json.dumps(values))
    threads = torch.get_num_threads()
    try:
        options = {"--threads": "1", "--dtypes": "fp32"}
        options |= {"--grid": str(grid), "--json": str(out), "--root": str(tmp_path)}
        words = [word for pair in options.items() for word in pair]
        done = CliRunner().invoke(command_line("engine"), words, catch_exceptions=False)
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    assert written["summary"]["served_over_engine"] > 0
    for row in written["rows"]:
        assert row["requests"] == 3
        (served,) = row["served"]
        assert 0 < served["first_token_s"] < served["wall_s"], "answers are streamed"
