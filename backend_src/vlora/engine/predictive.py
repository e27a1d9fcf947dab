"""The policy that asks the cost model: what a step earns per second, and what a merge saves.

Beyond the paper. A request's lateness grows with every second until it ends (from its arrival, or
beyond its deadline), so that the requests with the least work left go first, and a step takes
whatever makes it end more of them per second: rows that ride along for nothing while the weights
are read (and while the step is scheduled and told), then those whose share of a request is worth
their time. An adapter that the step has not
read yet costs its bytes, which gathers requests of the same adapters in the same steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from vlora.engine.policy import Choice, Costs, Ready
from vlora.lora.segments import BASE

URGENT = 2.0
"""A deadline is urgent once the time until it is no more than so many times the work left."""
ENOUGH = 0.97
"""Of what the best number of a prompt's rows earns more; the fewest rows that do are taken, since
nobody can come in between before the step ends."""
FULL = 64
"""Rows of a step that makes good use of the machine."""
PROMPT = 4.0
"""Tokens of an answer that a row of a prompt is worth: until all of a prompt is there its request
cannot ride along in steps that are made for others. Of 1 to 8, simulated on the traces of `vlora
bench policies`, this and more did alike."""
REFUSALS = 64
"""Requests that a step may be found not worth, before it is taken as it is."""
PORTIONS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048)
"""Rows of a prompt that are weighed against each other."""


class StepCosts(Costs, Protocol):
    """Costs that can be asked in parts; seconds."""

    def products(self, rows: int, answers: int) -> float:
        """Of all that has no adapter and no context: `rows` rows, `answers` of them answered."""
        ...

    def beside(self, requests: int) -> float:
        """Of what a step of so many requests has beside its forward pass."""
        ...

    def attention(self, rows: int, context: int) -> float:
        """Of `rows` rows of a request behind `context` positions."""
        ...

    def adapter(self, slot: int) -> float:
        """Of bringing an adapter to the step, whatever its rows."""
        ...

    def lora(self, slot: int, rows: int) -> float:
        """Of applying it to so many rows."""
        ...


class Predictive:
    """max_batch: requests of a step. max_rows: rows of it. max_wait: whoever has waited so long
    goes first, longest first, whatever it costs: the bound on waits."""

    def __init__(self, max_batch: int, max_rows: int, max_wait: float, costs: StepCosts) -> None:
        self._size = max_batch
        self._rows = max_rows
        self._max_wait = max_wait
        self._costs = costs

    def choose(self, ready: Sequence[Ready], live: int, now: float) -> Choice:
        per_row = self._costs.products(FULL, 1) / FULL
        work = {r.id: self._work(r, per_row) for r in ready}
        merged = self._live(ready, live)
        overdue = sorted((r for r in ready if r.wait > self._max_wait), key=lambda r: -r.wait)
        late = {r.id for r in overdue}
        urgent = [r for r in ready if r.deadline - now <= URGENT * work[r.id] and r.id not in late]
        urgent.sort(key=lambda r: r.deadline)
        late |= {r.id for r in urgent}
        step = _Step(self._costs, merged, self._rows)
        for r in [*overdue, *urgent][: self._size]:
            step.take(r, r.missing)
        rest = [r for r in ready if r.id not in late]
        rest.sort(key=lambda r: (r.priority, work[r.id]))
        refused = 0
        for r in rest:
            if len(step.order) == self._size or refused == REFUSALS:
                break
            refused += not step.consider(r)
        return Choice(tuple(step.order), merged, step.rows)

    def _work(self, r: Ready, per_row: float) -> float:
        """Seconds of a full step's worth that the request still takes."""
        costs = self._costs
        rows = r.missing + r.left
        return rows * per_row + costs.attention(rows, r.context) + costs.lora(r.slot, rows)

    def _live(self, ready: Sequence[Ready], live: int) -> int:
        """The adapter whose merge saves most over the work that is here: its own rows and steps
        need it no more, all others need it taken out."""
        rows: defaultdict[int, int] = defaultdict(int)
        steps: defaultdict[int, int] = defaultdict(int)
        for r in ready:
            rows[r.slot] += r.missing + r.left
            steps[r.slot] = max(steps[r.slot], 1 + r.left)
        total = sum(rows.values())
        best, most = BASE, 0.0
        for slot in sorted({*rows, live} - {BASE}, key=lambda slot: slot != live):
            if not self._costs.mergeable(slot):
                continue
            others = max((n for other, n in steps.items() if other != slot), default=0)
            saved = self._costs.lora(slot, 2 * rows[slot] - total)
            saved += self._costs.adapter(slot) * (steps[slot] - others)
            gain = saved - self._costs.switch(live, slot)
            if gain > most:
                best, most = slot, gain
        return best


class _Step:
    """A step as it fills: value, the shares of requests that it ends, over predicted seconds."""

    def __init__(self, costs: StepCosts, live: int, rows: int) -> None:
        self._costs = costs
        self._live = live
        self._room = rows
        self._read: set[int] = set()
        self._needs: dict[int, tuple[tuple[int, float, float], ...]] = {}
        self._count = self._answers = 0
        self._value = self._added = self._earning = 0.0
        self.order: list[Ready] = []
        self.rows: dict[str, int] = {}

    def consider(self, r: Ready) -> bool:
        """Takes the request where the step earns more per second with it."""
        most = min(r.missing, self._room)
        if most == 0:
            return False
        portions = (*(rows for rows in PORTIONS if rows < most), most)
        found = [(self._earns(r, rows), rows) for rows in portions]
        now = self._earning
        best = max(earns for earns, _ in found)
        if best <= now:
            return False
        enough = now + ENOUGH * (best - now)
        self.take(r, next(rows for earns, rows in found if earns >= enough))
        return True

    def take(self, r: Ready, rows: int) -> None:
        rows = min(rows, self._room)
        if rows == 0:
            return
        self._earning = self._earns(r, rows)
        self._added += self._more(r, rows)
        self._value += _share(r, rows)
        self._count += rows
        self._answers += rows == r.missing
        self._room -= rows
        self._read.update(slot for slot, _, _ in self._needed(r.slot))
        self.order.append(r)
        self.rows[r.id] = rows

    def _earns(self, r: Ready, rows: int) -> float:
        """Value per second of the step with these rows as well."""
        answers = self._answers + (rows == r.missing)
        seconds = self._costs.products(self._count + rows, answers) + self._added
        seconds += self._costs.beside(len(self.order) + 1) + self._more(r, rows)
        return (self._value + _share(r, rows)) / seconds

    def _more(self, r: Ready, rows: int) -> float:
        """Seconds beside the products: attention, adapters that nobody has brought, their rows."""
        seconds = self._costs.attention(rows, r.context)
        for slot, brought, row in self._needed(r.slot):
            seconds += row * rows
            if slot not in self._read:
                seconds += brought
        return seconds

    def _needed(self, slot: int) -> tuple[tuple[int, float, float], ...]:
        """Adapters that are applied to the rows of one: (slot, seconds to bring it, of a row)."""
        found = self._needs.get(slot)
        if found is None:
            needed = {slot, self._live} - {BASE} if slot != self._live else set()
            costs = self._costs
            found = tuple((one, costs.adapter(one), costs.lora(one, 1)) for one in needed)
            self._needs[slot] = found
        return found


def _share(r: Ready, rows: int) -> float:
    """What these rows are worth: the part of the request that they are, since ending a short one is
    worth as much as ending a long one; twice as much for each step of priority."""
    weight = 2.0 ** -min(max(r.priority, -8), 8)
    worth = PROMPT if r.missing > 1 else 1.0
    return float(weight * worth * rows / (worth * r.missing + r.left))
