"""The cost model, which predicts the time of a step or a switch.

Its profile is measured once per machine, and its predictions are corrected by measured steps. It
knows sizes, seconds and slots; nothing of torch, requests or policies. A prediction is the sum of a
step's parts: the matrix products (by rows), the LM head (by answers), attention (by positions, and
by pairs of row and position), the operator's calls if there is any adapter, and for each adapter
its weights once and its rows.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vlora.engine.corrections import Corrections, StepKind
from vlora.engine.policies.base import Candidate
from vlora.ids import BASE


class Part(NamedTuple):
    """A step's part of one request: `rows` rows after `context` positions.

    answered: whether the step computes the logits of the last row.
    """

    slot: int
    rows: int
    context: int
    answered: bool


class AdapterSize(NamedTuple):
    """Size of an adapter.

    factors: elements of A and B over all matrices.
    product: multiplications of B·A over all matrices.
    """

    factors: int
    product: int


@dataclass(frozen=True)
class Profile:
    """Measured times of one machine, model and dtype, in seconds.

    products: (rows, seconds) by ascending rows: a step of this many rows with no adapter, no
        context and one answer.
    head: weights of the LM head over all other weights (a ratio).
    answer: time per answer in addition to its share of the products.
    position: time to read the keys and values of one position.
    pair: time per pair of a row and a position that it attends to.
    lora_calls: fixed time of a step with any adapter: one call per group of matrices.
    adapter_element: time per element of an adapter that a step reads.
    adapter_element_row: time per element of an adapter and row that it is applied to.
    merge: (fixed time of a merge, time per multiplication of B·A), also of subtracting one.
    """

    products: tuple[tuple[int, float], ...]
    head: float = 0.0
    answer: float = 0.0
    position: float = 0.0
    pair: float = 0.0
    lora_calls: float = 0.0
    adapter_element: float = 0.0
    adapter_element_row: float = 0.0
    merge: tuple[float, float] = (0.0, 0.0)


@dataclass
class CostModel:
    """Predictions for one engine, in seconds.

    sizes: returns the size of the adapter in a slot.
    merged_slot: returns the slot whose merged weights exist already, live or not; BASE for none.
    can_merge: returns whether the adapter in a slot may be merged.
    in_place: whether merging changes the base weights, so that each merge must be undone.
    calibrated: whether the profile was measured on this machine.
    """

    profile: Profile
    sizes: Callable[[int], AdapterSize]
    merged_slot: Callable[[], int] = lambda: BASE
    can_merge: Callable[[int], bool] = lambda slot: True
    in_place: bool = False
    calibrated: bool = False
    corrections: Corrections = field(default_factory=Corrections)
    _product_seconds: dict[int, float] = field(default_factory=dict, init=False, repr=False)

    def use(self, profile: Profile) -> None:
        """Predict from this measured profile from now on."""
        self.profile = profile
        self.calibrated = True
        self._product_seconds.clear()

    # -- steps and switches ------------------------------------------------------------------

    def predict(self, parts: Sequence[Part], live: int) -> float:
        """Return the time of a step of these parts, from the end of the step before."""
        forward = self._uncorrected(parts, live) * self.corrections.factor(_kind(parts, live))
        return forward + self.corrections.overhead.seconds(len(parts))

    def record(
        self, parts: Sequence[Part], live: int, forward: float, overhead: float = 0.0
    ) -> float:
        """Learn from a measured step and return its predicted time.

        forward: measured time of the forward pass. overhead: measured rest of the step's time.
        """
        uncorrected, kind = self._uncorrected(parts, live), _kind(parts, live)
        factor = self.corrections.factor(kind)
        predicted = uncorrected * factor + self.corrections.overhead.seconds(len(parts))
        if uncorrected > 0.0 and forward > 0.0:
            self.corrections.errors.append(abs(predicted / (forward + overhead) - 1.0))
            self.corrections.learn_forward(kind, forward / uncorrected)
            self.corrections.overhead.learn(len(parts), overhead)
        return predicted

    def record_switch(self, predicted: float, seconds: float) -> None:
        """Learn from a measured switch that had to merge; `predicted` is its predicted time."""
        if predicted > 0.0 and seconds > 0.0:
            merges = self.corrections.merges
            merges.learn(seconds / predicted * merges.factor)

    @property
    def median_error(self) -> float:
        """Median relative error of the latest step predictions; 0 before the first step."""
        errors = self.corrections.errors
        return statistics.median(errors) if errors else 0.0

    # -- the protocols of the policies (`policies.base.Costs`, `predictive.StepCosts`) ----------

    def steps(self, ready: Sequence[Candidate], live: int) -> list[float]:
        overhead = self.corrections.overhead.seconds(1)
        factors: dict[StepKind, float] = {}
        adapters: dict[int, tuple[float, float]] = {}
        """Seconds of a step and of each of its rows for the adapters of a slot's rows."""
        seconds = []
        for r in ready:
            slot, rows = r.slot, r.missing
            kind = (rows.bit_length(), rows > 1, slot != live)
            if kind not in factors:
                factors[kind] = self.corrections.factor(kind)
            if slot not in adapters:
                applied = applied_adapters(slot, live)
                calls = self.profile.lora_calls if applied else 0.0
                adapters[slot] = (
                    calls + sum(map(self.read_adapter, applied)),
                    sum(self.apply_adapter(adapter, 1) for adapter in applied),
                )
            fixed, per_row = adapters[slot]
            forward = self.products(rows, 1) + self.attention(rows, r.context)
            seconds.append((forward + fixed + per_row * rows) * factors[kind] + overhead)
        return seconds

    def switch(self, live: int, to: int) -> float:
        fixed, per_product = self.profile.merge
        factor = self.corrections.merges.factor
        return sum(
            (fixed + per_product * self.sizes(slot).product) * factor
            for slot in self.merges(live, to)
        )

    def merges(self, live: int, to: int) -> set[int]:
        """Return the adapters whose products a switch adds to the weights or subtracts from them.

        Out of place, going back to the base or to the weights that are merged already takes none.
        In place, the live adapter is subtracted first.
        """
        if to == live:
            return set()
        changed = {live, to} if self.in_place else {to} - {self.merged_slot()}
        return changed - {BASE}

    def mergeable(self, slot: int) -> bool:
        return slot == BASE or self.can_merge(slot)

    def products(self, rows: int, answers: int) -> float:
        """Return the time of `rows` rows through all layers and `answers` rows through the head."""
        head_share = self.profile.head / (1.0 + self.profile.head)
        heads = head_share * self._products_at(answers) if answers else 0.0
        layers = self._products_at(rows) - head_share * self._products_at(1)
        return layers + heads + answers * self.profile.answer

    def overhead(self, requests: int) -> float:
        """Return the overhead at the pace of the calibration.

        On a machine that is slower now, the whole step is slower.
        """
        return self.corrections.overhead.seconds(requests) / self.corrections.pace.factor

    def attention(self, rows: int, context: int) -> float:
        profile = self.profile
        return profile.position * (context + rows) + profile.pair * rows * (context + rows / 2)

    def lora_calls(self) -> float:
        return self.profile.lora_calls

    def read_adapter(self, slot: int) -> float:
        return 0.0 if slot == BASE else self.profile.adapter_element * self.sizes(slot).factors

    def apply_adapter(self, slot: int, rows: int) -> float:
        if slot == BASE:
            return 0.0
        return self.profile.adapter_element_row * self.sizes(slot).factors * rows

    # -- the sum of a step -------------------------------------------------------------------

    def _uncorrected(self, parts: Sequence[Part], live: int) -> float:
        total = self.products(sum(p.rows for p in parts), sum(p.answered for p in parts))
        total += sum(self.attention(p.rows, p.context) for p in parts)
        return total + self._adapters(parts, live)

    def _adapters(self, parts: Sequence[Part], live: int) -> float:
        rows = rows_by_adapter(parts, live)
        calls = self.profile.lora_calls if rows else 0.0
        return calls + sum(
            self.read_adapter(slot) + self.apply_adapter(slot, n) for slot, n in rows.items()
        )

    def _products_at(self, rows: int) -> float:
        """Return the interpolated products; cached, since policies ask for every request."""
        seconds = self._product_seconds.get(rows)
        if seconds is None:
            seconds = self._product_seconds[rows] = _interpolate(self.profile.products, rows)
        return seconds


def applied_adapters(slot: int, live: int) -> set[int]:
    """Return the adapters that are applied to rows of a slot: its own, and the live one to be
    subtracted, unless they are the same."""
    return set() if slot == live else {slot, live} - {BASE}


def rows_by_adapter(parts: Iterable[Part], live: int) -> Mapping[int, int]:
    """Return the number of rows that each adapter is applied to."""
    rows: dict[int, int] = {}
    for part in parts:
        for slot in applied_adapters(part.slot, live):
            rows[slot] = rows.get(slot, 0) + part.rows
    return rows


def _kind(parts: Sequence[Part], live: int) -> StepKind:
    """Return the kind of a step: rows (by powers of two), any prompt rows, any adapter applied."""
    rows = sum(p.rows for p in parts)
    has_prompts = any(p.rows > 1 for p in parts)
    has_adapters = any(p.slot != live for p in parts)
    return (rows.bit_length(), has_prompts, has_adapters)


def _interpolate(knots: Sequence[tuple[int, float]], rows: int) -> float:
    """Interpolate linearly between knots; extrapolate with the slope of the last two knots."""
    i = min(max(bisect.bisect_left(knots, (rows,)), 1), len(knots) - 1)
    if i == 0:
        return knots[0][1] * max(1.0, rows / knots[0][0])
    (left, low), (right, high) = knots[i - 1], knots[i]
    return max(low + (high - low) * (rows - left) / (right - left), knots[0][1])


def guess(elements: int, itemsize: int, head: int) -> Profile:
    """Return a profile for use before anything is measured: a CPU of 10 GB/s and 50 GFLOP/s.

    elements: number of weights in the layers' matrices. itemsize: bytes of one weight.
    head: number of weights of the LM head.
    """
    read, compute = elements * itemsize / 1e10, 2 * elements / 5e10
    rows = (1, 4, 16, 64, 256)
    return Profile(
        products=tuple((n, (1 + head / elements) * max(read, n * compute)) for n in rows),
        head=head / elements,
        answer=5e-5,
        position=1e-7,
        pair=1e-8,
        adapter_element=itemsize / 1e10,
        adapter_element_row=2 / 5e10,
        merge=(2 * read, 2 / 5e10),
    )
