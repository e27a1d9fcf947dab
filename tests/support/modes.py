"""Control of an engine's live adapter by a test instead of by its policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vlora.engine.engine import Engine
from vlora.engine.plan import StepPlan
from vlora.ids import order_of


def drive(engine: Engine, live: Callable[[int], int], *, in_order: bool = True) -> list[StepPlan]:
    """Make an engine run step i with the adapter in slot `live(i)` merged, or none for BASE.

    in_order: whether the rows of a step are sorted for the live adapter, as usual. Otherwise they
        keep the scheduler's order.

    Return the list to which the plan of each later step is appended.
    """
    schedule = engine.scheduler.schedule
    plans: list[StepPlan] = []

    def schedule_with_live(*arguments: Any) -> StepPlan:
        plan = replace(schedule(*arguments), live=live(len(plans)))
        plans.append(_sorted_for_live(plan) if in_order else plan)
        return plans[-1]

    engine.scheduler.schedule = schedule_with_live  # type: ignore[method-assign]
    return plans


def _sorted_for_live(plan: StepPlan) -> StepPlan:
    chunks, row = [], 0
    for chunk in sorted(plan.chunks, key=lambda chunk: order_of(chunk.slot, plan.live)):
        chunks.append(chunk._replace(row=row))
        row += chunk.length
    return replace(plan, chunks=tuple(chunks))
