"""LoRA's time in a step in mixture mode (deLoRA), divided by that in unmerged mode (figure 20).

In each step, `starved` requests use other adapters than the live one.

- Unmerged mode: the operator adds to each row the adapter of its request.
- Mixture mode: the live adapter is merged into the weights. The operator computes only the rows of
  starved requests. To these rows it adds the request's adapter, and it subtracts the live adapter.

In both modes, the operator is called once per group of projections.

The measured times are compared with two predictions from flops and bytes. The first prediction uses
the speed at which the operator multiplies this many rows when the adapter is in the caches. The
second prediction uses the CPU's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.machine import ConcurrentRates
from benchmarks.roofline import Roofline
from benchmarks.synthetic_model import SyntheticModel
from benchmarks.timing import interleaved
from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.search.timing import Timing
from vlora.atmm.segments import signed_segments
from vlora.atmm.types import Segment, Segments
from vlora.ids import BASE, order_of
from vlora.weights.slab import ATTENTION, GROUPS

READ_BYTES = 256 << 20
MULTIPLY_ROUNDS = 5_000_000
UNMERGED, MIXTURE = "unmerged", "mixture"
HOT_ROWS, MIN_CALLS, MAX_CALLS = 512, 4, 64
"""Total number of rows of a series of calls, and minimum and maximum number of calls. The first
call loads the adapter into the caches, from which the other calls read it."""


@dataclass(frozen=True)
class DeloraResult:
    """Seconds that LoRA takes in one step, by mode.

    starved: number of requests that use other adapters than the live one.
    timings: measured times.
    predicted: predictions from the operator's measured speed.
    by_peak: predictions from the CPU's peak.
    """

    phase: str
    requests: int
    starved: int
    timings: Mapping[str, Timing]
    predicted: Mapping[str, float]
    by_peak: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Time in mixture mode divided by time in unmerged mode: median of the rounds' ratios."""
        mixture, unmerged = (self.timings[name].samples for name in (MIXTURE, UNMERGED))
        return median(m / u for m, u in zip(mixture, unmerged, strict=True))

    @property
    def predicted_ratio(self) -> float:
        return self.predicted[MIXTURE] / self.predicted[UNMERGED]

    @property
    def predicted_ratio_by_peak(self) -> float:
        return self.by_peak[MIXTURE] / self.by_peak[UNMERGED]

    @property
    def error(self) -> float:
        return self.ratio / self.predicted_ratio - 1

    @property
    def error_by_peak(self) -> float:
        return self.ratio / self.predicted_ratio_by_peak - 1

    def as_row(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "requests": self.requests,
            "starved": self.starved,
            "ms": {name: round(t.median * 1e3, 3) for name, t in self.timings.items()},
            "predicted_ms": {name: round(s * 1e3, 3) for name, s in self.predicted.items()},
            "noise": {name: round(t.noise, 3) for name, t in self.timings.items()},
            "ratio": round(self.ratio, 3),
            "predicted_ratio": round(self.predicted_ratio, 3),
            "predicted_ratio_by_peak": round(self.predicted_ratio_by_peak, 3),
        }


@torch.inference_mode()
def measure(
    grid: Mapping[str, Any], model: SyntheticModel, roofline: Roofline, *, quick: bool
) -> list[DeloraResult]:
    """Measure each phase and number of starved requests with the adapters of an fp32 engine."""
    sizes, adapters = model.sizes, model.engine.adapters
    groups = [
        adapters.slots.group([(layer, target) for target in group])
        for layer in range(sizes.layers)
        for group in GROUPS
        if group[0] in ATTENTION
    ]
    # Only adapters of the largest rank are used: all adapters of the paper have the same rank.
    ranks = {slot: max(adapters.slots.adapter(slot).info.ranks) for slot in model.slots}
    live, *others = [slot for slot in model.slots if ranks[slot] == max(ranks.values())]
    results = []
    for phase in ("decode", "prefill"):
        rows = grid[f"{phase}_rows"]
        for starved in grid["starved"]:
            slots = [others[i % len(others)] for i in range(starved)]
            slots += [live] * (grid["requests"] - starved)
            modes = {}
            for name, in_weights in ((UNMERGED, BASE), (MIXTURE, live)):
                order = sorted(slots, key=lambda slot: order_of(slot, in_weights))
                modes[name] = signed_segments(((slot, rows) for slot in order), in_weights)
            results.append(
                _measure(
                    (phase, grid["requests"], starved),
                    groups,
                    modes,
                    grid["requests"] * rows,
                    roofline,
                    grid["quick_rounds" if quick else "rounds"],
                )
            )
    return results


def summarize(results: Sequence[DeloraResult]) -> dict[str, Any]:
    """Return the measured ratios and, for each phase, the largest error of the predicted ratios.

    The keys that end with `_by_peak` have the errors of predictions from the CPU's peak. The other
    errors are those of predictions from the operator's measured speed.
    """
    summary: dict[str, Any] = {}
    for result in results:
        key = f"delora_{result.phase}_{result.starved}_of_{result.requests}"
        summary[key] = round(result.ratio, 3)
    for phase in dict.fromkeys(result.phase for result in results):
        errors = [abs(result.error) for result in results if result.phase == phase]
        summary[f"delora_error_{phase}"] = round(max(errors), 3)
        errors = [abs(result.error_by_peak) for result in results if result.phase == phase]
        summary[f"delora_error_{phase}_by_peak"] = round(max(errors), 3)
    return summary


def _measure(
    labels: tuple[str, int, int],
    groups: Sequence[LoraGroup],
    modes: Mapping[str, Segments],
    rows: int,
    roofline: Roofline,
    rounds: int,
) -> DeloraResult:
    x = {group.d_in: torch.randn(rows, group.d_in) for group in groups}
    y = {group.width: torch.randn(rows, group.width) for group in groups}

    def all_layers(segments: Segments) -> Callable[[], None]:
        def call() -> None:
            for group in groups:
                op.apply(y[group.width], x[group.d_in], segments, group)

        return call

    lengths = sorted({segment.length for segments in modes.values() for segment in segments})
    concurrent = ConcurrentRates("fp32", MULTIPLY_ROUNDS, READ_BYTES)
    calls = {name: all_layers(segments) for name, segments in modes.items()}
    narrow = min(groups, key=lambda group: group.width)
    slot = modes[UNMERGED][0].slot
    hot = {f"hot {n}": _hot_calls(narrow, slot, n) for n in (0, *lengths)}
    timings = interleaved(calls | hot | concurrent.calls(), rounds=rounds, warm=False, budget=60.0)
    rate, peak = concurrent.rates(timings)
    overhead = timings["hot 0"].median / _call_count(0)
    hot_seconds = {
        n: max(0.0, timings[f"hot {n}"].median / _call_count(n) - overhead) for n in lengths
    }
    narrow_elements = _elements(narrow, slot)

    def moving(cold: int, warm: int) -> float:
        return roofline.seconds(0, ((cold, True), (warm, False)), "fp32", rate, peak)

    def at_peak(rows: int, elements: int) -> float:
        return roofline.seconds(2 * rows * elements, (), "fp32", rate, peak)

    def as_measured(rows: int, elements: int) -> float:
        return hot_seconds[rows] * elements / narrow_elements

    predicted, by_peak = (
        {
            name: sum(_predict(segments, group, multiplying, moving) for group in groups)
            for name, segments in modes.items()
        }
        for multiplying in (as_measured, at_peak)
    )
    predicted = {name: overhead * len(groups) + s for name, s in predicted.items()}
    return DeloraResult(*labels, {name: timings[name] for name in modes}, predicted, by_peak)


def _predict(
    segments: Segments,
    group: LoraGroup,
    multiplying: Callable[[int, int], float],
    moving: Callable[[int, int], float],
) -> float:
    """Return the seconds that flops and bytes predict, summed over the segments.

    An adapter's matrices come from memory. Each segment reads its rows of x, and reads and writes
    its rows of y, in the caches. The times of multiplying and of moving are added, since a core
    that waits for a panel multiplies nothing meanwhile. The roofline of a single call takes the
    larger of the two instead, but that would distort the ratio of the modes (decision 40).

    multiplying: function of (rows, elements of an adapter) that returns seconds.
    moving: function of (bytes from memory, bytes in the caches) that returns seconds.
    """
    size = group.dtype.itemsize
    total = 0.0
    for segment in segments:
        elements = _elements(group, segment.slot)
        row_bytes = segment.length * (group.d_in + 2 * group.width) * 4
        total += multiplying(segment.length, elements) + moving(elements * size, row_bytes)
    return total


def _elements(group: LoraGroup, slot: int) -> int:
    """Return the number of elements of an adapter's factors in one group of projections."""
    pairs = [column[slot] for column in group.pairs]
    return sum(
        pair.rank * (group.d_in + d_out)
        for pair, d_out in zip(pairs, group.d_outs, strict=True)
        if pair is not None
    )


def _hot_calls(group: LoraGroup, slot: int, rows: int) -> Callable[[], None]:
    """Return a function that calls the operator `_call_count(rows)` times on `rows` rows with one
    adapter, which stays in the caches.

    With 0 rows, the duration of the function is the overhead of the calls.
    """
    x, y = torch.randn(max(1, rows), group.d_in), torch.randn(max(1, rows), group.width)
    segments = Segments([Segment(0, rows, slot, +1)])

    def calls() -> None:
        for _ in range(_call_count(rows)):
            op.apply(y, x, segments, group)

    return calls


def _call_count(rows: int) -> int:
    return min(max(MIN_CALLS, HOT_ROWS // max(1, rows)), MAX_CALLS)
