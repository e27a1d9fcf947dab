"""Tests of the policies: Algorithm 1 of the paper, and other policies."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.baseline_policies import DLora, MergeOnly, register
from tests.support.policy_costs import STEP_SECONDS, SWITCH_SECONDS, FixedCosts
from vlora.config import POLICIES, Options
from vlora.engine.cost import AdapterSize, CostModel, guess
from vlora.engine.policies.base import Candidate, Choice, Policy, make_policy
from vlora.engine.policies.paper import PaperPolicy
from vlora.engine.policies.predictive import CHUNK_ROWS, Predictive
from vlora.engine.policies.unmerge_only import UnmergeOnly
from vlora.errors import InvalidArgument
from vlora.ids import BASE


def requests(*groups: tuple[int, float]) -> list[Candidate]:
    """Return one candidate per (slot, wait), in order of arrival."""
    return [
        Candidate(f"r{i}", slot, float(i), wait, adapter=None if slot == BASE else f"a{slot}")
        for i, (slot, wait) in enumerate(groups)
    ]


def decision(choice: Choice) -> tuple[list[str], int]:
    return [r.id for r in choice.order], choice.live


SHORT_WAIT, LONG_WAIT = 0.1, 2.0
"""Waits in seconds below and above θ of PAPER, which is 0.4 to 1.2: only the second one starves."""
PAPER = PaperPolicy(4, 40.0, math.inf, FixedCosts())


def choose(policy: Policy, ready: list[Candidate], live: int = BASE) -> tuple[list[str], int]:
    return decision(policy.choose(ready, live, 0.0))


def test_the_step_is_merged_if_no_request_starves_and_one_adapter_has_over_half() -> None:
    ready = requests((1, SHORT_WAIT), (2, SHORT_WAIT), (1, SHORT_WAIT), (1, SHORT_WAIT))
    assert choose(PAPER, ready) == (["r0", "r2", "r3"], 1)


def test_a_merged_batch_is_cut_at_maxbs() -> None:
    assert choose(PAPER, requests(*[(1, 0.0)] * 6)) == (["r0", "r1", "r2", "r3"], 1)


def test_a_mixture_batch_has_starved_requests_first_and_then_the_candidates_own() -> None:
    ready = requests(
        (1, SHORT_WAIT), (1, SHORT_WAIT), (1, SHORT_WAIT), (2, LONG_WAIT), (1, SHORT_WAIT)
    )
    assert choose(PAPER, ready) == (["r3", "r0", "r1", "r2"], 1)


def test_the_step_is_unmerged_if_half_starves_and_starved_requests_go_first() -> None:
    ready = requests(
        (1, SHORT_WAIT), (1, SHORT_WAIT), (1, SHORT_WAIT), (2, LONG_WAIT), (3, LONG_WAIT)
    )
    assert choose(PAPER, ready) == (["r3", "r4", "r0", "r1"], BASE)


def test_the_step_is_unmerged_if_no_adapter_has_over_half() -> None:
    assert choose(PAPER, requests((1, 0.0), (2, 0.0), (1, 0.0), (3, 0.0)))[1] == BASE


def test_credit_is_the_sum_of_wait_next_step_and_switch() -> None:
    ready = requests((1, 0.25), (2, 0.5), (BASE, 0.0))
    credits = PAPER.choose(ready, 1, 0.0).credits
    assert credits == {
        "r0": 0.25 + STEP_SECONDS,
        "r1": 0.5 + STEP_SECONDS + SWITCH_SECONDS,
        "r2": STEP_SECONDS,
    }


def test_starved_requests_are_cut_at_maxbs() -> None:
    order, _ = choose(PAPER, requests(*[(slot, LONG_WAIT) for slot in range(6)]))
    assert order == ["r0", "r1", "r2", "r3"]


def test_a_prompt_that_takes_longer_than_others_wait_is_not_starved_at_its_arrival() -> None:
    ready = requests((1, SHORT_WAIT), (1, 0.0), (1, 0.0), (2, 0.0))
    ready[3] = ready[3]._replace(missing=1000)
    assert choose(PAPER, ready) == (["r0", "r1", "r2"], 1)


def test_overdue_requests_and_urgent_deadlines_starve_and_others_go_by_priority() -> None:
    ready = requests(*[(1, 0.0)] * 4, (2, 0.0))
    urgent = [*ready[:4], ready[4]._replace(deadline=0.01)]
    assert choose(PAPER, urgent) == (["r4", "r0", "r1", "r2"], 1)
    later = [*ready[:4], ready[4]._replace(deadline=9.0)]
    assert choose(PAPER, later) == (["r0", "r1", "r2", "r3"], 1)
    bounded = PaperPolicy(4, 40.0, 0.2, FixedCosts())
    overdue = [*ready[:4], ready[4]._replace(wait=0.3, priority=9)]
    assert choose(bounded, overdue) == (["r4", "r0", "r1", "r2"], 1)
    preferred = [*ready[:3], ready[3]._replace(priority=-1), ready[4]]
    assert choose(PAPER, preferred) == (["r3", "r0", "r1", "r2"], 1)


def test_at_low_load_half_of_the_ready_requests_suffices_for_a_merge() -> None:
    assert choose(PAPER, requests((1, 0.0), (1, 0.0))) == (["r0", "r1"], 1)


def test_starved_requests_of_the_merged_adapter_do_not_count_against_it() -> None:
    ready = requests((1, LONG_WAIT), (1, LONG_WAIT), (1, SHORT_WAIT), (2, SHORT_WAIT))
    assert choose(PAPER, ready) == (["r0", "r1", "r2"], 1)


def test_ties_keep_the_live_adapter() -> None:
    ready = requests(*[(1, 0.0), (2, 0.0)] * 2)
    policy = PaperPolicy(2, 40.0, math.inf, FixedCosts())
    assert [choose(policy, ready, live)[1] for live in (BASE, 1, 2)] == [1, 1, 2]


def test_without_a_mergeable_adapter_the_base_models_requests_do_not_fill_the_step() -> None:
    costs = FixedCosts()
    costs.unmergeable = frozenset({1})
    policy = PaperPolicy(4, 40.0, math.inf, costs)
    ready = requests((BASE, 0.0), (BASE, 0.0), (1, 0.0), (BASE, 0.0))
    assert choose(policy, ready) == (["r0", "r1", "r2", "r3"], BASE)
    assert choose(policy, requests(*[(1, 0.0)] * 4))[1] == BASE


def test_requests_of_a_premerged_adapter_and_of_the_base_are_merged_without_a_switch() -> None:
    ready = requests((1, 0.0), (2, 0.0), (BASE, 0.0), (1, 0.0))
    assert choose(PAPER, ready) == (["r0", "r1", "r2", "r3"], BASE)
    premerged = PaperPolicy(4, 40.0, math.inf, FixedCosts(), "a1")
    assert choose(premerged, ready) == (["r0", "r2", "r3"], BASE)
    cold = requests((2, 0.0), (2, 0.0), (2, 0.0), (1, 0.0))
    assert choose(premerged, cold) == (["r0", "r1", "r2"], 2)


# -- other policies -------------------------------------------------------------------------------


def test_unmerge_only_is_first_come_first_served() -> None:
    ready = requests((1, 0.0), (1, 9.0), (2, 0.0))
    assert decision(UnmergeOnly(2).choose(ready, BASE, 0.0)) == (["r0", "r1"], BASE)


def test_unmerge_only_sorts_by_priority_and_bounds_the_waits() -> None:
    ready = [
        Candidate("old", 0, wait=9.0, priority=5),
        Candidate("low", 0, priority=1),
        Candidate("high", 1),
    ]
    assert decision(UnmergeOnly(2).choose(ready, BASE, 0.0)) == (["high", "low"], BASE)
    assert decision(UnmergeOnly(2, 8.0).choose(ready, BASE, 0.0)) == (["old", "high"], BASE)


def test_a_request_with_pages_keeps_running_when_the_adapter_of_an_older_one_is_loaded() -> None:
    older, runs = Candidate("older", 0), Candidate("runs", 1, arrival=1.0, holds_pages=True)
    assert decision(UnmergeOnly(1).choose([older, runs], BASE, 0.0)) == (["runs"], BASE)
    urgent = older._replace(priority=-1)
    assert decision(UnmergeOnly(1).choose([urgent, runs], BASE, 0.0)) == (["older"], BASE)
    late = older._replace(wait=9.0)
    assert decision(UnmergeOnly(1, 8.0).choose([late, runs], BASE, 0.0)) == (["older"], BASE)


def test_merge_only_serves_the_oldest_requests_adapter() -> None:
    ready = requests((2, 0.0), (1, 0.0), (2, 0.0), (1, 0.0))
    assert decision(MergeOnly(4, FixedCosts()).choose(ready, 1, 0.0)) == (["r0", "r2"], 2)


def test_dlora_merges_full_batches_and_moves_credit_to_requests_it_passed_over() -> None:
    policy = DLora(4, FixedCosts())
    same_adapter = requests(*[(1, 0.0)] * 4)
    assert decision(policy.choose(same_adapter, BASE, 0.0)) == (["r0", "r1", "r2", "r3"], 1)
    mixed = requests((1, 0.0), (1, 0.0), (1, 0.0), (2, 0.0))
    assert policy.choose(mixed, 1, 0.0).live == BASE, "merged steps are no faster here"
    policy = DLora(4, FixedCosts())
    policy._profiled = True
    policy.choose(same_adapter, BASE, 0.0)
    choice = policy.choose(mixed, 1, 0.0)
    assert decision(choice) == (["r0", "r1", "r2"], 1)
    assert policy._credit["a2"] == -policy._credit["a1"] > 0
    policy._credit["a2"] += 20_000
    order, live = decision(policy.choose(mixed, 1, 0.0))
    assert (order[0], live) == ("r3", BASE)


def test_dlora_keeps_credit_with_the_adapter_when_its_slot_passes_to_another() -> None:
    policy = DLora(4, FixedCosts())
    before = requests((1, 0.0), (1, 0.0), (1, 0.0), (2, 0.0))
    policy.choose(before, BASE, 0.0)
    policy._credit["a2"] += 20_000
    replaced = [*before[:3], before[3]._replace(adapter="another")]
    assert decision(policy.choose(replaced, BASE, 0.0))[0] == ["r0", "r1", "r2", "r3"]
    moved = [*before[:3], before[3]._replace(slot=5)]
    assert decision(policy.choose(moved, BASE, 0.0))[0][0] == "r3"


# -- predictive ------------------------------------------------------------------------------


def predictive(
    max_wait: float = math.inf, max_rows: int = 64, loss: float = 0.05, **more: Any
) -> Predictive:
    """Return a policy with costs that differ from FixedCosts in the attributes `more`."""
    costs = FixedCosts()
    vars(costs).update(more)
    return Predictive(16, max_rows, max_wait, loss, costs)


def rows_of(policy: Predictive, *ready: Candidate) -> dict[str, int]:
    """Return the rows of the requests that run, in order. No adapter is live."""
    choice = policy.choose(ready, BASE, 0.0)
    assert choice.max_rows is not None
    return {r.id: choice.max_rows[r.id] for r in choice.order}


def test_predictive_merges_if_the_present_work_repays_the_switch() -> None:
    short, long = (Candidate("a", 1, missing=rows) for rows in (100, 300))
    other = Candidate("b", 2, missing=10)
    assert predictive().choose([short, other], BASE, 0.0).live == BASE
    assert predictive().choose([long, other], BASE, 0.0).live == 1
    assert predictive().choose([short, other], 1, 0.0).live == 1, "it is merged already"
    assert predictive().choose([short, Candidate("b", 2, missing=101)], 1, 0.0).live == BASE


def test_a_merge_saves_the_lora_calls_of_steps_without_other_adapters() -> None:
    answer = Candidate("a", 1, remaining=5)
    assert predictive().choose([answer], BASE, 0.0).live == BASE, "saves 12.6 ms and costs 20 ms"
    policy = predictive(lora_call_seconds=2e-3)
    assert policy.choose([answer], BASE, 0.0).live == 1
    assert policy.choose([answer, Candidate("b", 2, remaining=5)], BASE, 0.0).live == BASE


def test_prompts_follow_one_another_in_the_smallest_chunks_that_keep_the_throughput() -> None:
    answer = Candidate("answer", BASE, 2.0, remaining=400, holds_pages=True)
    first, second = (Candidate(name, BASE, missing=50, remaining=9) for name in ("p0", "p1"))
    # Up to eight rows take as long as one, so that a step with 16 + 1 rows is as fast per row.
    assert rows_of(predictive(), first, second, answer) == {"answer": 1, "p0": CHUNK_ROWS[0]}
    started = first._replace(missing=9, holds_pages=True)
    assert rows_of(predictive(), second, started, answer) == {"p0": 9, "answer": 1, "p1": 7}
    assert rows_of(predictive(), first, second) == {"p0": 50}, "it delays no answer"
    assert rows_of(predictive(max_rows=1024), first._replace(missing=1000)) == {"p0": 1000}


def test_a_step_has_more_rows_where_fewer_would_cost_throughput() -> None:
    answer = Candidate("answer", BASE, holds_pages=True)
    long = Candidate("long", BASE, missing=1000)
    for overhead, loss, rows in ((0.0, 0.0, 16), (1e-3, 0.05, 32), (1e-2, 0.05, 256)):
        policy = predictive(max_rows=1024, loss=loss, overhead_seconds=overhead)
        assert rows_of(policy, long, answer)["long"] == rows, (overhead, loss)
    policy = predictive(max_rows=1024, loss=0.0, overhead_seconds=1e-3)
    assert rows_of(policy, long, answer)["long"] == 1000


def test_a_merge_that_loses_what_another_would_cost_ends_and_is_trusted_less() -> None:
    policy = predictive(lora_call_seconds=2e-3)
    hot = Candidate("a", 1, remaining=20)
    assert policy.choose([hot], BASE, 0.0).live == 1
    # Others come in every step, so that the merge makes all steps longer.
    others = [Candidate(f"b{i}", 2, remaining=1) for i in range(15)]
    lives = [policy.choose([hot, *others], 1, 0.0).live for _ in range(30)]
    last = lives.index(BASE)
    assert 5 < last < 20
    assert policy.merging.realised_gain < 0.0 < policy.merging.predicted_gain
    for _ in range(5):
        live = policy.choose([hot], BASE, 0.0).live
        for _ in range(30):
            live = policy.choose([hot, *others], live, 0.0).live
    assert policy.choose([hot], BASE, 0.0).live == BASE, "the same prediction is no longer enough"


def test_an_adapter_is_not_merged_if_measured_steps_lose_more_than_the_profile_promises() -> None:
    hot = Candidate("a", 1, missing=60, remaining=20)
    assert predictive().choose([hot], BASE, 0.0).live == 1
    for live in (BASE, 1):
        choice = predictive(merged_seconds=3e-3).choose([hot], live, 0.0)
        assert choice.live == BASE, "60 ms are lost in 20 steps, and 50 ms saved"


def test_overdue_requests_go_first_then_urgent_deadlines_then_priorities_then_arrivals() -> None:
    prompt = Candidate("prompt", BASE, missing=64)
    urgent = Candidate("urgent", BASE, 1.0, missing=20, deadline=0.03)
    later = Candidate("later", BASE, 2.0, missing=20, deadline=9.0)
    assert list(rows_of(predictive(), prompt, later, urgent)) == ["urgent"]
    preferred = Candidate("preferred", BASE, 3.0, missing=64, priority=-1)
    assert list(rows_of(predictive(), prompt, preferred)) == ["preferred"]
    cold = Candidate("cold", 2, 1.0, wait=9.0, missing=64, priority=9)
    assert list(rows_of(predictive(8.0), prompt, cold)) == ["cold"]
    assert list(rows_of(predictive(10.0), prompt, cold)) == ["prompt"]
    begun = prompt._replace(id="begun", wait=8.5, holds_pages=True)
    assert list(rows_of(predictive(8.0), begun, cold)) == ["begun"], "overdue ones do not alternate"


# -- the registry ----------------------------------------------------------------------------


def test_policies_are_made_by_their_names_and_others_are_refused_with_the_valid_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = CostModel(guess(10**8, 4, 10**7), lambda slot: AdapterSize(10**6, 10**9))
    for name in POLICIES:
        assert callable(make_policy(Options(policy=name), costs).choose), name
    monkeypatch.delitem(POLICIES, "merge_only", raising=False)
    for gone in ("merge_only", "credit"):
        with pytest.raises(InvalidArgument, match=f"'{gone}' is unknown.* It must be paper, "):
            make_policy(Options(policy=gone), costs)
    register()
    assert isinstance(make_policy(Options(policy="merge_only"), costs), MergeOnly)
