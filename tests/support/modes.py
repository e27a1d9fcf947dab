"""An engine whose live adapter a test decides, step by step, whatever its own policy says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vlora.engine.engine import Engine
from vlora.engine.plan import StepPlan
from vlora.ids import order_of


def drive(engine: Engine, live: Callable[[int], int], *, in_order: bool = True) -> list[StepPlan]:
    """From now on step i runs with adapter slot `live(i)` in the weights (or BASE), its rows in the
    order for that, or in the one the scheduler gave them. → the plans, as they come."""
    schedule, plans = engine.scheduler.schedule, []

    def driven(*given: Any) -> StepPlan:
        plan = replace(schedule(*given), live=live(len(plans)))
        plans.append(_ordered(plan) if in_order else plan)
        return plans[-1]

    engine.scheduler.schedule = driven  # type: ignore[method-assign]
    return plans


def _ordered(plan: StepPlan) -> StepPlan:
    chunks, row = [], 0
    for chunk in sorted(plan.chunks, key=lambda chunk: order_of(chunk.slot, plan.live)):
        chunks.append(replace(chunk, row=row))
        row += chunk.length
    return replace(plan, chunks=tuple(chunks))
