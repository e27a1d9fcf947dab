"""Counting what the engine does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from vlora.engine.cost import CostModel
from vlora.engine.plan import Mode, StepPlan
from vlora.engine.scheduler import Scheduler
from vlora.lora.store import AdapterStore
from vlora.memory.pool import PagePool
from vlora.metrics import EngineStats
from vlora.request import Output


class EngineStatistics:
    """Owner of the totals. Updated on the engine's thread; `snapshot` may be called from any.

    Each update replaces the totals by a new immutable value, so that readers need no lock.
    """

    def __init__(self, pages_total: int, page_tokens: int) -> None:
        self._totals = EngineStats(pages_total=pages_total, page_tokens=page_tokens)

    def count(self, **increments: float) -> None:
        """Add to totals, by the names of the fields of `EngineStats`."""
        totals = self._totals
        self._totals = replace(
            totals, **{name: getattr(totals, name) + n for name, n in increments.items()}
        )

    def count_step(self, plan: StepPlan, generated: int, outputs: Sequence[Output]) -> None:
        """Count a computed step. generated: tokens drawn in it."""
        self.count(
            steps=1,
            rows=plan.rows,
            decode_steps=plan.decode_rows > 0,
            decode_rows=plan.decode_rows,
            prompt_tokens=plan.rows - plan.decode_rows,
            generated_tokens=generated,
            finished=sum(output.finish_reason is not None for output in outputs),
            failed=sum(output.error is not None for output in outputs),
            preemptions=len(plan.preempted),
            cached_tokens=plan.cached,
        )

    def count_mode(self, mode: Mode, seconds: float) -> None:
        """Count the forward pass of a step in this mode."""
        name, totals = mode.value, self._totals
        steps, time = totals.mode_steps, totals.mode_seconds
        self._totals = replace(
            totals,
            mode=name,
            mode_steps={**steps, name: steps.get(name, 0) + 1},
            mode_seconds={**time, name: time.get(name, 0.0) + seconds},
        )

    def snapshot(
        self, scheduler: Scheduler, adapters: AdapterStore, pool: PagePool, costs: CostModel
    ) -> EngineStats:
        """Return the totals with the present values of these parts."""
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        credits = sorted((scheduler.choice.credits or {}).values())
        tiers = adapters.counters
        return replace(
            self._totals,
            paused=scheduler.paused,
            highest_credit=credits[-1] if credits else 0.0,
            median_credit=credits[len(credits) // 2] if credits else 0.0,
            running=len(running),
            waiting=len(waiting),
            prediction_error=costs.median_error,
            pages_used=pool.kv,
            pages_cached=pool.cached,
            pages_adapter=pool.adapter,
            pages_moved=pool.pages_moved,
            adapters_resident=len(adapters.resident),
            adapters_known=len(adapters),
            adapter_host_bytes=adapters.host_bytes,
            adapter_hits=tiers.hits,
            adapter_host_hits=tiers.host_hits,
            adapter_misses=tiers.misses,
            adapter_loads=tiers.loads,
            adapter_evictions=tiers.evictions,
            running_adapters=Counter(s.request.adapter or "" for s in running),
            waiting_adapters=Counter(s.request.adapter or "" for s in waiting),
        )
