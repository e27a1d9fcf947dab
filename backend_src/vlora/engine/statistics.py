"""Statistics of the engine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from vlora.engine.parts import EngineParts
from vlora.engine.plan import StepPlan
from vlora.metrics import EngineStats
from vlora.request import Output


class EngineStatistics:
    """Running totals. The engine's thread updates them; any thread may call `snapshot`.

    Readers need no lock, because each update and each copy of a dictionary is atomic under the GIL.
    """

    def __init__(self, parts: EngineParts, page_tokens: int) -> None:
        self._parts = parts
        self._constants = {"pages_total": parts.memory.pool.total, "page_tokens": page_tokens}
        self._totals: defaultdict[str, Any] = defaultdict(int)
        self._mode = ""
        self._mode_steps: Counter[str] = Counter()
        self._mode_seconds: defaultdict[str, float] = defaultdict(float)

    def count(self, **increments: float) -> None:
        """Add to totals. The keyword of each increment is a field of `EngineStats`."""
        totals = self._totals
        totals.update({name: totals[name] + n for name, n in increments.items()})

    def count_step(self, plan: StepPlan, outputs: Sequence[Output]) -> None:
        rows, decode_rows = plan.rows, plan.decode_rows
        self.count(
            steps=1,
            rows=rows,
            decode_steps=decode_rows > 0,
            decode_rows=decode_rows,
            prompt_tokens=rows - decode_rows,
            preemptions=len(plan.preempted),
            cached_tokens=plan.cached,
        )
        self.count_outputs(outputs)

    def count_outputs(self, outputs: Sequence[Output]) -> None:
        """Count the tokens and the ended requests of these outputs."""
        self.count(
            generated_tokens=sum(len(output.token_ids) for output in outputs),
            finished=sum(output.finish_reason is not None for output in outputs),
            failed=sum(output.error is not None for output in outputs),
        )

    def count_mode(self, mode: str, seconds: float) -> None:
        """Count a forward pass in this mode, which took this many seconds."""
        self._mode = mode
        self._mode_steps[mode] += 1
        self._mode_seconds[mode] += seconds

    def snapshot(self) -> EngineStats:
        """Return the totals together with the present values of the engine's parts."""
        scheduler, adapters = self._parts.scheduler, self._parts.adapters
        pool, grammars = self._parts.memory.pool, self._parts.admission.grammars
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        credits = sorted((scheduler.choice.credits or {}).values())
        tiers, structured = adapters.tiers.counters, grammars.counters
        graphs = self._parts.runner.graphs
        return EngineStats(
            **self._constants,
            **dict(self._totals),
            mode=self._mode,
            mode_steps=dict(self._mode_steps),
            mode_seconds=dict(self._mode_seconds),
            paused=scheduler.paused,
            highest_credit=credits[-1] if credits else 0.0,
            median_credit=credits[len(credits) // 2] if credits else 0.0,
            graphs_captured=graphs.captured,
            graphs_replayed=graphs.replayed,
            graph_seconds=graphs.seconds,
            graph_bytes=graphs.nbytes,
            running=len(running),
            waiting=len(waiting),
            prediction_error=self._parts.costs.median_error,
            pages_used=pool.kv,
            pages_cached=pool.cached,
            pages_adapter=pool.adapter,
            pages_moved=pool.pages_moved,
            adapters_resident=len(adapters.resident),
            adapters_known=len(adapters.table.current),
            adapter_host_bytes=adapters.tiers.host.used_bytes,
            adapter_hits=tiers.hits,
            adapter_host_hits=tiers.host_hits,
            adapter_misses=tiers.misses,
            adapter_loads=tiers.loads,
            adapter_evictions=tiers.evictions,
            grammars=len(grammars),
            grammars_compiled=structured.compiled,
            grammars_refused=structured.refused,
            grammar_seconds=structured.compile_seconds,
            masks=structured.masks,
            mask_seconds=structured.mask_seconds,
            structured_failed=structured.failed,
            running_adapters=Counter(s.request.adapter or "" for s in running),
            waiting_adapters=Counter(s.request.adapter or "" for s in waiting),
        )
