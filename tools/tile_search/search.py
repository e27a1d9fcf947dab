"""Algorithm 2 (appendix B): for every input shape the best tile configuration, by profiling.

    min, max = GETRANGE(model, hardware)           → Space.shapes: limited by memory
    configs  = GETCONFIG(hardware)                 → Backend.configs: pruned by arithmetic
    for shape in range(min, max, 32), for rank in ranklist, for each configuration:
        PROFILE; UPDATEBESTCONFIG                  → profile: interleaved, hot and cold apart;
                                                     duel: the best against the built-in one

Knows shapes, callables and clocks; what a configuration is, and how one is run, is the backend's.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from vlora.atmm.tiles import Operation

ROW_STEP = 32
"""The paper's step over input sizes; smaller inputs are decode steps, taken by powers of two."""
RANKS = (8, 16, 32, 64, 128)
"""The paper's rank list for vision tasks."""
SEGMENTS = (1, 4, 16)
MATRICES = (2, 4, 8, 16, 32)
"""Numbers of matrices in one merge; they are merged one after another, by the same tile."""

FEWEST_ROUNDS = 3
HOPELESS = 1.6
"""After one round, a configuration this many times slower than the best is dropped."""
WARM_CALLS = 2
"""Before a hot sample: one pass does not bring a large adapter back to a last-level cache."""
DUEL_ROUNDS = 15
"""Alternating samples of the winner and the built-in configuration, hot and cold each."""
SURE = 1.57
"""Interquartile ranges over the root of the samples: a median lies within so many of what was
measured in 95 of 100 cases (a box plot's notch)."""
SAMPLE_SECONDS = 3e-4
MOST_CALLS = 64


@dataclass(frozen=True, order=True)
class Shape:
    """`segments` segments of `rows` rows each, every one through another adapter of one rank.

    merge: rows = d_out, one segment. The order keeps shapes together that share adapters.
    """

    operation: Operation
    d_in: int
    d_out: int
    rank: int
    segments: int
    rows: int

    @property
    def name(self) -> str:
        return (
            f"{self.operation} {self.rows}×{self.d_in}→{self.d_out} r{self.rank} in {self.segments}"
        )


class Backend(Protocol):
    """What the search needs of the CPU or CUDA side."""

    def key(self, shape: Shape) -> str:
        """Of the table; shapes of one key are profiled once."""

    def built_in(self, shape: Shape) -> str:
        """The configuration that serves without a table."""

    def configs(self, shape: Shape) -> Sequence[str]:
        """Names of the configurations that are worth a measurement, the rest pruned."""

    def prepare(
        self, shape: Shape, configs: Sequence[str], *, cold: bool
    ) -> Mapping[str, Callable[[], None]]:
        """A call for each configuration, on its own data; cold: rotating out of the caches."""


@dataclass(frozen=True)
class Space:
    """GETRANGE: what is searched.

    sides: (d_in, d_out) of the model's targets, those that share an input taken together.
    memory_bytes: for the rows of one call, in and out. most_rows: of one call; above, a call is
    the same blocks more often, and the look-up's nearest bucket serves it.
    """

    sides: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...] = RANKS
    segments: tuple[int, ...] = SEGMENTS
    memory_bytes: int = 1 << 26
    most_rows: int = 2048
    element_bytes: int = 4

    def rows(self, d_in: int, d_out: int, segments: int = 1) -> list[int]:
        """Rows a segment: powers of two below the paper's step, then its steps up to the limit."""
        limit = self.memory_bytes // ((d_in + d_out) * self.element_bytes)
        limit = min(self.most_rows, limit) // segments
        small = [1 << i for i in range(ROW_STEP.bit_length()) if 1 << i < ROW_STEP]
        return [rows for rows in small if rows <= limit] + list(
            range(ROW_STEP, limit + 1, ROW_STEP)
        )

    def shapes(self, key: Callable[[Shape], str]) -> list[Shape]:
        """One shape for each key of the table: the largest, since a bucket ends there."""
        found: dict[str, Shape] = {}
        for d_in, d_out in dict.fromkeys(self.sides):
            for rank in self.ranks:
                for segments in self.segments:
                    for rows in self.rows(d_in, d_out, segments):
                        shape = Shape("apply", d_in, d_out, rank, segments, rows)
                        found[key(shape)] = shape
                shape = Shape("merge", d_in, d_out, rank, 1, d_out)
                found[key(shape)] = shape
        return sorted(found.values())


@dataclass(frozen=True)
class Profile:
    """Median seconds of each configuration (of few samples, if it was dropped early)."""

    seconds: Mapping[str, float]
    finalists: tuple[str, ...]

    @property
    def best(self) -> str:
        return min(self.finalists, key=self.seconds.__getitem__)

    @property
    def not_hopeless(self) -> list[str]:
        limit = HOPELESS * self.seconds[self.best]
        return [name for name, seconds in self.seconds.items() if seconds <= limit]


Clock = Callable[[], float]


def profile(
    calls: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    warm: bool,
    budget: float = math.inf,
    clock: Clock = time.perf_counter,
) -> Profile:
    """Interleaved medians with a stop rule.

    A configuration is dropped when it is surely worse: HOPELESS after a call or a round, or, once
    there are FEWEST_ROUNDS samples, when its fastest is slower than the best's upper quartile.
    budget: seconds after which FEWEST_ROUNDS are enough.
    """
    started = clock()
    counts: dict[str, int] = {}
    samples: dict[str, list[float]] = {}
    for name, call in calls.items():
        call()
        estimate = _seconds(call, 1, clock)
        counts[name] = max(1, min(MOST_CALLS, round(SAMPLE_SECONDS / max(estimate, 1e-9))))
        samples[name] = [estimate]
    alive = _promising(samples, list(calls))
    for name in alive:
        samples[name].clear()
    for turn in range(rounds):
        for name in alive[turn % len(alive) :] + alive[: turn % len(alive)]:
            for _ in range(WARM_CALLS if warm else 0):
                calls[name]()
            samples[name].append(_seconds(calls[name], counts[name], clock))
        alive = _promising(samples, alive)
        settled = len(alive) == 1 or clock() - started > budget
        if settled and turn + 1 >= FEWEST_ROUNDS:
            break
    return Profile({name: statistics.median(samples[name]) for name in calls}, tuple(alive))


def _promising(samples: Mapping[str, list[float]], alive: list[str]) -> list[str]:
    best = min(alive, key=lambda name: statistics.median(samples[name]))
    count = len(samples[best])
    if count < FEWEST_ROUNDS:
        limit = HOPELESS * min(samples[best])
    else:
        limit = statistics.quantiles(samples[best], n=4, method="inclusive")[2]
    return [name for name in alive if name == best or min(samples[name]) <= limit]


def _seconds(call: Callable[[], None], count: int, clock: Clock) -> float:
    started = clock()
    for _ in range(count):
        call()
    return (clock() - started) / count


def choose(hot: Profile, cold: Profile) -> str:
    """The configuration with the smallest regret: the least product of its hot and cold times.
    The engine's adapters are hot in a small model and cold in a large one; the key cannot tell."""
    shared = [name for name in hot.seconds if name in cold.seconds]
    return min(shared, key=lambda name: hot.seconds[name] * cold.seconds[name])


@dataclass(frozen=True)
class Duel:
    """Seconds of two configurations, in turns: a disturbance that lasts meets both."""

    ours: tuple[float, ...]
    others: tuple[float, ...]

    @property
    def log_ratios(self) -> list[float]:
        """Of ours over the other's, turn by turn."""
        return [math.log(a / b) for a, b in zip(self.ours, self.others, strict=True)]

    @property
    def noise(self) -> float:
        """What the median of the ratios may be off by."""
        low, _, high = statistics.quantiles(self.log_ratios, n=4, method="inclusive")
        return SURE * (high - low) / math.sqrt(len(self.ours))


def wins(hot: Duel, cold: Duel) -> bool:
    """Whether ours are faster, hot and cold together, by more than both duels' noise."""
    gain = sum(statistics.median(duel.log_ratios) for duel in (hot, cold))
    return gain < -math.hypot(hot.noise, cold.noise)


def duel(
    ours: Callable[[], None],
    other: Callable[[], None],
    *,
    warm: bool,
    rounds: int = DUEL_ROUNDS,
    clock: Clock = time.perf_counter,
) -> Duel:
    """Alternating samples, the first of a turn in turns."""
    calls = (ours, other)
    estimate = min(_seconds(call, 1, clock) for call in calls)
    count = max(1, min(MOST_CALLS, round(SAMPLE_SECONDS / max(estimate, 1e-9))))
    samples: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (turn % 2, 1 - turn % 2):
            for _ in range(WARM_CALLS if warm else 0):
                calls[which]()
            samples[which].append(_seconds(calls[which], count, clock))
    return Duel(tuple(samples[0]), tuple(samples[1]))


@dataclass
class State:
    """Results so far, one JSON line each, so that an interrupted search goes on."""

    path: Path
    stamp: str
    """What the results depend on (device, core version): another stamp starts afresh."""
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_text().splitlines()
        if not lines or _parsed(lines[0]) != {"stamp": self.stamp}:
            self.path.unlink()
            return
        for line in lines[1:]:
            if entry := _parsed(line):  # the last line may have been cut off
                self.done[entry["key"]] = entry

    def add(self, entry: dict[str, Any]) -> None:
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            if new:
                file.write(json.dumps({"stamp": self.stamp}) + "\n")
            file.write(json.dumps(entry) + "\n")
        self.done[entry["key"]] = entry


def _parsed(line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        return {}


def _duel(
    backend: Backend, shape: Shape, ours: str, other: str, *, warm: bool, clock: Clock
) -> Duel:
    calls = backend.prepare(shape, (ours, other), cold=not warm)
    return duel(calls[ours], calls[other], warm=warm, clock=clock)


def filled(
    entries: Iterable[Mapping[str, Any]], key: Callable[[Shape], str]
) -> list[dict[str, Any]]:
    """The entries, and the same choice for twice as many segments where none was searched (for a
    merge, whose segments are its matrices, for all): an exact hit is a hash look-up, the nearest
    bucket a scan of the table. Their microseconds were not measured, so there are none."""
    all_entries = [dict(entry) for entry in entries]
    known = {entry["key"] for entry in all_entries}
    for entry in list(all_entries):
        shape = Shape(**entry["shape"])
        for factor in (2,) if shape.operation == "apply" else MATRICES:
            wider = key(replace(shape, segments=factor * shape.segments))
            if wider not in known:
                known.add(wider)
                all_entries.append({**entry, "key": wider, "hot_us": None, "cold_us": None})
    return all_entries


def search(
    backend: Backend,
    shapes: Iterable[Shape],
    state: State,
    *,
    rounds: int,
    budget: float = math.inf,
    clock: Clock = time.perf_counter,
) -> Iterator[dict[str, Any]]:
    """Profile what the state lacks; yields each entry as it is known, resumed ones first."""
    shapes = list(shapes)
    keys = {shape: backend.key(shape) for shape in shapes}
    for shape in shapes:
        if keys[shape] in state.done:
            yield state.done[keys[shape]]
    for shape in shapes:
        if keys[shape] in state.done:
            continue
        configs = backend.configs(shape)
        calls = backend.prepare(shape, configs, cold=False)
        hot = profile(calls, rounds=rounds, warm=True, budget=budget, clock=clock)
        calls = backend.prepare(shape, hot.not_hopeless, cold=True)
        cold = profile(calls, rounds=rounds, warm=False, budget=budget, clock=clock)
        best, built_in = choose(hot, cold), backend.built_in(shape)
        times: dict[str, tuple[float, ...]] = {best: (hot.seconds[best], cold.seconds[best])}
        if best != built_in:
            duels = [
                _duel(backend, shape, best, built_in, warm=warm, clock=clock)
                for warm in (True, False)
            ]
            times = {
                best: tuple(statistics.median(one.ours) for one in duels),
                built_in: tuple(statistics.median(one.others) for one in duels),
            }
            best = best if wins(*duels) else built_in
        entry = {
            "key": keys[shape],
            "shape": vars(shape),
            "config": best,
            "hot_us": round(times[best][0] * 1e6, 3),
            "cold_us": round(times[best][1] * 1e6, 3),
            "best_hot": hot.best,
            "best_cold": cold.best,
            "tried": len(configs),
        }
        state.add(entry)
        yield entry
