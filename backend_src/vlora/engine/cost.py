"""The cost model, which predicts the time of a step or of a switch of the live (merged) adapter.

A profile, measured once per machine and model, predicts a forward pass as a sum. Its parts are the
matrix products by rows, the LM head by answers (rows with logits), attention by positions and by
pairs of a row and a position, the calls of the LoRA operator, and each applied adapter once and per
row.

Two factors correct this sum. One is the pace, measured over predicted time of the last few steps.
The other is learned for each kind of step. The overhead of a step (scheduling, sampling, outputs)
is learned only from the steps of this run (decision 42).
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vlora.engine.policies.base import Candidate
from vlora.ids import BASE

MAX_ERRORS = 512
PACE_WEIGHT = 0.4  # Large, because other processes change the pace within seconds.
KIND_WEIGHT = 0.05
MERGE_WEIGHT = 0.1
MERGED_WEIGHT = 0.05
# Each step without a merged adapter reduces its correction by this fraction, so that a merge is
# tried again some thousand steps after others have lost.
MERGED_FORGETTING = 0.0005
KIND_PRIOR = MERGED_PRIOR = 2  # Assumed measurements with ratio 1 that each kind starts with.
OVERHEAD_FORGETTING = 0.02  # Each step reduces the weight of all earlier ones by this fraction.
# A measured overhead is clipped to OUTLIER_FACTOR times the expected one, or to OUTLIER_SECONDS if
# that is longer: the machine was busy with something else.
OUTLIER_FACTOR, OUTLIER_SECONDS = 3.0, 1e-3
# A step's kind: bit length of its rows, whether a request has several, whether adapters apply.
StepKind = tuple[int, ...]


@dataclass
class RatioEstimate:
    """Exponential moving average of measured time over predicted time, as a geometric mean.

    weight: weight of a new measurement. The first 1/weight measurements have equal weights instead.
    log: natural logarithm of the average.
    samples: number of measurements so far. An initial value above 0 acts as that many measurements
        of ratio 1.
    """

    weight: float
    log: float = 0.0
    samples: int = 0

    def learn(self, ratio: float) -> None:
        self.samples += 1
        self.log += max(self.weight, 1 / self.samples) * (math.log(ratio) - self.log)

    @property
    def factor(self) -> float:
        """Factor to multiply predictions by."""
        return math.exp(self.log)


@dataclass
class StepOverhead:
    """Time of a step outside its forward pass, as a linear function of its number of requests.

    The line is fitted by least squares with exponential forgetting. Times are in seconds.

    weight: sum of the weights of all measurements so far.
    fixed, per_request: intercept and slope of the line.
    """

    weight: float = 0.0
    # Weighted sums of requests, requests², seconds, and requests × seconds.
    sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    fixed: float = 0.0
    per_request: float = 0.0

    def seconds(self, requests: int) -> float:
        """Return the expected overhead in seconds of a step with this number of requests."""
        return self.fixed + self.per_request * requests

    def learn(self, requests: int, seconds: float) -> None:
        if self.weight > 0.0:
            seconds = min(seconds, max(OUTLIER_SECONDS, OUTLIER_FACTOR * self.seconds(requests)))
        terms = (requests, requests**2, seconds, requests * seconds)
        retained = 1.0 - OVERHEAD_FORGETTING
        self.weight = retained * self.weight + 1.0
        self.sums = tuple(retained * old + new for old, new in zip(self.sums, terms, strict=True))
        n, squares, mean, product = (value / self.weight for value in self.sums)
        spread = squares - n * n
        slope = (product - n * mean) / spread if spread > 1e-6 * squares else 0.0
        self.per_request = min(max(0.0, slope), mean / n)
        self.fixed = mean - self.per_request * n


@dataclass
class Corrections:
    """Everything that a cost model has learned from steps and merges.

    pace: factor for the predicted times of all forward passes.
    merged: additional factor for those with a merged adapter.
    merges: factor for the predicted times of all merges.
    overhead: estimate of the time of a step outside its forward pass.
    """

    pace: RatioEstimate = field(default_factory=lambda: RatioEstimate(PACE_WEIGHT))
    merged: RatioEstimate = field(
        default_factory=lambda: RatioEstimate(MERGED_WEIGHT, samples=MERGED_PRIOR)
    )
    merges: RatioEstimate = field(default_factory=lambda: RatioEstimate(MERGE_WEIGHT))
    overhead: StepOverhead = field(default_factory=StepOverhead)
    # Relative errors of the latest step predictions.
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_ERRORS))
    _kinds: dict[StepKind, RatioEstimate] = field(default_factory=dict)

    def factor(self, kind: StepKind, live: int) -> float:
        """Return the factor by which to multiply the predicted forward pass of such a step."""
        of_kind = self._kinds.get(kind)
        factor = self.pace.factor * (1.0 if of_kind is None else of_kind.factor)
        return factor if live == BASE else factor * self.merged.factor

    def learn_forward(self, kind: StepKind, live: int, ratio: float) -> None:
        """Add a measurement: the time of a forward pass divided by its uncorrected prediction."""
        of_kind = self._kinds.setdefault(kind, RatioEstimate(KIND_WEIGHT, samples=KIND_PRIOR))
        if live != BASE:
            of_merged = ratio / (self.pace.factor * of_kind.factor)
            self.merged.learn(of_merged)
            ratio /= self.merged.factor
        self.pace.learn(ratio / of_kind.factor)
        if live == BASE:
            of_kind.learn(ratio / self.pace.factor)
            self.merged.log *= 1.0 - MERGED_FORGETTING


class Part(NamedTuple):
    """One request's part of a step: `rows` new tokens after `context` earlier ones.

    answered: whether the step computes the logits of the last row.
    """

    slot: int
    rows: int
    context: int
    answered: bool


class AdapterSize(NamedTuple):
    """Elements of A and B (`factors`) and multiplications of B·A (`product`), over all matrices."""

    factors: int
    product: int


@dataclass(frozen=True)
class Profile:
    """Measured times for one machine, model and dtype, in seconds.

    products: (rows, seconds) by rows, of a step with one answer, without adapter and context.
    head: weights of the LM head, divided by all other weights: its share in the time of one row.
    answer: time per answer in addition to the LM head.
    position: time to read the keys and values of one position.
    pair: time per pair of a row and a position to which the row attends.
    lora_calls: time of the operator's calls in a step that applies any adapter.
    adapter_element, adapter_element_row: time to read one element, and to apply it to one row.
    merge: (fixed time, time per multiplication of B·A) of adding or subtracting an adapter.
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
    """Predicted durations of an engine's steps and switches, in seconds.

    sizes, can_merge: return the size of the adapter in a slot, and whether it may be merged.
    merged_slot: returns the slot whose merged weights are in memory, active or not, or BASE.
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
        self.profile = profile
        self.calibrated = True
        self._product_seconds.clear()

    # -- steps and switches ------------------------------------------------------------------

    def predict(self, parts: Sequence[Part], live: int) -> float:
        """Return the predicted seconds of a step with `live` merged, with its overhead."""
        uncorrected, kind = self._uncorrected(parts, live)
        overhead = self.corrections.overhead.seconds(len(parts))
        return uncorrected * self.corrections.factor(kind, live) + overhead

    def record(
        self, parts: Sequence[Part], live: int, forward: float, overhead: float = 0.0
    ) -> float:
        """Learn from the measured seconds of a step, and return those that were predicted for it.

        forward, overhead: seconds of the forward pass, and of the rest of the step.
        """
        uncorrected, kind = self._uncorrected(parts, live)
        factor = self.corrections.factor(kind, live)
        predicted = uncorrected * factor + self.corrections.overhead.seconds(len(parts))
        if uncorrected > 0.0 and forward > 0.0:
            self.corrections.errors.append(abs(predicted / (forward + overhead) - 1.0))
            self.corrections.learn_forward(kind, live, forward / uncorrected)
            self.corrections.overhead.learn(len(parts), overhead)
        return predicted

    def record_switch(self, predicted: float, seconds: float) -> None:
        """Learn from a measured switch that had to merge. Both times are in seconds."""
        if predicted > 0.0 and seconds > 0.0:
            merges = self.corrections.merges
            merges.learn(seconds / predicted * merges.factor)

    @property
    def median_error(self) -> float:
        """Median relative error of the latest step predictions; 0 before the first step."""
        errors = self.corrections.errors
        return statistics.median(errors) if errors else 0.0

    # -- what policies use (see also `policies.base.Costs`) --------------------------------------

    def steps(self, ready: Sequence[Candidate], live: int) -> list[float]:
        overhead = self.corrections.overhead.seconds(1)
        # (Seconds per step, seconds per row) of the adapters applied to a request, by the request's
        # slot.
        adapters: dict[int, tuple[float, float]] = {}
        # (Seconds of the products, correction factor) by (number of rows, whether adapters apply).
        products: dict[tuple[int, bool], tuple[float, float]] = {}
        position, pair = self.profile.position, self.profile.pair
        seconds = []
        for r in ready:
            slot, rows, context = r.slot, r.missing, r.context
            of_adapters = adapters.get(slot)
            if of_adapters is None:
                of_adapters = adapters[slot] = self._applied(slot, live)
            key = rows, slot != live
            of_products = products.get(key)
            if of_products is None:
                kind = _kind(rows, 1, adapted=slot != live)
                factor = self.corrections.factor(kind, live)
                of_products = products[key] = self.products(rows, 1), factor
            forward = of_products[0] + of_adapters[0] + of_adapters[1] * rows
            # This is `attention`, written out because the loop runs for every candidate.
            forward += position * (context + rows) + pair * rows * (context + rows / 2)
            seconds.append(forward * of_products[1] + overhead)
        return seconds

    def _applied(self, slot: int, live: int) -> tuple[float, float]:
        """Return (seconds per step, per row) of the adapters applied to a slot's requests."""
        applied = applied_adapters(slot, live)
        if not applied:
            return 0.0, 0.0
        profile, factors = self.profile, sum([self.sizes(adapter).factors for adapter in applied])
        fixed = profile.lora_calls + profile.adapter_element * factors
        return fixed, profile.adapter_element_row * factors

    def switch(self, live: int, to: int) -> float:
        return sum(self.merge(slot) for slot in self.merges(live, to))

    def merge(self, slot: int) -> float:
        """Return the time of adding the product B·A of the adapter in this slot to the weights."""
        fixed, per_product = self.profile.merge
        product = self.sizes(slot).product
        return (fixed + per_product * product) * self.corrections.merges.factor

    def merges(self, live: int, to: int) -> set[int]:
        """Return the slots whose products B·A a switch adds to or subtracts from the weights.

        Weights that are still in memory need no product, and in-place merges are first undone.
        """
        if to == live:
            return set()
        changed = {live, to} if self.in_place else {to} - {self.merged_slot()}
        return changed - {BASE}

    def mergeable(self, slot: int) -> bool:
        return slot == BASE or self.can_merge(slot)

    def saving(self, parts: Sequence[Part], live: int) -> tuple[float, float]:
        """Return the seconds that a step with `live` merged takes less than one without, at the
        pace of the calibration: as measured for steps of these kinds, and by the profile alone.
        """
        (before, its_kind), (after, kind) = (
            self._uncorrected(parts, slot) for slot in (BASE, live)
        )
        factor, pace = self.corrections.factor, self.corrections.pace.factor
        measured = (factor(its_kind, BASE) * before - factor(kind, live) * after) / pace
        return measured, before - after

    def products(self, rows: int, answers: int) -> float:
        """Return the time of the matrix products of `rows` rows, with `answers` in the LM head."""
        head_share = self.profile.head / (1.0 + self.profile.head)
        heads = head_share * self._products_at(answers) if answers else 0.0
        layers = self._products_at(rows) - head_share * self._products_at(1)
        return layers + heads + answers * self.profile.answer

    def overhead(self, requests: int) -> float:
        """Return the expected overhead of a step at the pace of the calibration.

        All times that policies get are at this pace, so a policy can add them up.
        """
        return self.corrections.overhead.seconds(requests) / self.corrections.pace.factor

    def attention(self, rows: int, context: int) -> float:
        """Return the time of attention for `rows` rows of one request after `context` positions."""
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

    def adapters(self, rows_of: Mapping[int, int], live: int) -> float:
        """Return the time of the LoRA operator in a step; `rows_of`: number of rows by slot."""
        rows = rows_by_adapter(rows_of, live)
        calls = self.profile.lora_calls if rows else 0.0
        return calls + sum(
            self.read_adapter(slot) + self.apply_adapter(slot, n) for slot, n in rows.items()
        )

    # -- the sum of a step -------------------------------------------------------------------

    def _uncorrected(self, parts: Sequence[Part], live: int) -> tuple[float, StepKind]:
        """Return the seconds of a forward pass by the profile alone, and the kind of the step."""
        rows_of: dict[int, int] = {}
        answers, attention = 0, 0.0
        for slot, rows, context, answered in parts:
            rows_of[slot] = rows_of.get(slot, 0) + rows
            answers += answered
            attention += self.attention(rows, context)
        rows = sum(rows_of.values())
        seconds = self.products(rows, answers) + attention + self.adapters(rows_of, live)
        return seconds, _kind(rows, len(parts), adapted=bool(rows_of.keys() - {live}))

    def _products_at(self, rows: int) -> float:
        # Cached, because policies need it for each request in each step.
        seconds = self._product_seconds.get(rows)
        if seconds is None:
            seconds = self._product_seconds[rows] = _interpolate(self.profile.products, rows)
        return seconds


def applied_adapters(slot: int, live: int) -> set[int]:
    """Return the slots of the adapters that the operator adds to or subtracts from a row.

    Nothing is applied if the slot of the row's request is the live one. BASE is never in the set.
    """
    return set() if slot == live else {slot, live} - {BASE}


def rows_by_adapter(rows_of: Mapping[int, int], live: int) -> Mapping[int, int]:
    """Return the number of rows to which the LoRA operator applies each adapter, by slot.

    rows_of: number of rows of the requests of each slot.
    """
    rows: dict[int, int] = {}
    for slot, count in rows_of.items():
        for adapter in applied_adapters(slot, live):
            rows[adapter] = rows.get(adapter, 0) + count
    return rows


def _kind(rows: int, requests: int, *, adapted: bool) -> StepKind:
    return (rows.bit_length(), rows > requests, adapted)


def _interpolate(knots: Sequence[tuple[int, float]], rows: int) -> float:
    """Return the seconds for these rows by linear interpolation and extrapolation of the knots."""
    i = min(max(bisect.bisect_left(knots, (rows,)), 1), len(knots) - 1)
    if i == 0:
        return knots[0][1] * max(1.0, rows / knots[0][0])
    (left, low), (right, high) = knots[i - 1], knots[i]
    return max(low + (high - low) * (rows - left) / (right - left), knots[0][1])


def guess(elements: int, itemsize: int, head: int, *, stored: int = 0) -> Profile:
    """Return a profile for a CPU with 10 GB/s and 50 GFLOP/s, for use before one is measured.

    elements, head: numbers of weights in the layers' matrices, and in the LM head.
    stored: bytes of the layers' matrices if they are quantized, else 0.
    """
    read, compute = (stored or elements * itemsize) / 1e10, 2 * elements / 5e10
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
