"""The switch benchmark: what it costs to change the live adapter.

It has four parts: merging all layers, M = W + B·A, against the roofline and torch; the time between
two tokens of a request with a change of mode between them; LoRA's time in mixture mode (deLoRA),
divided by that in unmerged mode (figure 20 of the paper); and how far weights drift that are merged
and unmerged in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks import frame
from benchmarks.frame import Benchmark, Row, matching, mean_of
from benchmarks.machine import DTYPES, Roofline, medians, noises, set_threads, timed_with_rates
from benchmarks.merges import MergeModel, addmm_calls
from benchmarks.models import SyntheticModel
from vlora.adapters.files import Adapter, AdapterInfo
from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.segments import signed_segments
from vlora.atmm.types import LoraPair, Merges, Segment, Segments
from vlora.device import host_memory
from vlora.ids import BASE, MatrixId, order_of
from vlora.model.switcher import Switcher
from vlora.weights.slab import ATTENTION, GROUPS, TARGETS, WeightSlab

READ_BYTES, MULTIPLY_ROUNDS = 256 << 20, 5_000_000
"""Work of the microbenchmarks in each round."""
MAX_ADDMM_SECONDS = 2.0
"""Maximum duration of torch's merge. A slower one is left out: without bf16 instructions, torch
takes minutes in bf16."""
TO_MERGED, UNCHANGED, TO_ANOTHER = "unmerged → merged", "merged, no change", "merged → another"
CHANGES = ((TO_MERGED, 0), (UNCHANGED, 0), (TO_ANOTHER, 1), ("merged → unmerged", BASE))
"""One round of changes as (name, index of the live adapter or BASE)."""
SPARE_POSITIONS = 64
"""Number of positions in the pages beyond those that the requests need."""
UNMERGES = 200
"""Number of times that unmerging is timed."""
WEIGHT_STD, FACTOR_STD = 0.02, 0.02
UNMERGED, MIXTURE = "unmerged", "mixture"
HOT_ROWS, MIN_CALLS, MAX_CALLS = 512, 4, 64
"""Total number of rows of a series of calls, and minimum and maximum number of calls. The first
call loads the adapter into the caches, from which the other calls read it."""


@dataclass(kw_only=True)
class Switch(Benchmark):
    """Times of merges, and delays that requests see.

    A cell is a model and a thread count; or "changes" or "drift" and a storage type.
    """

    name = "switch"
    title = "merges: geometric means over models and thread counts"
    bars: ClassVar = {
        "unmerge_us": "< 100",
        "merge_vs_limit": "≥ 0.77",
        "merge_vs_limit_bf16": "≥ 0.77",
        "delora_error_decode": "≤ 0.15",
        "delora_error_prefill": "≤ 0.15",
    }
    shown: ClassVar = {
        "M = W + B·A of all layers in one call": (
            "model layers rank dtype threads ms.atmm ms.addmm noise.atmm vs_addmm"
            " limit_ms roofline mbytes"
        ),
        "time between two tokens of a decoding request": "change dtype p50_ms p99_ms",
        "LoRA in one step: deLoRA's time over unmerged's": (
            f"phase starved requests ms.{UNMERGED} ms.{MIXTURE} ratio predicted_ratio"
        ),
        "base weights after merging and unmerging in place (out of place they never change)": (
            "in_place switches largest changed"
        ),
    }

    threads: frame.ThreadCounts = "1,2"
    dtypes: frame.Types = "fp32,bf16"

    def prepare(self) -> None:
        super().prepare()
        counts = frame.parse_thread_counts(self.threads)
        self._counts = counts[-1:] if self.quick else counts
        self._types = frame.parse_types(self.dtypes)
        self._unmerge_us: float | None = None

    def cells(self) -> Sequence[tuple[MergeModel | str, int | str]]:
        models = merge_models(self.values["models"], self._types, quick=self.quick)
        return [
            *((model, count) for count in self._counts for model in models),
            *((part, dtype) for part in ("changes", "drift") for dtype in self._types),
        ]

    def measure(self, cell: tuple[Any, Any]) -> Iterator[Row]:
        part, setting = cell
        set_threads(setting if isinstance(part, MergeModel) else self._counts[-1])
        if isinstance(part, MergeModel):
            self.status(f"merging, {part.name}")
            yield measure_merge(part, setting, self.roofline(setting), 3 if self.quick else 7)
        elif part == "changes":
            self.status("a mode switch between two tokens")
            yield from self._measure_engine(setting)
        else:
            self.status("merging in place")
            self._unmerge_us = self._unmerge_us or unmerge_us()
            yield from measure_drift(self.values["drift"], setting)

    def _measure_engine(self, dtype: str) -> Iterator[Row]:
        """Measure changes of mode and, in fp32, LoRA in mixture mode, on one engine."""
        grid, rounds = self.values["request"], "quick_rounds" if self.quick else "rounds"
        positions = grid["requests"] * (grid["context"] + SPARE_POSITIONS)
        checkpoint = self.generated(grid["model"])
        model = SyntheticModel(checkpoint, dtype, positions, grid["requests"])
        changes = list(measure_changes(grid, model, dtype, grid[rounds]))
        if dtype == "fp32":
            mixture = self.values["mixture"]
            roofline = self.roofline(self._counts[-1])
            yield from measure_delora(mixture, model, roofline, mixture[rounds])
        yield from changes

    def summarize(self) -> dict[str, Any]:
        merges = summarize_merges(self.rows)
        return merges | {"unmerge_us": self._unmerge_us} | summarize_modes(self.rows)


def _of(rows: Iterable[Row], key: str) -> list[Row]:
    """Return the rows of one part of the benchmark, which alone has this key."""
    return [row for row in rows if key in row]


def merge_models(
    entries: Iterable[Mapping[str, Any]], dtypes: Sequence[str], *, quick: bool
) -> list[MergeModel]:
    """Return the models of a grid file."""
    models = []
    for entry in entries:
        layers = entry["quick_layers"] if quick else entry["layers"]
        targets, copied = (tuple(map(tuple, entry.get(key, ()))) for key in ("targets", "copied"))
        for rank in entry["rank"][: 1 if quick else None]:
            models += [
                MergeModel(entry["name"], layers, targets, rank, dtype, copied) for dtype in dtypes
            ]
    return models


@torch.inference_mode()
def measure_merge(model: MergeModel, threads: int, roofline: Roofline, rounds: int) -> Row:
    """Measure merging into a second slab, and torch.addmm per matrix."""
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[model.dtype]
    base = host_memory.hugepage_zeros(model.elements, dtype=dtype).normal_(generator=generator)
    merged = host_memory.hugepage_zeros(model.elements, dtype=dtype).copy_(base)
    updates, copied = model.draw(generator)
    merges, products = Merges(updates, copied), addmm_calls(updates, base, merged)

    def addmm() -> None:
        for part in copied:
            merged[part.offset :][: part.size] = base[part.offset :][: part.size]
        for product in products:
            product()

    calls: dict[str, Callable[[], None]] = {"atmm": lambda: op.merge(merged, base, merges)}
    # A sixteenth of the first matrix shows how long all matrices would take.
    d_out, d_in = model.targets[0]
    rows = max(1, d_out // 16)
    started = time.perf_counter()
    addmm_calls(updates[:1], base, merged, rows)[0]()
    seconds = (time.perf_counter() - started) * model.elements / (rows * d_in)
    if seconds < MAX_ADDMM_SECONDS:
        calls["addmm"] = addmm
    options = {"rounds": rounds, "warm": False, "budget": 20.0}
    timings, rates = timed_with_rates(calls, "fp32", MULTIPLY_ROUNDS, READ_BYTES, **options)
    # The peak is that of fp32, even for bf16 weights: the factors are fp32, and the merged matrix
    # is the sum rounded once. (torch's addmm rounds B as well.)
    moved = ((model.moved_bytes, True),)
    limit = roofline.seconds(model.flops, moved, "fp32", rates.read, rates.peak)
    seconds = timings["atmm"].median
    return {
        "model": model.name,
        "layers": model.layers,
        "rank": model.rank,
        "dtype": model.dtype,
        "mbytes": model.elements * dtype.itemsize >> 20,
        "threads": threads,
        "limit_ms": limit * 1e3,
        "roofline": limit / seconds,
        "vs_addmm": timings["addmm"].median / seconds if "addmm" in timings else None,
        "ms": medians(timings, 1e3),
        "noise": noises(timings),
    }


def measure_changes(
    grid: Mapping[str, Any], model: SyntheticModel, dtype: str, rounds: int
) -> Iterator[Row]:
    """Measure rounds of all changes with decoding requests. The first round is not counted.

    The time runs from a request's last token in the old mode to its first token in the new mode.
    The benchmark, and not a policy, decides the engine's live adapter.
    """
    requests, context = grid["requests"], grid["context"]
    model.stage(requests, context + 1, context)
    # Only two adapters of the largest rank become live, so that all merges are equally large.
    ranks = [model.engine.adapters.slots.adapter(slot).info.ranks for slot in model.slots]
    pair = [slot for slot, own in zip(model.slots, ranks, strict=True) if own == max(ranks)]
    pair *= 2  # The model may have only one such adapter.
    gaps: dict[str, list[float]] = {name: [] for name, _ in CHANGES}
    for number in range(1 + rounds):
        for name, index in CHANGES:
            live = BASE if index == BASE else pair[index]
            step = model.step([live] * requests)
            with model.live_adapter(live):
                started = time.perf_counter()
                step()
                if number:
                    gaps[name].append((time.perf_counter() - started) * 1e3)
    for name, ms in gaps.items():
        percentiles = {f"p{share}_ms": float(np.percentile(ms, share)) for share in (50, 99)}
        yield {"change": name, "dtype": dtype, **percentiles, "gaps_ms": ms}


@torch.inference_mode()
def measure_delora(
    grid: Mapping[str, Any], model: SyntheticModel, roofline: Roofline, rounds: int
) -> Iterator[Row]:
    """Measure LoRA's time in a step in both modes, with the adapters of an fp32 engine.

    In each step, `starved` requests use other adapters than the live one. In unmerged mode, the
    operator adds to each row the adapter of its request. In mixture mode, the live adapter is
    merged into the weights: the operator computes only the rows of starved requests, to which it
    adds the request's adapter, and from which it subtracts the live adapter.
    """
    adapters = model.engine.adapters
    groups = [
        adapters.slots.group([(layer, target) for target in group])
        for layer in range(model.sizes.layers)
        for group in GROUPS
        if group[0] in ATTENTION
    ]
    # Only adapters of the largest rank are used: all adapters of the paper have the same rank.
    ranks = {slot: max(adapters.slots.adapter(slot).info.ranks) for slot in model.slots}
    live, *others = [slot for slot in model.slots if ranks[slot] == max(ranks.values())]
    for phase in ("decode", "prefill"):
        rows = grid[f"{phase}_rows"]
        for starved in grid["starved"]:
            slots = [others[i % len(others)] for i in range(starved)]
            slots += [live] * (grid["requests"] - starved)
            modes = {}
            for name, in_weights in ((UNMERGED, BASE), (MIXTURE, live)):
                order = sorted(slots, key=lambda slot: order_of(slot, in_weights))
                modes[name] = signed_segments(((slot, rows) for slot in order), in_weights)
            row = {"phase": phase, "requests": grid["requests"], "starved": starved}
            yield row | _delora_figures(groups, modes, rows * len(slots), roofline, rounds)


def _delora_figures(
    groups: Sequence[LoraGroup],
    modes: Mapping[str, Segments],
    rows: int,
    roofline: Roofline,
    rounds: int,
) -> Row:
    """Return measured times and predictions of them from flops and bytes.

    The predictions use the speed at which the operator multiplies this many rows when the adapter
    is in the caches.
    """
    x = {group.d_in: torch.randn(rows, group.d_in) for group in groups}
    y = {group.width: torch.randn(rows, group.width) for group in groups}

    def all_layers(segments: Segments) -> None:
        for group in groups:
            op.apply(y[group.width], x[group.d_in], segments, group)

    lengths = sorted({segment.length for segments in modes.values() for segment in segments})
    narrow, slot = min(groups, key=lambda group: group.width), modes[UNMERGED][0].slot
    calls: dict[str, Callable[[], None]] = {
        name: lambda segments=segments: all_layers(segments)  # type: ignore[misc]
        for name, segments in modes.items()
    }
    calls |= {f"hot {n}": _hot_calls(narrow, slot, n) for n in (0, *lengths)}
    options = {"rounds": rounds, "warm": False, "budget": 60.0}
    timings, rates = timed_with_rates(calls, "fp32", MULTIPLY_ROUNDS, READ_BYTES, **options)
    overhead = timings["hot 0"].median / _call_count(0)
    hot = {n: max(0.0, timings[f"hot {n}"].median / _call_count(n) - overhead) for n in lengths}

    per_element = {n: seconds / _elements(narrow, slot) for n, seconds in hot.items()}

    def moving(cold: int, warm: int) -> float:
        return roofline.seconds(0, ((cold, True), (warm, False)), "fp32", rates.read, rates.peak)

    predicted = {
        name: overhead * len(groups) + _predict(segments, groups, per_element, moving)
        for name, segments in modes.items()
    }
    timed = {name: timings[name] for name in modes}
    samples = zip(timed[MIXTURE].samples, timed[UNMERGED].samples, strict=True)
    return {
        "ms": medians(timed, 1e3),
        "noise": noises(timed),
        "ratio": median(mixture / unmerged for mixture, unmerged in samples),
        "predicted_ratio": predicted[MIXTURE] / predicted[UNMERGED],
    }


def _predict(
    segments: Segments,
    groups: Sequence[LoraGroup],
    per_element: Mapping[int, float],
    moving: Callable[[int, int], float],
) -> float:
    """Return the sum over groups and segments of the seconds of multiplying and of moving.

    An adapter's matrices come from memory; rows of x and y move within the caches. The times are
    added, since a core that waits for a panel multiplies nothing meanwhile.

    per_element: seconds of multiplying per element of an adapter, by number of rows.
    moving: function of (bytes from memory, bytes in the caches) that returns seconds.
    """
    total = 0.0
    for group in groups:
        for one in segments:
            elements = _elements(group, one.slot)
            row_bytes = one.length * (group.d_in + 2 * group.width) * 4
            total += elements * per_element[one.length]
            total += moving(elements * group.dtype.itemsize, row_bytes)
    return total


def _elements(group: LoraGroup, slot: int) -> int:
    """Return the number of elements of an adapter's factors in one group of projections."""
    pairs = zip((column[slot] for column in group.pairs), group.d_outs, strict=True)
    return sum(pair.rank * (group.d_in + d_out) for pair, d_out in pairs if pair is not None)


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


@dataclass(frozen=True)
class RandomAdapters:
    """Random adapters on every matrix of a slab, with the interface that the switcher needs."""

    adapters: Sequence[Adapter]
    matrices: frozenset[MatrixId]

    @classmethod
    def of(cls, slab: WeightSlab, count: int, rank: int) -> RandomAdapters:
        """Return `count` adapters of rank `rank`."""
        generator = torch.Generator().manual_seed(1)
        matrices = frozenset((layer, name) for layer in range(slab.layers) for name in TARGETS)

        def factors(d_out: int, d_in: int) -> LoraPair:
            a, b = torch.empty(rank, d_in), torch.empty(d_out, rank)
            for factor in (a, b):
                factor.normal_(0.0, FACTOR_STD, generator=generator)
            return LoraPair(a, 2 * b)  # A scale of 2, as in PEFT's examples.

        info = AdapterInfo("drawn", "", (rank,), TARGETS, (), {}, (), ())
        adapters = []
        for number in range(count):
            pairs = {matrix: factors(*slab.shapes[matrix[1]]) for matrix in sorted(matrices)}
            adapters.append(Adapter(replace(info, digest=str(number)), pairs, None))
        return cls(adapters, matrices)

    def adapter(self, slot: int) -> Adapter:
        return self.adapters[slot]


def unmerge_us() -> float:
    """Return the larger median time of unmerging, in µs, of few and of many layers."""
    medians = []
    for count in (1, 64):
        slab = WeightSlab(count, dict.fromkeys(TARGETS, (64, 64)))
        slab.base.zero_()
        switcher = Switcher(slab, RandomAdapters.of(slab, 1, 4))
        seconds = []
        for _ in range(UNMERGES):
            switcher.switch(0)
            started = time.perf_counter()
            switcher.switch(BASE)
            seconds.append(time.perf_counter() - started)
        medians.append(median(seconds) * 1e6)
    return max(medians)


def measure_drift(grid: Mapping[str, Any], dtype: str) -> Iterator[Row]:
    """Yield the largest change of a weight by merging in place, and the share of changed weights,
    by number of switches.
    """
    shapes = dict.fromkeys(TARGETS, (grid["hidden"], grid["hidden"]))
    slab = WeightSlab(grid["layers"], shapes, DTYPES[dtype])
    generator = torch.Generator().manual_seed(0)
    slab.base.copy_(torch.empty(slab.elements).normal_(0.0, WEIGHT_STD, generator=generator))
    before = slab.base.clone()
    adapters = RandomAdapters.of(slab, grid["adapters"], grid["rank"])
    switcher = Switcher(slab, adapters, "in_place")
    done = 0
    for switches in grid["switches"]:
        for number in range(done, switches):
            switcher.switch(number % grid["adapters"])
        done = switches
        switcher.switch(BASE)
        moved = (slab.base.float() - before.float()).abs()
        row = {"in_place": dtype, "switches": switches, "largest": float(moved.max())}
        yield row | {"changed": float((moved > 0).float().mean())}


def summarize_merges(rows: Sequence[Row]) -> dict[str, Any]:
    """Return, by type, the mean and worst share of the roofline, and the speed-up over addmm."""
    summary: dict[str, Any] = {}
    for dtype, suffix in (("fp32", ""), ("bf16", "_bf16")):
        if of_type := matching(_of(rows, "model"), dtype=dtype):
            shares = [row["roofline"] for row in of_type]
            summary[f"merge_vs_limit{suffix}"] = mean_of(shares)
            summary[f"merge_vs_addmm{suffix}"] = mean_of(row["vs_addmm"] for row in of_type)
            summary[f"merge_vs_limit_worst{suffix}"] = min(shares)
    return summary


def summarize_modes(rows: Sequence[Row]) -> dict[str, Any]:
    """Return figures of the changes of mode, of the drift and of mixture mode.

    These are, by type, the gaps between two tokens with and without a merge, and the drift after
    the largest number of switches. For mixture mode, they are the measured ratios and, for each
    phase, the largest error of the predicted ratios.
    """
    summary: dict[str, Any] = {}
    gaps = {(row["dtype"], row["change"]): row["gaps_ms"] for row in _of(rows, "change")}
    for dtype in dict.fromkeys(dtype for dtype, _ in gaps):
        suffix = "" if dtype == "fp32" else f"_{dtype}"
        merging = gaps[dtype, TO_MERGED] + gaps[dtype, TO_ANOTHER]
        summary[f"switch_p50_ms{suffix}"] = median(merging)
        summary[f"switch_p99_ms{suffix}"] = float(np.percentile(merging, 99))
        summary[f"no_switch_p50_ms{suffix}"] = median(gaps[dtype, UNCHANGED])
    for row in _of(rows, "in_place"):
        suffix = "" if row["in_place"] == "fp32" else f"_{row['in_place']}"
        summary[f"in_place_drift{suffix}"] = row["largest"]
    errors: dict[str, float] = {}
    for row in _of(rows, "phase"):
        phase = row["phase"]
        summary[f"delora_{phase}_{row['starved']}_of_{row['requests']}"] = row["ratio"]
        error = abs(row["ratio"] / row["predicted_ratio"] - 1)
        errors[phase] = max(error, errors.get(phase, 0.0))
    return summary | {f"delora_error_{phase}": error for phase, error in errors.items()}
