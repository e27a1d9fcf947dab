"""Algorithm 1 line by line, each departure of ours, the baselines, and the bound on waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.baseline_policies.dlora import DLora
from benchmarks.baseline_policies.merge_only import MergeOnly
from vlora.engine.policies.base import Candidate, Choice, Policy
from vlora.engine.policies.credit import CreditConfig, CreditPolicy, default_credit
from vlora.engine.policies.predictive import CHUNK_ROWS, Predictive
from vlora.engine.policies.unmerge_only import UnmergeOnly
from vlora.ids import BASE

STEP, SWITCH = 0.01, 0.02


class Costs:
    """A row takes a millisecond beyond what rides along, an adapter two to bring."""

    unmergeable: frozenset[int] = frozenset()
    around = 0.0
    any = 0.0

    def step(self, ready: Sequence[Candidate], live: int) -> float:
        return STEP

    def switch(self, live: int, to: int) -> float:
        return 0.0 if to in (BASE, live) else SWITCH

    def mergeable(self, slot: int) -> bool:
        return slot not in self.unmergeable

    def products(self, rows: int, answers: int) -> float:
        return 1e-3 * max(8, rows)

    def overhead(self, requests: int) -> float:
        return self.around

    def attention(self, rows: int, context: int) -> float:
        return 0.0

    def lora_calls(self) -> float:
        return self.any

    def read_adapter(self, slot: int) -> float:
        return 0.0 if slot == BASE else 2e-3

    def apply_adapter(self, slot: int, rows: int) -> float:
        return 0.0 if slot == BASE else 1e-4 * rows


def requests(*groups: tuple[int, float]) -> list[Candidate]:
    """One for each (slot, wait), in order of arrival."""
    return [Candidate(f"r{i}", slot, float(i), wait) for i, (slot, wait) in enumerate(groups)]


def said(choice: Choice) -> tuple[list[str], int]:
    return [r.id for r in choice.order], choice.live


LITERAL = CreditConfig(max_batch=4, theta_min=1.0)
NOBODY = 0.5
"""Seconds of wait that starve nobody; with θ = 1 the next starves."""
STARVES = 2.0


def choose(rule: CreditConfig, ready: list[Candidate], live: int = BASE) -> tuple[list[str], int]:
    return said(CreditPolicy(rule, Costs()).choose(ready, live, 0.0))


def test_merged_where_nobody_starves_and_one_adapter_has_over_half() -> None:
    ready = requests((1, NOBODY), (2, NOBODY), (1, NOBODY), (1, NOBODY))
    assert choose(LITERAL, ready) == (["r0", "r2", "r3"], 1)


def test_merged_batches_are_cut_at_maxbs() -> None:
    assert choose(LITERAL, requests(*[(1, 0.0)] * 6)) == (["r0", "r1", "r2", "r3"], 1)


def test_mixture_takes_the_starved_first_and_fills_up_with_the_candidates() -> None:
    ready = requests((1, NOBODY), (1, NOBODY), (1, NOBODY), (2, STARVES), (1, NOBODY))
    assert choose(LITERAL, ready) == (["r3", "r0", "r1", "r2"], 1)


def test_unmerged_where_half_starves_with_the_starved_first() -> None:
    ready = requests((1, NOBODY), (1, NOBODY), (1, NOBODY), (2, STARVES), (3, STARVES))
    assert choose(LITERAL, ready) == (["r3", "r4", "r0", "r1"], BASE)


def test_unmerged_where_no_adapter_has_over_half() -> None:
    assert choose(LITERAL, requests((1, 0.0), (2, 0.0), (1, 0.0), (3, 0.0)))[1] == BASE


def test_credit_is_wait_and_the_next_step_and_the_switch() -> None:
    ready = requests((1, 0.25), (2, 0.5), (BASE, 0.0))
    credits = CreditPolicy(LITERAL, Costs()).choose(ready, 1, 0.0).credits
    assert credits == {"r0": 0.25 + STEP, "r1": 0.5 + STEP + SWITCH, "r2": STEP}


def test_more_starved_than_maxbs_are_cut_there() -> None:
    order, _ = choose(LITERAL, requests(*[(slot, STARVES) for slot in range(6)]))
    assert order == ["r0", "r1", "r2", "r3"]


# -- departures, one by one ------------------------------------------------------------------


def test_theta_grows_with_the_median_wait() -> None:
    ready = requests((1, 3.0), (1, 3.0), (1, 3.0), (2, 4.0))
    assert choose(LITERAL, ready)[1] == BASE
    assert choose(replace(LITERAL, theta_factor=2.0), ready) == (["r0", "r1", "r2"], 1)


def test_whoever_has_waited_as_long_as_the_bound_is_starved_whatever_theta_is() -> None:
    ready = requests((1, 3.0), (1, 3.0), (1, 3.0), (2, 4.0))
    rule = replace(LITERAL, theta_factor=2.0, max_wait=3.9)
    assert choose(rule, ready) == (["r3", "r0", "r1", "r2"], 1)


def test_halves_of_what_is_ready_let_low_load_merge() -> None:
    ready = requests((1, 0.0), (1, 0.0))
    assert choose(LITERAL, ready)[1] == BASE
    assert choose(replace(LITERAL, compare_to_ready=True), ready)[1] == 1


def test_starved_requests_of_the_candidate_need_no_delora_and_do_not_count() -> None:
    ready = requests((1, STARVES), (1, STARVES), (1, NOBODY), (2, NOBODY))
    assert choose(LITERAL, ready)[1] == BASE
    assert choose(replace(LITERAL, exclude_own_starved=True), ready) == (["r0", "r1", "r2"], 1)


def test_ties_keep_the_live_adapter() -> None:
    rule = replace(LITERAL, max_batch=2)
    ready = requests(*[(1, 0.0), (2, 0.0)] * 2)
    assert choose(rule, ready, live=2)[1] == 1
    assert choose(replace(rule, ties_keep_live=True), ready, live=2)[1] == 2


def test_the_base_is_a_candidate_with_nothing_to_merge() -> None:
    ready = requests((BASE, 0.0), (BASE, 0.0), (BASE, 0.0), (1, 0.0))
    assert choose(LITERAL, ready)[0] == ["r0", "r1", "r2", "r3"]
    assert choose(replace(LITERAL, base_is_candidate=True), ready) == (["r0", "r1", "r2"], BASE)


def test_the_starved_go_by_credit() -> None:
    ready = requests((1, 2.0), (2, 4.0), (3, 3.0))
    assert choose(LITERAL, ready)[0] == ["r0", "r1", "r2"]
    assert choose(replace(LITERAL, sort_by_credit=True), ready)[0] == ["r1", "r2", "r0"]


def test_an_adapter_that_cannot_be_merged_is_no_candidate() -> None:
    costs = Costs()
    costs.unmergeable = frozenset({1})
    choice = CreditPolicy(LITERAL, costs).choose(requests(*[(1, 0.0)] * 4), BASE, 0.0)
    assert choice.live == BASE


# -- baselines -------------------------------------------------------------------------------


def test_unmerge_only_is_first_come_first_served() -> None:
    ready = requests((1, 0.0), (1, 9.0), (2, 0.0))
    assert said(UnmergeOnly(2).choose(ready, BASE, 0.0)) == (["r0", "r1"], BASE)


def test_unmerge_only_goes_by_priority_and_lets_nobody_wait_for_ever() -> None:
    ready = [
        Candidate("old", 0, wait=9.0, priority=5),
        Candidate("low", 0, priority=1),
        Candidate("high", 1),
    ]
    assert said(UnmergeOnly(2).choose(ready, BASE, 0.0)) == (["high", "low"], BASE)
    assert said(UnmergeOnly(2, 8.0).choose(ready, BASE, 0.0)) == (["old", "high"], BASE)


def test_who_has_pages_keeps_them_when_an_older_ones_adapter_comes() -> None:
    older, runs = Candidate("older", 0), Candidate("runs", 1, arrival=1.0, holds_pages=True)
    assert said(UnmergeOnly(1).choose([older, runs], BASE, 0.0)) == (["runs"], BASE)
    urgent = older._replace(priority=-1)
    assert said(UnmergeOnly(1).choose([urgent, runs], BASE, 0.0)) == (["older"], BASE)
    late = older._replace(wait=9.0)
    assert said(UnmergeOnly(1, 8.0).choose([late, runs], BASE, 0.0)) == (["older"], BASE)


def test_merge_only_serves_the_oldest_requests_adapter() -> None:
    ready = requests((2, 0.0), (1, 0.0), (2, 0.0), (1, 0.0))
    assert said(MergeOnly(4, Costs()).choose(ready, 1, 0.0)) == (["r0", "r2"], 2)


def test_dlora_merges_whole_batches_keeps_what_pays_and_pays_back_those_passed_over() -> None:
    policy = DLora(4, Costs())
    alike = requests(*[(1, 0.0)] * 4)
    assert said(policy.choose(alike, BASE, 0.0)) == (["r0", "r1", "r2", "r3"], 1)
    mixed = requests((1, 0.0), (1, 0.0), (1, 0.0), (2, 0.0))
    assert policy.choose(mixed, 1, 0.0).live == BASE, "merged steps are no faster here"
    policy = DLora(4, Costs())
    policy._profiled = True
    policy.choose(alike, BASE, 0.0)
    choice = policy.choose(mixed, 1, 0.0)
    assert said(choice) == (["r0", "r1", "r2"], 1)
    assert policy._credit[2] == -policy._credit[1] > 0
    policy._credit[2] += 20_000
    order, live = said(policy.choose(mixed, 1, 0.0))
    assert (order[0], live) == ("r3", BASE)


# -- predictive ------------------------------------------------------------------------------


def predictive(max_wait: float = math.inf, unmergeable: frozenset[int] = frozenset()) -> Predictive:
    costs = Costs()
    costs.unmergeable = unmergeable
    return Predictive(16, 64, max_wait, costs)


def test_the_predictive_policy_merges_where_the_work_at_hand_repays_the_switch() -> None:
    few, many = (Candidate("a", 1, missing=rows) for rows in (100, 300))
    other = Candidate("b", 2, missing=10)
    assert predictive().choose([few, other], BASE, 0.0).live == BASE
    assert predictive().choose([many, other], BASE, 0.0).live == 1
    assert predictive().choose([few, other], 1, 0.0).live == 1, "it is there already"
    assert predictive().choose([few, Candidate("b", 2, missing=101)], 1, 0.0).live == BASE


def test_a_merge_saves_the_calls_of_steps_that_have_nobody_else() -> None:
    costs = Costs()
    policy = Predictive(16, 64, math.inf, costs)
    answers = [Candidate("a", 1, remaining=5)]
    assert policy.choose(answers, BASE, 0.0).live == BASE, "12.6 ms of it, for 20 ms"
    costs.any = 2e-3
    assert policy.choose(answers, BASE, 0.0).live == 1
    assert policy.choose([*answers, Candidate("b", 2, remaining=5)], BASE, 0.0).live == BASE


def test_short_requests_go_first_and_answers_ride_along() -> None:
    prompt = Candidate("prompt", BASE, 0.0, missing=50, remaining=9)
    short = Candidate("short", BASE, 1.0, missing=3, remaining=1)
    answer = Candidate("answer", BASE, 2.0, remaining=400)
    choice = predictive().choose([prompt, short, answer], BASE, 0.0)
    assert choice.max_rows == {"short": 3, "answer": 1}, "no part of a prompt, nor all of it"
    assert predictive().choose([prompt], BASE, 0.0).max_rows == {"prompt": 50}


def test_a_long_prompt_goes_in_parts_that_make_good_use_of_the_machine() -> None:
    long = Candidate("long", BASE, missing=1000, remaining=9)
    rows = Predictive(16, 1024, math.inf, Costs()).choose([long], BASE, 0.0).max_rows
    assert rows is not None
    assert CHUNK_ROWS[0] <= rows["long"] < 1000, "whoever comes meanwhile waits for no more"


def test_an_adapter_waits_for_company_where_its_bytes_cost_more_than_it_brings() -> None:
    rows = [Candidate(f"a{i}", 1, remaining=3) for i in range(7)]
    lone = Candidate("lone", 2, remaining=200)
    policy = predictive(unmergeable=frozenset({1, 2}))
    choice = policy.choose([*rows, lone], BASE, 0.0)
    assert "lone" not in {r.id for r in choice.order}
    alone = policy.choose([lone], BASE, 0.0)
    assert [r.id for r in alone.order] == ["lone"]


def test_requests_of_an_adapter_share_what_it_costs_to_bring() -> None:
    mine = [Candidate(f"a{i}", 1, remaining=3) for i in range(4)]
    others = [Candidate(f"b{i}", 2, remaining=10) for i in range(4)]
    policy = predictive(unmergeable=frozenset({1, 2}))
    assert {r.slot for r in policy.choose([*mine, others[0]], BASE, 0.0).order} == {1}
    assert len(policy.choose([*mine, *others], BASE, 0.0).order) == 8


def test_the_calls_of_a_step_with_adapters_are_borne_by_all_that_have_one() -> None:
    plain = [Candidate(f"base{i}", BASE, remaining=3) for i in range(2)]
    lone, *company = [Candidate(f"a{i}", 1, remaining=6) for i in range(5)]
    costs = Costs()
    costs.unmergeable = frozenset({1})
    policy = Predictive(16, 64, math.inf, costs)
    assert len(policy.choose([*plain, lone], BASE, 0.0).order) == 3
    costs.any = 6e-3
    assert len(policy.choose([*plain, lone], BASE, 0.0).order) == 2
    assert len(policy.choose([*plain, lone, *company], BASE, 0.0).order) == 7


def test_what_a_step_costs_beside_its_forward_pass_keeps_requests_together() -> None:
    rows = [Candidate(f"a{i}", 1, remaining=3) for i in range(7)]
    costs = Costs()
    costs.unmergeable = frozenset({1, 2})
    policy = Predictive(16, 64, math.inf, costs)
    ready = [*rows, Candidate("lone", 2, remaining=60)]
    assert "lone" not in {r.id for r in policy.choose(ready, BASE, 0.0).order}
    costs.around = 0.5
    assert "lone" in {r.id for r in policy.choose(ready, BASE, 0.0).order}


def test_urgent_deadlines_go_first_then_priorities() -> None:
    short = Candidate("short", BASE, missing=2)
    ready = [
        short,
        Candidate("urgent", BASE, missing=20, deadline=0.03),
        Candidate("later", BASE, missing=20, deadline=9.0),
    ]
    order = [r.id for r in predictive().choose(ready, BASE, 0.0).order]
    assert order[:2] == ["urgent", "short"]
    preferred = Candidate("preferred", BASE, missing=40, priority=-1)
    order = [r.id for r in predictive().choose([short, preferred], BASE, 0.0).order]
    assert order[0] == "preferred"


def test_whoever_has_waited_as_long_as_the_bound_goes_first() -> None:
    ready = [Candidate("short", 1, missing=2), Candidate("cold", 2, 1.0, wait=9.0, missing=60)]
    assert predictive(8.0).choose(ready, 1, 0.0).order[0].id == "cold"
    assert predictive(10.0).choose(ready, 1, 0.0).order[0].id == "short"


# -- the bound on waits ----------------------------------------------------------------------

MAX_WAIT, BATCH, WORK, LIMIT = 0.5, 8, 6, 40


def bound(ready: int) -> float:
    """Seconds within which a request is first served: until then everyone with a longer wait, of
    whom there are no more than are ready, has had all its steps, BATCH at a time; and one step."""
    return MAX_WAIT + (math.ceil(ready / BATCH) * WORK + 1) * STEP


POLICIES: dict[str, Policy] = {
    "credit": CreditPolicy(default_credit(BATCH, 0.05, 4.0, MAX_WAIT), Costs()),
    "predictive": Predictive(BATCH, 1000, MAX_WAIT, Costs()),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("trace", ["one hot, one cold", "all distinct", "bursts of long ones"])
def test_everyone_is_served_within_the_bound_under_full_load(policy: Policy, trace: str) -> None:
    """The queue is kept full of LIMIT requests, whatever ends; the cold one comes first of all,
    or among the others."""
    ready: list[Candidate] = []
    live, now, made, served = BASE, 0.0, 0, set[str]()
    longest = 0.0
    for turn in range(600):
        while len(ready) < LIMIT:
            slot = {"one hot, one cold": int(made % 97 == 0), "all distinct": made}.get(
                trace, made // 60 % 3
            )
            work = WORK if trace != "bursts of long ones" or made % 2 else 1
            ready.append(Candidate(f"r{made}", slot, now, missing=1, remaining=work - 1))
            made += 1
        choice = policy.choose(ready, live, now)
        live = choice.live
        chosen = {r.id for r in choice.order}
        assert 0 < len(chosen) <= BATCH
        for r in ready:
            if r.id in chosen and r.id not in served:
                served.add(r.id)
                longest = max(longest, r.wait)
            if r.id not in served:
                assert r.wait <= bound(LIMIT), (turn, r)
        ready = [
            r._replace(remaining=r.remaining - 1)
            if r.id in chosen
            else r._replace(wait=r.wait + STEP)
            for r in ready
            if r.id not in chosen or r.remaining > 0
        ]
        now += STEP
    assert longest > 0.1, "the load is too low to say anything"
