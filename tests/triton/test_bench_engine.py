"""`vlora bench engine` over gRPC: a tiny model in a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import llava
from benchmarks.cli import bench_app
from benchmarks.engine.over_grpc import Served

TINY = llava.tiny(llava.Sizes(layers=2, kv_heads=16, context=512))


def test_the_same_load_in_process_and_over_grpc_stand_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llava, "MODELS", {"whole": TINY})
    given = {"kinds": ["text", "image"], "adapters": [2], "repeats": 1, "requests": 3}
    grid, out = tmp_path / "grid.json", tmp_path / "figures.json"
    grid.write_text(json.dumps(given))
    heard: list[object] = []
    listen = Served._heard

    def count(self: Served, number: int, result: object, error: object) -> None:
        heard.append(result)
        listen(self, number, result, error)

    monkeypatch.setattr(Served, "_heard", count)
    threads = torch.get_num_threads()
    try:
        options = {"--engine-threads": "1", "--encoder-threads": "1", "--dtypes": "fp32"}
        options |= {"--grid": str(grid), "--json": str(out), "--root": str(tmp_path)}
        words = [word for pair in options.items() for word in pair]
        done = CliRunner().invoke(bench_app, ["engine", *words], catch_exceptions=False)
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    assert written["summary"]["served_over_engine"] > 0
    for row in written["rows"]:
        assert row["requests"] == 3
        (served,) = row["served"]
        assert 0 < served["first_token_s"] <= served["wall_s"]
    # Answers were streamed, and every request had its final response.
    finals = [r.get_response().parameters["triton_final_response"].bool_param for r in heard]  # type: ignore[attr-defined]
    assert sum(finals) == 2 * 3
    assert len(heard) > 2 * 2 * 3
