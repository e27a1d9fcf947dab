"""Fixed costs for tests of the policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from vlora.engine.cost import Part, rows_by_adapter
from vlora.engine.policies.base import Candidate
from vlora.ids import BASE

STEP_SECONDS, SWITCH_SECONDS = 0.01, 0.02


class FixedCosts:
    """Costs that are easy to calculate with.

    A request's next step takes STEP_SECONDS per row, and a switch SWITCH_SECONDS. The products
    of up to eight rows take 8 ms, and each further row 1 ms. Reading an adapter takes 2 ms, and
    applying it takes 0.1 ms per row.
    """

    unmergeable: frozenset[int] = frozenset()
    overhead_seconds = 0.0
    lora_call_seconds = 0.0
    merged_seconds = 0.0  # Time by which steps with a merged adapter were longer than predicted.

    def steps(self, ready: Sequence[Candidate], live: int) -> list[float]:
        return [STEP_SECONDS * r.missing for r in ready]

    def switch(self, live: int, to: int) -> float:
        return 0.0 if to in (BASE, live) else SWITCH_SECONDS

    def merge(self, slot: int) -> float:
        return SWITCH_SECONDS

    def adapters(self, rows_of: Mapping[int, int], live: int) -> float:
        rows = rows_by_adapter(rows_of, live)
        seconds = sum(
            self.read_adapter(slot) + self.apply_adapter(slot, n) for slot, n in rows.items()
        )
        return seconds + (self.lora_calls() if rows else 0.0)

    def saving(self, parts: Sequence[Part], live: int) -> tuple[float, float]:
        rows_of: Counter[int] = Counter()
        for part in parts:
            rows_of[part.slot] += part.rows
        saved = self.adapters(rows_of, BASE) - self.adapters(rows_of, live)
        return saved - self.merged_seconds, saved

    def mergeable(self, slot: int) -> bool:
        return slot not in self.unmergeable

    def products(self, rows: int, answers: int) -> float:
        return 1e-3 * max(8, rows)

    def overhead(self, requests: int) -> float:
        return self.overhead_seconds

    def attention(self, rows: int, context: int) -> float:
        return 0.0

    def lora_calls(self) -> float:
        return self.lora_call_seconds

    def read_adapter(self, slot: int) -> float:
        return 0.0 if slot == BASE else 2e-3

    def apply_adapter(self, slot: int, rows: int) -> float:
        return 0.0 if slot == BASE else 1e-4 * rows
