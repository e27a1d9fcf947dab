"""Tests of the policies benchmark: traces, simulation, summary, and a run of a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import llava
from benchmarks.frame import GRIDS, command_line
from benchmarks.policies import (
    BASELINES,
    Policies,
    closed_loop,
    jobs_of,
    means_over_seeds,
    summarize,
)
from benchmarks.published_operators import OPERATORS
from benchmarks.replay import Replay, Simulation, TracedRequest, Workload
from benchmarks.simulated_chips import drawn_case, figures
from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import LoraPair, Segment
from vlora.config import Options
from vlora.engine.cost import AdapterSize, CostModel, Profile
from vlora.engine.policies.registry import make_policy
from vlora.engine.scheduler import Budgets

TINY = llava.tiny(llava.Sizes(layers=2, kv_heads=16, context=512))


@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
def test_a_trace_depends_on_its_seed_alone_and_has_the_requested_rate_and_skew(
    arrivals: Any,
) -> None:
    work = Workload("retrieval", skew=0.6, adapters=16, arrivals=arrivals)
    trace = work.trace(1, rate=5.0, count=4000)
    assert trace == work.trace(1, 5.0, 4000) != work.trace(2, 5.0, 4000)
    assert trace[-1].at == pytest.approx(4000 / 5, rel=0.1)
    share = [sum(request.adapter == a for request in trace) / 4000 for a in range(16)]
    assert share[1] == pytest.approx(0.6, abs=0.03)
    assert max(share[:1] + share[2:]) < 0.05
    faster = work.trace(1, 10.0, 4000)
    assert [request.prompt for request in faster] == [request.prompt for request in trace]
    assert faster[-1].at == pytest.approx(trace[-1].at / 2)
    assert all(150 <= request.output <= request.limit == 250 for request in trace)


def costs() -> CostModel:
    """Return a model of 8 ms per step of up to 8 rows, then 1 ms per row; adapters add 10 %."""
    knots = ((1, 8e-3), (8, 8e-3), (64, 64e-3))
    profile = Profile(knots, adapter_element=8e-10, adapter_element_row=1e-11, merge=(1e-3, 0.0))
    return CostModel(profile, lambda slot: AdapterSize(10**6, 10**9))


def replay(policy: str, trace: list[TracedRequest]) -> Replay:
    options = Options(policy=policy)
    budgets = Budgets(options.max_num_seqs, options.max_num_batched_tokens)
    return Simulation(trace, budgets, 2048, 16, costs(), lambda c: make_policy(options, c)).run()


def test_simulated_time_is_that_of_the_cost_model() -> None:
    trace = [TracedRequest(1.0, 0, prompt=8, output=3, limit=16)]
    unmerged = replay("unmerge_only", trace)
    step = 8e-3 + 8e-4
    assert unmerged.outcome.first == [pytest.approx(step + 8e-5)]
    assert unmerged.outcome.end == [pytest.approx(3 * step + 8e-5 + 2e-5)]
    assert unmerged.as_row()["token_latency_ms"] == pytest.approx((3 * step + 1e-4) / 3 * 1e3)
    assert set(unmerged.modes) == {"unmerged"}
    merged = replay("merge_only", trace)
    assert merged.merges == 1
    assert set(merged.modes) == {"merged"}
    assert merged.outcome.end == [pytest.approx(1e-3 + 3 * 8e-3)]


@pytest.mark.parametrize("application", ["retrieval", "analytics"])
def test_the_predictive_policy_is_no_slower_than_any_baseline_in_simulation(
    application: Any,
) -> None:
    work = Workload(application, 0.6, 16, scale=1 / 8 if application == "retrieval" else 1 / 64)
    for rate in (1.0, 3.0):
        trace = work.trace(1, rate, 30)
        ours = replay("predictive", trace)
        assert len(ours.outcome.end) == 30
        for baseline in BASELINES:
            assert ours.token_latency < 1.03 * replay(baseline, trace).token_latency


@pytest.mark.parametrize("seed", range(16))
def test_no_drawn_trace_is_slower_with_the_predictive_policy_than_first_come_first_served(
    seed: int,
) -> None:
    case = drawn_case(seed, 64)
    theirs, ours = (figures(case.run(name)) for name in ("unmerge_only", "predictive"))
    for own, other, bar in zip(ours, theirs, (1.02, 1.05, 1.05), strict=True):
        assert own <= bar * other


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_operators_of_other_systems_compute_what_atmm_computes(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    ranks, d_outs = (3, 8, 1), (24, 8)
    columns = [
        [LoraPair(torch.randn(r, 16).to(dtype), torch.randn(d, r).to(dtype)) for r in ranks]
        for d in d_outs
    ]
    group = LoraGroup.of(16, *columns)
    group.append([columns[0][0], None])
    segments = [
        *(Segment(0, 1, 0, +1), Segment(1, 1, 1, +1), Segment(2, 90, 2, +1), Segment(93, 2, 3, +1)),
        Segment(1, 50, 0, -1),
    ]
    x, y = torch.randn(95, 16), torch.randn(95, 32)
    expected = y.clone()
    op.apply(expected, x, segments, group, backend="reference")
    OPERATORS[name](y, x, segments, group)
    torch.testing.assert_close(y, expected, rtol=tolerance / 10, atol=tolerance)


def simulated_again(policy: str, latency: float) -> dict[str, Any]:
    figures = {"free_adapters_ms": latency * 0.9, "adapter_share": 0.08}
    return measured(policy, latency) | {"kind": "simulated again"} | figures


def measured(policy: str, latency: float, **more: Any) -> dict[str, Any]:
    at = {"application": "retrieval", "adapters": 16, "arrivals": "poisson"}
    at |= {"skew": 0.6, "load": 0.8, "seed": 1} | more
    figures = {"token_latency_ms": latency, "simulated_ms": latency, "prediction_error": 0.05}
    return {"kind": "measured", "policy": policy, **at, **figures}


def test_ratios_compare_the_same_traces_and_the_worst_is_over_all_settings() -> None:
    rows = [
        *(measured("predictive", 9.0), measured("unmerge_only", 10.0), measured("dlora", 12.0)),
        *(measured("predictive", 8.0, seed=2), measured("unmerge_only", 10.0, seed=2)),
        *(measured("predictive", 5.0, skew=0.4), measured("merge_only", 4.0, skew=0.4)),
        measured("punica", 18.0),
        *(simulated_again("predictive", 8.5), simulated_again("unmerge_only", 10.0)),
    ]
    summary = summarize(rows)
    assert summary["vs_unmerge_only"] == pytest.approx((0.9 * 0.8) ** 0.5, abs=1e-4)
    expected = {
        "vs_dlora": 0.75,
        "vs_own_operators": 0.5,
        "worst_vs_best_baseline": 1.25,
        "simulated_worst_vs_best_baseline": 0.85,
        "level_vs_unmerge_only": 0.85,  # each measured latency equals its simulation
        "step_prediction_median_error": 0.05,
        "simulation_median_error": 0.0,
        "adapter_share": 0.08,
        "most_to_win": 0.9,
    }
    assert {key: summary[key] for key in expected} == pytest.approx(expected)
    assert summary["vs_merge_only"] is None


def test_closed_loops_are_compared_round_by_round() -> None:
    rates = {"unmerge_only": (30.0, 15.0, 30.0), "predictive": (27.0, 15.0, 33.0)}
    rows = [
        {"kind": "closed loop", "policy": policy, "round": number, "requests_per_s": rate}
        for policy, by_round in rates.items()
        for number, rate in enumerate(by_round)
    ]
    assert summarize(rows)["closed_loop_vs_unmerge_only"] == 1.0
    assert summarize(rows[:3])["closed_loop_vs_unmerge_only"] is None


def test_a_closed_loop_keeps_the_number_of_concurrent_requests_on_the_demo_checkpoint() -> None:
    grid = {"count": 9, "at_once": 4, "tokens": 3, "adapters": 2}
    (row,) = closed_loop(grid | {"policies": ["unmerge_only"], "rounds": 1})
    assert row["policy"] == "unmerge_only"
    assert row["requests_per_s"] > 0
    assert row["rows_per_step"] > 3


def test_the_table_compares_each_policy_with_first_come_first_served() -> None:
    rows = [measured("unmerge_only", 10.0), measured("predictive", 9.5), measured("paper", 11.0)]
    rows += [measured("unmerge_only", 30.0, seed=2), measured("paper", 33.0, seed=2)]
    means = {row["policy"]: row for row in means_over_seeds(rows)}
    assert means["predictive"]["over"] == pytest.approx(0.95)
    assert means["paper"]["over"] == pytest.approx(1.1)
    assert means["paper"]["token_latency_ms"] == 22.0


def test_every_setting_is_measured_before_another_seed() -> None:
    jobs = jobs_of(json.loads((GRIDS / "policies.json").read_text()))
    measured = [job for job in jobs if job["kind"] == "measured"]
    seeds = [job["seed"] for job in measured]
    assert seeds == sorted(seeds)
    first = {}
    for job in measured:
        first.setdefault((job["seed"], job["application"], job["load"], job["skew"]), job["policy"])
    assert len([key for key in first if key[0] == 1]) == 18
    assert len(set(first.values())) >= 4, "another policy comes first in each trace"
    assert {job["load"] for job in measured if job["policy"] == "slora"} == {0.8}


def test_a_run_that_is_interrupted_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Policies, job: object) -> Iterator[dict[str, Any]]:
        yield {"kind": "capacity", "application": "retrieval", "requests_per_s": 2.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(Policies, "measure", interrupted)
    out = tmp_path / "out.json"
    result = CliRunner().invoke(command_line("policies"), ["--json", str(out)])
    assert result.exit_code == 0, result.output
    assert [row["requests_per_s"] for row in json.loads(out.read_text())["rows"]] == [2.0]


def test_a_run_continues_where_a_former_run_ended_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llava, "MODELS", {"tiny": TINY})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    values = json.loads((GRIDS / "policies.json").read_text())
    values |= values["quick"] | {"model": "tiny", "capacity_count": 3}
    values["own"] = {"policies": ["punica"], "seeds": [1], "at": {"load": 0.8, "skew": 0.6}}
    values["few"] = {"policies": ["unmerge_only", "paper"], "seeds": [1], "adapters": 2}
    values["closed"] = None
    values["workloads"] = [{"application": "retrieval", "scale": 0.02, "count": 4}]
    values["simulated"] |= {"count": 4}
    grid, out = tmp_path / "grid.json", tmp_path / "out.json"
    grid.write_text(json.dumps(values | {"quick": {}}))
    command = [
        "--grid",
        str(grid),
        "--json",
        str(out),
        "--root",
        str(tmp_path / "made"),
    ]
    first = CliRunner().invoke(command_line("policies"), [*command, "--minutes", "0"])
    assert first.exit_code == 0, first.output
    assert [row["kind"] for row in json.loads(out.read_text())["rows"]] == ["capacity"]
    second = CliRunner().invoke(
        command_line("policies"), [*command, "--plot", str(tmp_path / "plots")]
    )
    assert second.exit_code == 0, second.output
    written = json.loads(out.read_text())
    done = {row["policy"] for row in written["rows"] if row["kind"] == "measured"}
    assert done == {*BASELINES, "predictive", "paper", "punica"}
    kinds = [row["kind"] for row in written["rows"]]
    assert set(kinds) == {"capacity", "measured", "few adapters", "simulated again", "simulated"}
    assert kinds.count("few adapters") == 2
    keys = ("vs_dlora", "vs_own_operators", "worst_vs_best_baseline", "adapter_share")
    assert all(written["summary"][key] > 0 for key in keys)
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {f"figure-{n}.png" for n in ("19-policies", "21-two-adapters", "22-systems")} <= drawn
    third = CliRunner().invoke(command_line("policies"), [*command, "--dtype", "fp32"])
    assert third.exit_code != 0
    assert "other conditions" in third.output
