"""Tests of the policies benchmark: traces, simulation, summary, and a run of a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import llava
from benchmarks.frame import GRIDS, Row, command_line
from benchmarks.policies import (
    FCFS,
    FIGURES,
    Case,
    ChipEngine,
    Policies,
    by_policy,
    drawn_case,
    errors,
    summarize,
    timed_trace,
)
from benchmarks.published_operators import OPERATORS
from benchmarks.replay import Replay, Simulation
from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import LoraPair, Segment
from vlora.config import Options
from vlora.engine.cost import AdapterSize, CostModel, Profile
from vlora.load.trace import TracedRequest, Workload

GRID = json.loads((GRIDS / "policies.json").read_text())
OWN_POLICIES = (FCFS, "predictive", "paper")
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
    return Simulation(trace, Options(policy=policy), costs()).run()


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
    work = Workload(application, 0.6, 16, scale=1 / 8 if application == "retrieval" else 1 / 16)
    for rate in (1.0, 3.0):
        trace = work.trace(1, rate, 30)
        ours = replay("predictive", trace)
        assert len(ours.outcome.end) == 30
        for baseline in (FCFS, "merge_only", "dlora"):
            assert ours.token_latency < 1.03 * replay(baseline, trace).token_latency


@pytest.mark.parametrize("seed", range(16))
def test_drawn_traces_have_full_steps_bounded_waits_and_are_no_slower_with_predictive(
    seed: int,
) -> None:
    case = drawn_case(seed, 64, GRID)
    engine = ChipEngine(case)
    trace = timed_trace(case, engine)
    rows = {name: engine.simulate(name, trace, **case.options).as_row() for name in OWN_POLICIES}
    for key, bar in zip(FIGURES, (1.02, 1.05, 1.05), strict=True):
        # A request that misses its deadline is no more work.
        assert case.deadlines or rows["predictive"][f"{key}_s"] <= bar * rows[FCFS][f"{key}_s"]
    assert case.deadlines == bool(rows[FCFS]["late"])
    assert rows["predictive"]["late"] <= rows[FCFS]["late"]
    for name, own in rows.items():
        assert own["longest_wait_s"] <= own["wait_bound_s"], name
        assert own["underfilled_steps"] == 0, name
    assert engine.simulate("merge_only", trace, **case.options).underfilled_steps
    # dLoRA has no mixture, but running requests go on if those that it chose get no pages.
    assert engine.simulate("dlora", trace, **case.options).as_row()["mixture"] < 0.01


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


def row(policy: str, seed: int = 1, mean: float = 1.0, merged: float = 0.0, **more: Any) -> Row:
    times = {"mean_s": mean, "p99_s": 2 * mean, "duration_s": 9.0}
    modes = {"merged": merged, "mixture": merged / 2, "unmerged": 1 - 1.5 * merged}
    at = {"chip": "this machine", "seed": seed, "skew": 0.6, "switches": 3}
    at |= {"switch_s": 0.1, "adapter_share": 0.08, "wait_bound_s": None}
    at |= {"deadlines": False, "late": 0}
    return {"policy": policy, **at, **times, **modes, **more}


def test_policies_are_compared_on_the_same_traces_where_they_merged() -> None:
    rows = [
        *(row("unmerge_only", seed, mean) for seed, mean in ((1, 1.0), (2, 2.0), (3, 4.0))),
        *(row("unmerge_only again", 1, 1.1), row("dlora", 1, 9.0, 0.01), row("punica", 1, 5.0)),
        *(row("paper", 1, 0.5, 0.4), row("paper", 2, 4.0, 0.4, skew=0.4)),
        row("paper", 3, 40.0, 0.01),
    ]
    found = {made["policy"]: made for made in by_policy(rows)}
    assert (found["paper"]["traces"], found["paper"]["exercised_in"]) == (3, 2)
    assert found["paper"]["mean"] == pytest.approx((0.5 * 2.0) ** 0.5)
    assert (found["paper"]["mean_if_hot"], found["paper"]["worst_p99"]) == (0.5, 10.0)
    assert found["paper"]["merged"] == pytest.approx(0.27)
    assert (found["dlora"]["mean"], found["dlora"]["worst_mean"]) == ("not exercised", 9.0)
    assert found["punica"]["worst_mean"] == 5.0
    late = [
        row(name, 6, 9.0, 0.4, deadlines=True, late=n)
        for name, n in (("unmerge_only", 5), ("predictive", 3))
    ]
    assert by_policy(late)[1]["late"] == 3
    assert by_policy(late)[1]["mean_of_all"] is None, "more requests in time are more work"
    assert summarize(late)["predictive_late_beyond_best"] == -2
    summary = summarize(rows)
    assert summary["paper_share_with_all_modes"] == pytest.approx(2 / 3)
    assert (summary["noise_floor"], summary["adapter_share"]) == pytest.approx((0.1, 0.08))


def test_a_simulation_is_compared_with_its_replay() -> None:
    rows = [
        *(row("unmerge_only", seed, 2.0, simulated_s=s) for seed, s in ((1, 2.2), (2, 2.0))),
        row("paper", 1, 2.0, simulated_s=1.0),
    ]
    found = {made["policy"]: made["largest_error"] for made in errors(rows)}
    assert found == pytest.approx({"unmerge_only": 0.1, "paper": 0.5, "all": 0.5})
    assert summarize(rows)["simulation_median_error"] == pytest.approx(0.1)


def test_a_run_that_is_interrupted_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Policies, case: Case) -> Iterator[Row]:
        yield asdict(case) | row("unmerge_only", case.seed)
        raise KeyboardInterrupt

    monkeypatch.setattr(Policies, "measure", interrupted)
    out = tmp_path / "out.json"
    command = ["--json", str(out), "--replays", "0", "--simulations", "2"]
    result = CliRunner().invoke(command_line("policies"), command)
    assert result.exit_code == 0, result.output
    assert [row["policy"] for row in json.loads(out.read_text())["rows"]] == ["unmerge_only"]


def test_a_run_replays_a_bounded_number_of_traces_and_a_later_one_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llava, "MODELS", {"tiny": TINY})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    values = GRID | {"model": "tiny", "count": 4, "scale": 1 / 50}
    values["own"] = {"policies": ["punica"], "replays": 1}
    grid, out = tmp_path / "grid.json", tmp_path / "out.json"
    grid.write_text(json.dumps(values))
    files = ["--grid", str(grid), "--json", str(out), "--root", str(tmp_path / "made")]
    command = [*files, "--seed", "3", "--simulations", "1", "--plot", str(tmp_path / "plots")]
    for replays in ("1", "2"):
        result = CliRunner().invoke(command_line("policies"), [*command, "--replays", replays])
        assert result.exit_code == 0, result.output
        assert "1 traces to replay take about" in result.output
        assert " switches in " in result.output
    written = json.loads(out.read_text())
    replayed = [r for r in written["rows"] if r["chip"] == "this machine"]
    assert [r["seed"] for r in replayed] == [3] * 7 + [4] * 6
    assert {r["policy"] for r in replayed} == {*GRID["policies"], "punica"}
    assert all(r["simulated_s"] > 0 for r in replayed if r["policy"] != "punica")
    assert len(written["rows"]) == len(replayed) + 5
    assert written["summary"]["noise_floor"] > 0
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {"replayed.png", "simulated.png", "modes.png"}
    result = CliRunner().invoke(command_line("policies"), [*files, "--dtype", "fp32"])
    assert result.exit_code != 0
    assert "other conditions" in result.output
