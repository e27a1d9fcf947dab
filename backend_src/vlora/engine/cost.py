"""How long a step will take, and a switch: measured once per machine, corrected by what came.

Knows sizes, seconds and slots; nothing of torch, requests or policies. A prediction is made of the
parts that a step has: products (by rows), the LM head (by answers), attention (by positions and by
pairs of row and position), the operator's calls where there is any adapter, and each adapter, its
weights once and its rows.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vlora.engine.policies.base import Candidate
from vlora.ids import BASE

REMEMBERED = 512
"""Predictions whose errors are kept."""
PACE, LEARNED, LEARNED_MERGES = 0.4, 0.05, 0.1
"""Weight of a new measurement in the pace of all steps, which neighbours on the machine change by
the second; in what is known of steps alike, which stays; and of merges."""
DOUBT = 2
"""Measurements that it takes to believe steps alike as much as all steps."""
FORGOTTEN = 0.02
"""Of what is known of a step beside its forward pass, with each new one."""
HELD_UP, LEAST = 3.0, 1e-3
"""A step that took more than so many times what was expected beside its forward pass, and more than
LEAST seconds, counts as one that took that: the machine was busy with something else."""


class Part(NamedTuple):
    """What a step computes of one request: `rows` behind `context` positions."""

    slot: int
    rows: int
    context: int
    answered: bool


class AdapterSize(NamedTuple):
    """factors: elements of A and B over all matrices. product: multiplications of B·A."""

    factors: int
    product: int


@dataclass(frozen=True)
class Profile:
    """Seconds of one machine, model and type.

    products: by rows, ascending: a step of so many rows, no adapter, no context, one answer.
    head: the LM head's weights over all other products'. answer: of each answer beside its product.
    position: of reading a position's keys and values. pair: of a row at a position.
    calls: of a step with any adapter, whatever it is: a call for every group of matrices.
    brought: of an adapter's element, whatever its rows. applied: of an element and row.
    merged: of a merge, whatever the adapter, and of a multiplication of B·A.
    """

    products: tuple[tuple[int, float], ...]
    head: float = 0.0
    answer: float = 0.0
    position: float = 0.0
    pair: float = 0.0
    calls: float = 0.0
    brought: float = 0.0
    applied: float = 0.0
    merged: tuple[float, float] = (0.0, 0.0)


@dataclass
class _Correction:
    """Time over prediction, a geometric mean that forgets. weight: of a new one, in the end. seen:
    how many there were; begun with more than none, 1 is believed as much as so many."""

    weight: float
    log: float = 0.0
    seen: int = 0

    def learn(self, ratio: float) -> None:
        self.seen += 1
        self.log += max(self.weight, 1 / self.seen) * (math.log(ratio) - self.log)

    @property
    def factor(self) -> float:
        return math.exp(self.log)


@dataclass
class StepOverhead:
    """What a step takes beside its forward pass (scheduling, sampling, telling the outputs, threads
    that share the interpreter): a line over its requests, by least squares that forget."""

    weight: float = 0.0
    sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    """Of requests, their squares, seconds, and requests × seconds."""
    fixed: float = 0.0
    each: float = 0.0

    def seconds(self, requests: int) -> float:
        return self.fixed + self.each * requests

    def learn(self, requests: int, seconds: float) -> None:
        if self.weight > 0.0:
            seconds = min(seconds, max(LEAST, HELD_UP * self.seconds(requests)))
        news = (requests, requests**2, seconds, requests * seconds)
        kept = 1.0 - FORGOTTEN
        self.weight = kept * self.weight + 1.0
        self.sums = tuple(kept * old + new for old, new in zip(self.sums, news, strict=True))
        n, squares, mean, product = (value / self.weight for value in self.sums)
        spread = squares - n * n
        slope = (product - n * mean) / spread if spread > 1e-6 * squares else 0.0
        self.each = min(max(0.0, slope), mean / n)
        self.fixed = mean - self.each * n


@dataclass
class CostModel:
    """Predictions of one engine. sizes: of an adapter by slot. held: the slot whose weights are
    merged already, live or not. mergeable: whether a slot may be merged.

    A step is its forward pass and what comes beside it. The first is corrected by the pace of the
    machine, which is that of the last few steps, whatever they were; and by how steps alike differ
    from all: with as many rows (by powers of two), with prompts or without, with adapters or not.
    The second is known from steps alone.
    """

    profile: Profile
    sizes: Callable[[int], AdapterSize]
    held: Callable[[], int] = lambda: BASE
    can_merge: Callable[[int], bool] = lambda slot: True
    _steps: dict[tuple[int, ...], _Correction] = field(default_factory=dict)
    _pace: _Correction = field(default_factory=lambda: _Correction(PACE))
    _merges: _Correction = field(default_factory=lambda: _Correction(LEARNED_MERGES))
    _beside: StepOverhead = field(default_factory=StepOverhead)
    _lines: dict[int, float] = field(default_factory=dict)
    _errors: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def use(self, profile: Profile) -> None:
        """From now on."""
        self.profile = profile
        self._lines.clear()

    # -- what a plan takes -------------------------------------------------------------------

    def predict(self, parts: Sequence[Part], live: int) -> float:
        """Seconds of a whole step of these parts, from the end of the one before."""
        forward = self._raw(parts, live) * self._correction(parts, live)
        return forward + self._beside.seconds(len(parts))

    def adapters(self, parts: Sequence[Part], live: int) -> float:
        """Seconds of such a step that its adapters take."""
        return self._lora(parts, live) * self._correction(parts, live)

    def record(
        self, parts: Sequence[Part], live: int, forward: float, beside: float = 0.0
    ) -> float:
        """Seconds that a step took in its forward pass and beside it; what was predicted."""
        predicted = self.predict(parts, live)
        raw = self._raw(parts, live)
        if raw > 0.0 and forward > 0.0:
            self._errors.append(abs(predicted / (forward + beside) - 1.0))
            alike = self._steps.setdefault(_kind(parts, live), _Correction(LEARNED, seen=DOUBT))
            self._pace.learn(forward / raw / alike.factor)
            alike.learn(forward / raw / self._pace.factor)
            self._beside.learn(len(parts), beside)
        return predicted

    def record_switch(self, predicted: float, seconds: float) -> None:
        """What a switch took that had to merge."""
        if predicted > 0.0 and seconds > 0.0:
            self._merges.learn(seconds / predicted * self._merges.factor)

    @property
    def recent_errors(self) -> tuple[float, ...]:
        """Of the last predictions of steps, over the time that each took."""
        return tuple(self._errors)

    @property
    def median_error(self) -> float:
        """0 before any step."""
        return statistics.median(self._errors) if self._errors else 0.0

    @property
    def correction(self) -> float:
        """Of all steps, lately: forward passes over what the calibration says of them."""
        return self._pace.factor

    def alone(self, held: Callable[[], int]) -> CostModel:
        """The same predictions in a world where `held` says what is merged."""
        return replace(self, held=held)

    def apart(self) -> CostModel:
        """The same predictions, from which both go on to learn by themselves."""
        return replace(
            self,
            _steps={kind: replace(one) for kind, one in self._steps.items()},
            _pace=replace(self._pace),
            _merges=replace(self._merges),
            _beside=replace(self._beside),
            _errors=deque(maxlen=REMEMBERED),
        )

    def without_adapters(self) -> CostModel:
        """The same where adapters cost nothing: what no mode can better."""
        profile = replace(self.profile, calls=0.0, brought=0.0, applied=0.0, merged=(0.0, 0.0))
        return replace(self, profile=profile, _lines={})

    # -- what policies ask (`policy.Costs`, `predictive.StepCosts`) ---------------------------

    def step(self, ready: Sequence[Candidate], live: int) -> float:
        return self.predict([Part(r.slot, r.missing, r.context, True) for r in ready], live)

    def switch(self, live: int, to: int) -> float:
        if to in (BASE, live, self.held()):
            return 0.0
        fixed, per_product = self.profile.merged
        return (fixed + per_product * self.sizes(to).product) * self._merges.factor

    def mergeable(self, slot: int) -> bool:
        return slot == BASE or self.can_merge(slot)

    def products(self, rows: int, answers: int) -> float:
        """`rows` rows through all layers, the LM head for `answers` of them."""
        part = self.profile.head / (1.0 + self.profile.head)
        heads = part * self._line(answers) if answers else 0.0
        return self._line(rows) - part * self._line(1) + heads + answers * self.profile.answer

    def beside(self, requests: int) -> float:
        """Seconds beside the forward pass, as the calibration's would be: where the machine is
        slower than it was then, all of a step is."""
        return self._beside.seconds(requests) / self.correction

    def _line(self, rows: int) -> float:
        """`_between`, remembered: policies ask it for every request of every step."""
        found = self._lines.get(rows)
        if found is None:
            found = self._lines[rows] = _between(self.profile.products, rows)
        return found

    def attention(self, rows: int, context: int) -> float:
        profile = self.profile
        return profile.position * (context + rows) + profile.pair * rows * (context + rows / 2)

    def calls(self) -> float:
        return self.profile.calls

    def adapter(self, slot: int) -> float:
        return 0.0 if slot == BASE else self.profile.brought * self.sizes(slot).factors

    def lora(self, slot: int, rows: int) -> float:
        return 0.0 if slot == BASE else self.profile.applied * self.sizes(slot).factors * rows

    # -- the sum -----------------------------------------------------------------------------

    def _raw(self, parts: Sequence[Part], live: int) -> float:
        total = self.products(sum(p.rows for p in parts), sum(p.answered for p in parts))
        total += sum(self.attention(p.rows, p.context) for p in parts)
        return total + self._lora(parts, live)

    def _lora(self, parts: Sequence[Part], live: int) -> float:
        rows = rows_by_adapter(parts, live)
        calls = self.profile.calls if rows else 0.0
        return calls + sum(self.adapter(s) + self.lora(s, n) for s, n in rows.items())

    def _correction(self, parts: Sequence[Part], live: int) -> float:
        alike = self._steps.get(_kind(parts, live))
        return self._pace.factor * (1.0 if alike is None else alike.factor)


def rows_by_adapter(parts: Iterable[Part], live: int) -> Mapping[int, int]:
    """Rows that each adapter is applied to: own ones, and the live one's, taken out of others."""
    found: dict[int, int] = {}
    for part in parts:
        if part.slot != live:
            for slot in {part.slot, live} - {BASE}:
                found[slot] = found.get(slot, 0) + part.rows
    return found


def _kind(parts: Sequence[Part], live: int) -> tuple[int, ...]:
    """Steps whose predictions err alike."""
    rows = sum(p.rows for p in parts)
    prompts = any(p.rows > 1 for p in parts)
    applied = any(p.slot != live for p in parts)
    return (rows.bit_length(), prompts, applied)


def _between(knots: Sequence[tuple[int, float]], rows: int) -> float:
    """Between the knots by a straight line, beyond them by the last one's."""
    at = min(max(bisect.bisect_left(knots, (rows,)), 1), len(knots) - 1)
    if at == 0:
        return knots[0][1] * max(1.0, rows / knots[0][0])
    (left, low), (right, high) = knots[at - 1], knots[at]
    return max(low + (high - low) * (rows - left) / (right - left), knots[0][1])


def guess(elements: int, itemsize: int, head: int) -> Profile:
    """A profile before anything has been measured: a CPU of 10 GB/s and 50 GFLOP/s.

    elements: of the layers' matrices; head: of the LM head."""
    read, compute = elements * itemsize / 1e10, 2 * elements / 5e10
    rows = (1, 4, 16, 64, 256)
    return Profile(
        products=tuple((n, (1 + head / elements) * max(read, n * compute)) for n in rows),
        head=head / elements,
        answer=5e-5,
        position=1e-7,
        pair=1e-8,
        brought=itemsize / 1e10,
        applied=2 / 5e10,
        merged=(2 * read, 2 / 5e10),
    )
