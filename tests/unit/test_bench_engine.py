"""Tests of the engine benchmark: its arithmetic, and a run of a tiny model in process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import llava
from benchmarks.engine import StepTrace, row_of, summarize
from benchmarks.frame import command_line
from benchmarks.loads import OUTPUT, Load, LoadTimes
from benchmarks.models import Work

TINY = llava.tiny(llava.Sizes(layers=2, kv_heads=16, context=512))


def test_the_floor_takes_each_step_at_its_limit_and_ends_a_request_with_its_last_step() -> None:
    bound_by_flops, bound_by_bytes = Work(20.0, 1, 0, 0), Work(1.0, 20, 10, 10)
    works = [bound_by_flops, bound_by_bytes, bound_by_bytes]
    trace = StepTrace(works, first=[0, 1], last=[0, 2], tower=Work(0.0, 0, 0, 0))
    floor = trace.floor(peak=10.0, rate=20.0)
    assert floor.first == [2.0, 4.0]
    assert floor.end == [2.0, 6.0]
    assert floor.token_latency == 8.0 / (2 * OUTPUT)
    images = StepTrace(works, trace.first, trace.last, tower=Work(5.0, 0, 0, 0))
    assert images.floor(peak=10.0, rate=20.0).end == [2.5, 6.5]


def test_the_summary_is_null_for_what_was_not_run() -> None:
    runs = [(LoadTimes([1.0], [2.0]), LoadTimes([0.5], [1.0]))]
    row = row_of(Load("text", 4, 16), "fp32", runs, [])
    summary = summarize([row])
    assert summary["text_4"] == 2.0
    assert summary["image_16"] is None
    assert summary["served_over_engine"] is summary["vs_peft_mixed"] is None
    row = row_of(Load("text", 4, 16), "fp32", runs, [LoadTimes([1.0], [2.2])])
    row["peers"].append(LoadTimes([4.0], [8.0]).as_row())
    summary = summarize([row])
    assert summary["served_over_engine"] == pytest.approx(1.1)
    assert summary["vs_peft_mixed"] == pytest.approx(0.25)


def test_requests_cycle_through_the_adapters_and_no_prompt_is_repeated(tmp_path: Path) -> None:
    checkpoint = llava.make(TINY, tmp_path)
    requests = Load("image", 4, 16).draw(checkpoint, seed=1)
    assert [request.adapter for request in requests[:5]] == [
        *checkpoint.adapter_names[:4],
        checkpoint.adapter_names[0],
    ]
    assert (
        len(
            {request.prompt for request in requests + Load("image", 4, 16).draw(checkpoint, seed=2)}
        )
        == 32
    )
    assert all(request.adapter is None for request in Load("text", 0, 16).draw(checkpoint, seed=1))


def test_a_run_writes_all_keys_and_peft_runs_the_same_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llava, "MODELS", {"whole": TINY})
    grid, out = tmp_path / "grid.json", tmp_path / "figures.json"
    values = {"kinds": ["text", "image"], "adapters": [4], "repeats": 1, "requests": 16}
    grid.write_text(json.dumps(values))
    arguments = ["--no-served", "--peers", "--threads", "1", "--dtypes", "fp32"]
    arguments += ["--grid", str(grid), "--json", str(out), "--root", str(tmp_path)]
    result = CliRunner().invoke(command_line("engine"), arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    keys = {f"{kind}_{count}" for kind in ("text", "image") for count in (0, 1, 4, 16)}
    assert set(written["summary"]) == keys | {"served_over_engine", "vs_peft_mixed"}
    assert written["summary"]["text_4"] >= 1.0
    assert written["summary"]["image_4"] >= 1.0
    assert written["summary"]["vs_peft_mixed"] > 0
