"""The policy that asks the cost model: what a step earns per second, and what a merge saves.

Beyond the paper. A request's lateness grows with every second until it ends (from its arrival, or
beyond its deadline). Whoever is answering goes on, since a row more is little of what a step costs
whoever is in it. Prompts, those with the least work left first, and adapters that the step has not
read yet join where the step then ends more of requests per second: a prompt keeps all others
waiting while it is computed, an adapter costs its bytes, which all that would share it bear
together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from vlora.engine.policies.base import Candidate, Choice, Costs
from vlora.ids import BASE

URGENT = 2.0
"""A deadline is urgent once the time until it is no more than so many times the work left."""
ENOUGH = 0.97
"""Of what the best number of a prompt's rows earns more; the fewest rows that do are taken, since
nobody can come in between before the step ends."""
FULL = 64
"""Rows of a step that makes good use of the machine."""
PROMPT = 2.0
"""Tokens of an answer that a row of a prompt is worth: until all of a prompt is there its request
cannot ride along in steps that are made for others. Of 1 to 8, simulated on the traces of `vlora
bench policies`, this and more did alike."""
RIDES = 0.5
"""Of the steps that a prompt could share with answers, were it computed now, those that it will:
the answers may end before their limits."""
REFUSALS = 64
"""Requests that a step may be found not worth, before it is taken as it is."""
PORTIONS = (128, 256, 512, 1024, 2048)
"""Rows of a prompt that are weighed against the whole of it. Fewer are not: what a prompt in small
parts gains by riding along, its request loses by the steps that it then takes (decision 58)."""


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

    def calls(self) -> float:
        """Of a step that has any adapter, beside what each of them costs."""
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

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        merged = self._live(ready, live)
        overdue = sorted((r for r in ready if r.wait > self._max_wait), key=lambda r: -r.wait)
        late = {r.id for r in overdue}
        dated = [r for r in ready if r.deadline < math.inf and r.id not in late]
        urgent = [r for r in dated if r.deadline - now <= URGENT * self._work(r)]
        urgent.sort(key=lambda r: r.deadline)
        late |= {r.id for r in urgent}
        step = _Step(self._costs, merged, self._rows, Counter(r.slot for r in ready))
        for r in [*overdue, *urgent][: self._size]:
            step.take(r, r.missing)
        rest = [r for r in ready if r.id not in late] if late else ready
        answers = sorted((r for r in rest if r.missing == 1), key=lambda r: (r.priority, r.left))
        for r in answers:
            if len(step.order) == self._size:
                break
            if not step.ride(r):
                step.consider(r)
        prompts = [(r.priority, self._work(r), i) for i, r in enumerate(rest) if r.missing > 1]
        refused = 0
        for _, _, i in sorted(prompts):
            if len(step.order) == self._size or refused == REFUSALS:
                break
            refused += not step.consider(rest[i])
        return Choice(tuple(step.order), merged, step.rows)

    def _work(self, r: Candidate) -> float:
        """Seconds of a full step's worth that the request still takes."""
        costs = self._costs
        rows = r.missing + r.left
        per_row = costs.products(FULL, 1) / FULL
        return rows * per_row + costs.attention(rows, r.context) + costs.lora(r.slot, rows)

    def _live(self, ready: Sequence[Candidate], live: int) -> int:
        """The adapter whose merge saves most over the work that is here: its own rows and steps
        need it no more, nor the operator where nobody else is there; all others need it taken
        out."""
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
            whole = self._costs.adapter(slot) + self._costs.calls()
            saved += whole * (steps[slot] - others)
            gain = saved - self._costs.switch(live, slot)
            if gain > most:
                best, most = slot, gain
        return best


class _Step:
    """A step as it fills: value, the shares of requests that it ends, over predicted seconds.

    What an adapter costs whatever its rows is weighed against all that would share it: the first
    of them bears its part of it, not the whole."""

    def __init__(self, costs: StepCosts, live: int, rows: int, asked: Mapping[int, int]) -> None:
        """asked: requests by slot."""
        self._costs = costs
        self._live = live
        self._room = rows
        self._asked = asked
        self._calls = costs.calls()
        self._alone = costs.products(1, 1) + costs.beside(1)
        self._others = sum(n for slot, n in asked.items() if slot != live)
        """Requests that have any adapter applied to their rows."""
        self._read: set[int] = set()
        self._riding: dict[int, float] = {}
        """Seconds that a row takes, of slots whose adapters are all read."""
        self._needs: dict[int, tuple[tuple[int, float, float], ...]] = {}
        self._count = self._answers = self._longest = 0
        self._value = self._added = 0.0
        self.order: list[Candidate] = []
        self.rows: dict[str, int] = {}

    def ride(self, r: Candidate) -> bool:
        """Takes a row of an answer; False where its adapters are no part of the step yet."""
        row = self._riding.get(r.slot)
        if row is None:
            needed = self._needed(r.slot)
            if any(slot not in self._read for slot, _, _ in needed):
                return False
            row = self._riding[r.slot] = sum(each for _, _, each in needed)
        if self._room:
            self._join(r, 1, row)
        return True

    def consider(self, r: Candidate) -> bool:
        """Takes the request where the step earns more per second with it."""
        most = min(r.missing, self._room)
        if most == 0:
            return False
        now = self._value / self._seconds() if self.order else 0.0
        portions = (*(rows for rows in PORTIONS if rows < most), most)
        brought, row = self._adapters(r.slot, shared=True)
        found = [(self._earns(r, rows, brought + row * rows, now), rows) for rows in portions]
        best = max(earns for earns, _ in found)
        if best <= now:
            return False
        enough = now + ENOUGH * (best - now)
        self.take(r, next(rows for earns, rows in found if earns >= enough))
        return True

    def take(self, r: Candidate, rows: int) -> None:
        rows = min(rows, self._room)
        if rows == 0:
            return
        brought, row = self._adapters(r.slot, shared=False)
        self._read.update(slot for slot, _, _ in self._needed(r.slot))
        self._join(r, rows, brought + row * rows)

    def _join(self, r: Candidate, rows: int, adapters: float) -> None:
        self._added += self._costs.attention(rows, r.context) + adapters
        self._value += _share(r, rows)
        self._count += rows
        self._answers += rows == r.missing
        self._longest = max(self._longest, r.left)
        self._room -= rows
        self.order.append(r)
        self.rows[r.id] = rows

    def _seconds(self, rows: int = 0, answers: int = 0, requests: int = 0) -> float:
        """Of the step as it is, with so many more."""
        products = self._costs.products(self._count + rows, self._answers + answers)
        return products + self._added + self._costs.beside(len(self.order) + requests)

    def _earns(self, r: Candidate, rows: int, adapters: float, now: float) -> float:
        """Value per second of the step with these rows as well. adapters: their seconds. now: what
        it earns without them."""
        worth = _share(r, rows)
        if r.missing == rows and self._value > 0.0:
            worth += self._rides(r, now)
        seconds = self._seconds(rows, rows == r.missing, 1)
        return (self._value + worth) / (seconds + adapters + self._costs.attention(rows, r.context))

    def _rides(self, r: Candidate, now: float) -> float:
        """What a prompt that is whole after this step saves by answering beside the others and not
        after them: of so many of their steps, what one costs whoever is in it."""
        if r.missing == 1:
            return 0.0
        part = min(1.0, self._alone * now / self._value)
        return RIDES * _weight(r) * part * min(r.left, self._longest) / (1 + self._longest)

    def _adapters(self, slot: int, *, shared: bool) -> tuple[float, float]:
        """Seconds that a request through this one adds: of what nobody has brought to the step yet
        (its part of that where `shared`), and of each row."""
        needed = self._needed(slot)
        brought = each = 0.0
        if needed and not self._read:
            brought = self._calls / (self._others if shared else 1)
        for one, seconds, row in needed:
            each += row
            if one not in self._read:
                among = self._others if one == self._live else self._asked[one]
                brought += seconds / (among if shared else 1)
        return brought, each

    def _needed(self, slot: int) -> tuple[tuple[int, float, float], ...]:
        """Adapters that are applied to the rows of one: (slot, seconds to bring it, of a row)."""
        found = self._needs.get(slot)
        if found is None:
            needed = {slot, self._live} - {BASE} if slot != self._live else set()
            costs = self._costs
            found = tuple((one, costs.adapter(one), costs.lora(one, 1)) for one in needed)
            self._needs[slot] = found
        return found


def _share(r: Candidate, rows: int) -> float:
    """The part of the request that these rows are, since ending a short one is worth as much as
    ending a long one."""
    worth = PROMPT if r.missing > 1 else 1.0
    return _weight(r) * worth * rows / (worth * r.missing + r.left)


def _weight(r: Candidate) -> float:
    """Twice as much for each step of priority."""
    return 2.0 ** -float(min(max(r.priority, -8), 8)) if r.priority else 1.0
