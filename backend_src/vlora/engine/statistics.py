"""Counting what the engine does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from vlora.engine.cost import CostModel
from vlora.engine.plan import Mode, StepPlan
from vlora.engine.scheduler import Scheduler
from vlora.lora.store import AdapterStore
from vlora.memory.pool import PagePool
from vlora.metrics import EngineStats
from vlora.request import Output


class EngineStatistics:
    """Owner of the totals. Updated on the engine's thread; `snapshot` may be called from any.

    Each update and each copy of a dictionary is one operation of the interpreter, so that readers
    need no lock.
    """

    def __init__(self, pages_total: int, page_tokens: int) -> None:
        self._constants = {"pages_total": pages_total, "page_tokens": page_tokens}
        self._totals: defaultdict[str, Any] = defaultdict(int)
        self._mode = ""
        self._mode_steps: Counter[str] = Counter()
        self._mode_seconds: defaultdict[str, float] = defaultdict(float)

    def count(self, **increments: float) -> None:
        """Add to totals, by the names of the fields of `EngineStats`."""
        totals = self._totals
        totals.update({name: totals[name] + n for name, n in increments.items()})

    def count_step(self, plan: StepPlan, generated: int, outputs: Sequence[Output]) -> None:
        """Count a computed step. generated: tokens drawn in it."""
        rows, decode_rows = plan.rows, plan.decode_rows
        self.count(
            steps=1,
            rows=rows,
            decode_steps=decode_rows > 0,
            decode_rows=decode_rows,
            prompt_tokens=rows - decode_rows,
            generated_tokens=generated,
            finished=sum(output.finish_reason is not None for output in outputs),
            failed=sum(output.error is not None for output in outputs),
            preemptions=len(plan.preempted),
            cached_tokens=plan.cached,
        )

    def count_mode(self, mode: Mode, seconds: float) -> None:
        """Count the forward pass of a step in this mode."""
        self._mode = mode.value
        self._mode_steps[mode.value] += 1
        self._mode_seconds[mode.value] += seconds

    def snapshot(
        self, scheduler: Scheduler, adapters: AdapterStore, pool: PagePool, costs: CostModel
    ) -> EngineStats:
        """Return the totals with the present values of these parts."""
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        credits = sorted((scheduler.choice.credits or {}).values())
        tiers = adapters.counters
        return EngineStats(
            **self._constants,
            **dict(self._totals),
            mode=self._mode,
            mode_steps=dict(self._mode_steps),
            mode_seconds=dict(self._mode_seconds),
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
