"""deLoRA's extra work against unmerged's (figure 20): what LoRA adds to a step, in either mode.

`starved` of the step's requests ask for other adapters than the rest. Unmerged, all rows go through
their own; in mixture mode the starved go through theirs and have the live one taken out. Both are
calls of the operator for all layers, beside what their flops and bytes predict: flops at the rate
at which the operator multiplies so many rows when nothing waits for memory, and at the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.machine import Beside
from benchmarks.roofline import Limits
from benchmarks.synthetic_model import TestBed
from benchmarks.timing import Timing, interleaved
from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import Segment, Segments
from vlora.ids import BASE, order_of
from vlora.lora.segments import signed_segments
from vlora.lora.slab import ATTENTION, GROUPS

READ_BYTES = 256 << 20
MULTIPLY_ROUNDS = 5_000_000
UNMERGED, MIXTURE = "unmerged", "mixture"
HOT_ROWS, FEWEST_CALLS, MOST_CALLS = 512, 4, 64
"""Of calls in a row, so that all but the first find the adapter in the caches."""


@dataclass(frozen=True)
class Result:
    """timings and predicted seconds of LoRA in one step, by mode. by_peak: predicted with flops at
    the peak."""

    phase: str
    requests: int
    starved: int
    timings: Mapping[str, Timing]
    predicted: Mapping[str, float]
    by_peak: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Of deLoRA's extra work to unmerged's, as measured: of the two in the same round."""
        mixture, unmerged = (self.timings[name].samples for name in (MIXTURE, UNMERGED))
        return median(m / u for m, u in zip(mixture, unmerged, strict=True))

    @property
    def predicted_ratio(self) -> float:
        return self.predicted[MIXTURE] / self.predicted[UNMERGED]

    @property
    def error(self) -> float:
        return self.ratio / self.predicted_ratio - 1

    @property
    def error_by_peak(self) -> float:
        return self.ratio * self.by_peak[UNMERGED] / self.by_peak[MIXTURE] - 1

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
            "predicted_ratio_by_peak": round(self.by_peak[MIXTURE] / self.by_peak[UNMERGED], 3),
        }


def seconds(
    segments: Segments,
    group: LoraGroup,
    multiplying: Callable[[int, int], float],
    moving: Callable[[int, int], float],
) -> float:
    """As flops and bytes have it, segment by segment: an adapter's matrices from memory, its rows
    of x read and of y read and written, as often as a segment touches them, in the caches.

    Their sum, not the larger: a core that waits for a panel multiplies nothing meanwhile, which the
    limit of one call may leave out, the ratio of two modes may not (decision 40).

    multiplying: seconds of (rows, elements of an adapter); moving: of bytes (cold, in the caches).
    """
    size = group.dtype.itemsize
    found = 0.0
    for segment in segments:
        elements = _elements(group, segment.slot)
        rows = segment.length * (group.d_in + 2 * group.width) * 4
        found += multiplying(segment.length, elements) + moving(elements * size, rows)
    return found


def _elements(group: LoraGroup, slot: int) -> int:
    """Of an adapter's factors in one group."""
    pairs = [column[slot] for column in group.pairs]
    return sum(
        pair.rank * (group.d_in + d_out)
        for pair, d_out in zip(pairs, group.d_outs, strict=True)
        if pair is not None
    )


def _hot(group: LoraGroup, slot: int, rows: int) -> Callable[[], None]:
    """Calls for so many rows of one adapter that stays in the caches; 0: what a call costs."""
    x, y = torch.randn(max(1, rows), group.d_in), torch.randn(max(1, rows), group.width)
    segments = Segments([Segment(0, rows, slot, +1)])

    def again() -> None:
        for _ in range(_hot_calls(rows)):
            op.apply(y, x, segments, group)

    return again


def _hot_calls(rows: int) -> int:
    return min(max(FEWEST_CALLS, HOT_ROWS // max(1, rows)), MOST_CALLS)


@torch.inference_mode()
def run(given: Mapping[str, Any], bed: TestBed, limits: Limits, *, quick: bool) -> list[Result]:
    """Each phase and number of starved requests, with the adapters of an fp32 engine."""
    sizes, adapters = bed.sizes, bed.engine.adapters
    groups = [
        adapters.group([(layer, target) for target in group])
        for layer in range(sizes.layers)
        for group in GROUPS
        if group[0] in ATTENTION
    ]
    # All of the largest rank, as the paper's are of one.
    ranks = {slot: max(adapters.adapter(slot).info.ranks) for slot in bed.slots}
    live, *others = [slot for slot in bed.slots if ranks[slot] == max(ranks.values())]
    results = []
    for phase in ("decode", "prefill"):
        rows = given[f"{phase}_rows"]
        for starved in given["starved"]:
            asked = [others[i % len(others)] for i in range(starved)]
            asked += [live] * (given["requests"] - starved)
            modes = {}
            for name, in_weights in ((UNMERGED, BASE), (MIXTURE, live)):
                order = sorted(asked, key=lambda slot: order_of(slot, in_weights))
                modes[name] = signed_segments(((slot, rows) for slot in order), in_weights)
            results.append(
                _measure(
                    (phase, given["requests"], starved),
                    groups,
                    modes,
                    given["requests"] * rows,
                    limits,
                    given["quick_rounds" if quick else "rounds"],
                )
            )
    return results


def _measure(
    named: tuple[str, int, int],
    groups: Sequence[LoraGroup],
    modes: Mapping[str, Segments],
    rows: int,
    limits: Limits,
    rounds: int,
) -> Result:
    x = {group.d_in: torch.randn(rows, group.d_in) for group in groups}
    y = {group.width: torch.randn(rows, group.width) for group in groups}

    def call(segments: Segments) -> Callable[[], None]:
        def all_layers() -> None:
            for group in groups:
                op.apply(y[group.width], x[group.d_in], segments, group)

        return all_layers

    lengths = sorted({segment.length for one in modes.values() for segment in one})
    beside = Beside("fp32", MULTIPLY_ROUNDS, READ_BYTES)
    calls = {name: call(segments) for name, segments in modes.items()}
    narrow = min(groups, key=lambda group: group.width)
    slot = modes[UNMERGED][0].slot
    hot = {f"hot {n}": _hot(narrow, slot, n) for n in (0, *lengths)}
    timings = interleaved(calls | hot | beside.calls(), rounds=rounds, warm=False, budget=60.0)
    rate, peak = beside.rates(timings)
    once = timings["hot 0"].median / _hot_calls(0)
    of_rows = {n: max(0.0, timings[f"hot {n}"].median / _hot_calls(n) - once) for n in lengths}
    whole = _elements(narrow, slot)

    def moving(cold: int, warm: int) -> float:
        return limits.seconds(0, ((cold, True), (warm, False)), "fp32", rate, peak)

    def at_peak(rows: int, elements: int) -> float:
        return limits.seconds(2 * rows * elements, (), "fp32", rate, peak)

    def as_measured(rows: int, elements: int) -> float:
        return of_rows[rows] * elements / whole

    predicted, by_peak = (
        {
            name: sum(seconds(segments, group, multiplying, moving) for group in groups)
            for name, segments in modes.items()
        }
        for multiplying in (as_measured, at_peak)
    )
    predicted = {name: once * len(groups) + found for name, found in predicted.items()}
    return Result(*named, {name: timings[name] for name in modes}, predicted, by_peak)


def summarize(results: Sequence[Result]) -> dict[str, Any]:
    """delora_<phase>_<starved>_of_<requests>: measured ratio; delora_error_<phase>: the largest
    difference of a measured ratio from the predicted one, flops as measured and at the peak."""
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
