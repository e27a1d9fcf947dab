"""Statistics of the engine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from vlora.engine.parts import EngineParts
from vlora.engine.plan import StepPlan
from vlora.metrics import EngineStats, readers
from vlora.request import Output


class EngineStatistics:
    """Running totals. The engine's thread updates them; any thread may call `snapshot`."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._readers = readers()
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
        self.count(
            generated_tokens=sum(len(output.token_ids) for output in outputs),
            finished=sum(output.finish_reason is not None for output in outputs),
            failed=sum(output.error is not None for output in outputs),
        )

    def count_mode(self, mode: str, seconds: float) -> None:
        self._mode = mode
        self._mode_steps[mode] += 1
        self._mode_seconds[mode] += seconds

    def snapshot(self) -> EngineStats:
        """Return the totals together with the present values of the engine's parts."""
        return EngineStats(
            **dict(self._totals),
            **{name: read(self._parts) for name, read in self._readers.items()},
            mode=self._mode,
            mode_steps=dict(self._mode_steps),
            mode_seconds=dict(self._mode_seconds),
        )
