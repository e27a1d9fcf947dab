"""`vlora bench engine`: its arithmetic, and a tiny model through the whole path in process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import llava
from benchmarks.cli import bench_app
from benchmarks.engine.in_process import Steps
from benchmarks.engine.load import OUTPUT, Load, Run
from benchmarks.engine.measurement import Result, summarize
from benchmarks.work_model import Work

TINY = llava.tiny(llava.Sizes(layers=2, kv_heads=16, context=512))


def test_the_floor_is_each_step_at_its_limit_and_ends_a_request_with_its_last_step() -> None:
    bound_by_flops, bound_by_bytes = Work(20.0, 1, 0, 0), Work(1.0, 20, 10, 10)
    works = [bound_by_flops, bound_by_bytes, bound_by_bytes]
    steps = Steps(works, begun=[0, 1], ended=[0, 2], tower=None)
    floor = steps.floor(peak=10.0, rate=20.0)
    assert floor.first == [2.0, 4.0]
    assert floor.end == [2.0, 6.0]
    assert floor.token_latency == 8.0 / (2 * OUTPUT)
    images = Steps(works, steps.begun, steps.ended, tower=Work(5.0, 0, 0, 0))
    assert images.floor(peak=10.0, rate=20.0).end == [2.5, 6.5]


def test_the_work_at_once_reads_every_weight_once() -> None:
    steps = Steps([Work(1.0, 20, 5, 2), Work(1.0, 20, 7, 2)], begun=[0], ended=[1], tower=None)
    assert steps.at_once(peak=1e9, rate=2.0) == 11.0


def test_what_was_not_run_is_null_in_the_summary() -> None:
    result = Result(Load("text", 4), "fp32", inside=[(Run([1.0], [2.0]), Run([0.5], [1.0]), 0.5)])
    summary = summarize([result])
    assert summary["text_4"] == 2.0
    assert summary["image_16"] is None
    assert summary["served_over_engine"] is summary["vs_peft_mixed"] is None
    result.served.append(Run([1.0], [2.2]))
    result.peers.append(Run([4.0], [8.0]))
    summary = summarize([result])
    assert (summary["served_over_engine"], summary["vs_peft_mixed"]) == (1.1, 0.25)


def test_requests_share_the_adapters_in_turn_and_no_prompt_comes_twice(tmp_path: Path) -> None:
    made = llava.make(TINY, tmp_path)
    asks = Load("image", 4).asks(made, seed=1)
    assert [ask.adapter for ask in asks[:5]] == [*made.adapter_names[:4], made.adapter_names[0]]
    assert len({ask.prompt for ask in asks + Load("image", 4).asks(made, seed=2)}) == 32
    assert all(ask.adapter is None for ask in Load("text", 0).asks(made, seed=1))


def test_engine_writes_its_keys_and_peft_runs_the_same_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llava, "MODELS", {"whole": TINY})
    grid, out = tmp_path / "grid.json", tmp_path / "figures.json"
    grid.write_text(json.dumps({"kinds": ["text", "image"], "adapters": [4], "repeats": 1}))
    arguments = ["engine", "--no-served", "--peers", "--engine-threads", "1", "--dtypes", "fp32"]
    arguments += ["--grid", str(grid), "--json", str(out), "--root", str(tmp_path)]
    done = CliRunner().invoke(bench_app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    keys = {f"{kind}_{count}" for kind in ("text", "image") for count in (0, 1, 4, 16)}
    assert set(written["summary"]) == keys | {"served_over_engine", "vs_peft_mixed"}
    assert written["summary"]["text_4"] >= 1.0
    assert written["summary"]["image_4"] >= 1.0
    assert written["summary"]["vs_peft_mixed"] > 0
