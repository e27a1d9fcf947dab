"""A forward pass with an adapter in the active weights: signed segments take it out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from tests.parity.questions import Case
from tests.parity.test_schedules import HEAD_TOLERANCE
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.plan import StepPlan
from vlora.lora.segments import BASE
from vlora.request import Output


def test_tokens_and_scores_are_the_oracles_whichever_adapter_is_live(
    cases: list[Case], checkpoint: Path, parity_adapters: Path
) -> None:
    """Another one in each step, so that a request's keys and values come from all of them."""
    engine = Engine(Options(model=checkpoint, adapters=parity_adapters, max_num_batched_tokens=200))
    slots = [BASE, *(engine.adapters.slot(name) for name in engine.adapters.names())]
    schedule, plans = engine.scheduler.schedule, []

    def with_a_live_adapter() -> StepPlan:
        live = slots[len(plans) % len(slots)]
        plans.append(replace(schedule(), live=live))
        return plans[-1]

    engine.scheduler.schedule = with_a_live_adapter  # type: ignore[method-assign]
    outputs: dict[str, list[Output]] = defaultdict(list)
    for index, case in enumerate(cases):
        engine.add(engine.prepare(case.request(f"r{index}")), arrival=0.0)
    while not engine.idle:
        for output in engine.step():
            outputs[output.request_id].append(output)
    assert {plan.live for plan in plans} == set(slots)
    for index, case in enumerate(cases):
        said = outputs[f"r{index}"]
        if case.question.use_head:
            assert said[-1].head is not None
            scores = torch.tensor(said[-1].head.scores)
            torch.testing.assert_close(scores, case.scores, rtol=0.0, atol=HEAD_TOLERANCE)
            continue
        tokens = [token for output in said for token in output.token_ids]
        assert case.oracle.near_ties(case.question, case.expected, tokens) <= 1
