"""Algorithm 2 (appendix B): find the best tile configuration of every input shape by profiling.

    min, max = GETRANGE(model, hardware)           → Space.shapes: limited by memory
    configs  = GETCONFIG(hardware)                 → Backend.configs: pruned by arithmetic
    for shape in range(min, max, 32), for rank in ranklist, for each configuration:
        PROFILE; UPDATEBESTCONFIG                  → profile: interleaved, hot and cold;
                                                     duel: the best against the built-in one

This module handles shapes and timing. A `Backend` defines and runs configurations.
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

# Step over the numbers of rows, as in the paper. Smaller numbers (decode) are powers of two.
ROW_STEP = 32
RANKS = (8, 16, 32, 64, 128)  # The paper's ranks for vision tasks.
SEGMENTS = (1, 4, 16)
# Numbers of matrices in a merge. They are merged one after another with the same tile.
MATRICES = (2, 4, 8, 16, 32)
# Matrix sizes (d_in, d_out) of the `kernels` benchmark.
BENCH = ((1024, 1024), (4096, 4096))
MIN_ROUNDS = 3
# Ratio to the best time above which a configuration is dropped before MIN_ROUNDS samples.
HOPELESS = 1.6
# Number of calls before a hot sample. One call does not load a large adapter into the last-level
# cache.
WARM_CALLS = 2
# Number of alternating samples of the winner and the built-in configuration, with hot and with cold
# adapters.
DUEL_ROUNDS = 15
# Half width of a box plot's notch, in units of the interquartile range divided by the root of the
# sample count. In 95 of 100 cases, the true median is within this distance of the sample's median.
NOTCH = 1.57
SAMPLE_SECONDS = 3e-4
MAX_CALLS = 64
ROW_ELEMENT_BYTES = 4


@dataclass(frozen=True, order=True)
class Shape:
    """Shape of a call: `segments` segments of `rows` rows, each with an adapter of rank `rank`.

    A merge has rows = d_out and one segment per matrix. Shapes are sorted so that those that share
    adapters are adjacent.
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
    """Interface of the device whose configurations are searched."""

    def key(self, shape: Shape) -> str:
        """Return the key of a shape in the table. Only one shape per key is profiled."""

    def built_in(self, shape: Shape) -> str:
        """Return the configuration that is used if there is no table."""

    def configs(self, shape: Shape) -> Sequence[str]:
        """Return the names of the configurations to measure, after pruning."""

    def prepare(
        self, shape: Shape, configs: Sequence[str], *, cold: bool
    ) -> Mapping[str, Callable[[], None]]:
        """Return, for each configuration, a function that computes the shape with it once.

        cold: whether successive calls use different data, which exceed the caches together.
        """


@dataclass(frozen=True)
class Space:
    """GETRANGE: the space of shapes to search.

    sides: (d_in, d_out) of the model's targets. Targets that share an input are combined.
    memory_bytes: maximum bytes of input and output rows of a call.
    max_rows: maximum number of rows of a call. A larger call repeats the same blocks.
    """

    sides: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...] = RANKS
    segments: tuple[int, ...] = SEGMENTS
    memory_bytes: int = 1 << 26
    max_rows: int = 2048

    def rows(self, d_in: int, d_out: int, segments: int = 1) -> list[int]:
        """Return rows per segment: powers of two below ROW_STEP, then multiples of it."""
        limit = self.memory_bytes // ((d_in + d_out) * ROW_ELEMENT_BYTES)
        limit = min(self.max_rows, limit) // segments
        small = [1 << i for i in range(ROW_STEP.bit_length()) if 1 << i < ROW_STEP]
        return [*(rows for rows in small if rows <= limit), *range(ROW_STEP, limit + 1, ROW_STEP)]

    def shapes(self, key: Callable[[Shape], str]) -> list[Shape]:
        """Return one shape for each key of the table: the largest one of its bucket."""
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


def sides_of(folder: Path) -> tuple[tuple[int, int], ...]:
    """Return the sizes of a checkpoint: input (q, k, v together) and output of attention and MLP.

    Raises ValueError for a config.json without the sizes of a Llama-like decoder.
    """
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        inner = int(config["intermediate_size"])
    except KeyError as missing:
        raise ValueError(f"{folder / 'config.json'} has no {missing}") from None
    head = int(config.get("head_dim") or hidden // heads)
    queries = heads * head
    keys = int(config.get("num_key_value_heads") or heads) * head
    sides = (hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * inner), (inner, hidden)
    return tuple(dict.fromkeys(sides))


@dataclass
class State:
    """Results of a search so far, in a file with one JSON object per line.

    stamp: device and version that the results depend on. Results with another stamp are discarded.
    """

    path: Path
    stamp: str
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.exists():
            return
        first, *lines = self.path.read_text().splitlines() or [""]
        if _parse(first) != {"stamp": self.stamp}:
            self.path.unlink()
            return
        for line in lines:
            if entry := _parse(line):  # The last line may be incomplete.
                self.done[entry["key"]] = entry

    def add(self, entry: dict[str, Any]) -> None:
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            if new:
                file.write(json.dumps({"stamp": self.stamp}) + "\n")
            file.write(json.dumps(entry) + "\n")
        self.done[entry["key"]] = entry


def _parse(line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        return {}


@dataclass(frozen=True)
class Profile:
    """Median seconds of each configuration. A configuration that was dropped has few samples."""

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
    """Measure interleaved medians, and drop slow configurations early.

    With fewer than MIN_ROUNDS samples, a configuration is dropped if it takes HOPELESS times as
    long as the best; later, if its fastest sample is slower than the best one's upper quartile.

    budget: seconds after which MIN_ROUNDS samples are enough.
    """
    started = clock()
    counts: dict[str, int] = {}
    samples: dict[str, list[float]] = {}
    for name, call in calls.items():
        call()
        estimate = _seconds(call, 1, clock)
        counts[name] = _calls_per_sample(estimate)
        samples[name] = [estimate]
    alive = _promising(samples, list(calls))
    for name in alive:
        samples[name].clear()
    for index in range(rounds):
        for name in alive[index % len(alive) :] + alive[: index % len(alive)]:
            samples[name].append(_sample(calls[name], counts[name], warm, clock))
        alive = _promising(samples, alive)
        settled = len(alive) == 1 or clock() - started > budget
        if settled and index + 1 >= MIN_ROUNDS:
            break
    return Profile({name: statistics.median(samples[name]) for name in calls}, tuple(alive))


def _promising(samples: Mapping[str, list[float]], alive: list[str]) -> list[str]:
    best = min(alive, key=lambda name: statistics.median(samples[name]))
    if len(samples[best]) < MIN_ROUNDS:
        limit = HOPELESS * min(samples[best])
    else:
        limit = statistics.quantiles(samples[best], n=4, method="inclusive")[2]
    return [name for name in alive if name == best or min(samples[name]) <= limit]


def _sample(call: Callable[[], None], count: int, warm: bool, clock: Clock) -> float:
    for _ in range(WARM_CALLS if warm else 0):
        call()
    return _seconds(call, count, clock)


def _seconds(call: Callable[[], None], count: int, clock: Clock) -> float:
    started = clock()
    for _ in range(count):
        call()
    return (clock() - started) / count


def _calls_per_sample(seconds: float) -> int:
    return max(1, min(MAX_CALLS, round(SAMPLE_SECONDS / max(seconds, 1e-9))))


def choose(hot: Profile, cold: Profile) -> str:
    """Return the configuration with the smallest product of hot and cold times.

    One table serves small models, whose adapters are hot, and large ones, whose adapters are cold.
    """
    shared = [name for name in hot.seconds if name in cold.seconds]
    return min(shared, key=lambda name: hot.seconds[name] * cold.seconds[name])


@dataclass(frozen=True)
class Duel:
    """Seconds of our and another configuration, measured alternately against disturbances."""

    ours: tuple[float, ...]
    others: tuple[float, ...]

    @property
    def log_ratios(self) -> list[float]:
        """log(ours / others) for each pair of samples; negative where `ours` is faster."""
        return [math.log(a / b) for a, b in zip(self.ours, self.others, strict=True)]

    @property
    def noise(self) -> float:
        """Half width of the 95 % interval of the median ratio, in units of its logarithm."""
        low, _, high = statistics.quantiles(self.log_ratios, n=4, method="inclusive")
        return NOTCH * (high - low) / math.sqrt(len(self.ours))


def wins(hot: Duel, cold: Duel) -> bool:
    """Return whether `ours` is faster: whether the sum of both gains exceeds the root of the sum of
    the squares of both noises.
    """
    gain = sum(statistics.median(duel.log_ratios) for duel in (hot, cold))
    return gain < -math.hypot(hot.noise, cold.noise)


def duel(
    ours: Callable[[], None],
    other: Callable[[], None],
    *,
    warm: bool,
    clock: Clock = time.perf_counter,
) -> Duel:
    """Return the times of two calls that are measured alternately and take turns to start."""
    calls = (ours, other)
    count = _calls_per_sample(min(_seconds(call, 1, clock) for call in calls))
    samples: tuple[list[float], list[float]] = ([], [])
    for index in range(DUEL_ROUNDS):
        for which in (index % 2, 1 - index % 2):
            samples[which].append(_sample(calls[which], count, warm, clock))
    return Duel(tuple(samples[0]), tuple(samples[1]))


def filled(
    entries: Iterable[Mapping[str, Any]], key: Callable[[Shape], str]
) -> list[dict[str, Any]]:
    """Return the entries, and copies of them for numbers of segments that were not searched.

    The copies have no times. An entry for apply is copied to twice its number of segments, one for
    merge, whose segments are matrices, to all numbers in MATRICES. So more look-ups find an exact
    match by hash.
    """
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
    """Profile the shapes that the state lacks. Yield all entries, stored ones first."""
    shapes = list(shapes)
    keys = {shape: backend.key(shape) for shape in shapes}
    for shape in shapes:
        if keys[shape] in state.done:
            yield state.done[keys[shape]]
    for shape in shapes:
        if keys[shape] in state.done:
            continue
        found = _best(backend, shape, rounds, budget, clock)
        entry = {"key": keys[shape], "shape": vars(shape), **found}
        state.add(entry)
        yield entry


def _best(
    backend: Backend, shape: Shape, rounds: int, budget: float, clock: Clock
) -> dict[str, Any]:
    configs = backend.configs(shape)
    calls = backend.prepare(shape, configs, cold=False)
    hot = profile(calls, rounds=rounds, warm=True, budget=budget, clock=clock)
    calls = backend.prepare(shape, hot.not_hopeless, cold=True)
    cold = profile(calls, rounds=rounds, warm=False, budget=budget, clock=clock)
    best, built_in = choose(hot, cold), backend.built_in(shape)
    times: tuple[float, ...] = (hot.seconds[best], cold.seconds[best])
    if best != built_in:
        duels = []
        for warm in (True, False):
            calls = backend.prepare(shape, (best, built_in), cold=not warm)
            duels.append(duel(calls[best], calls[built_in], warm=warm, clock=clock))
        won = wins(*duels)
        best = best if won else built_in
        times = tuple(statistics.median(one.ours if won else one.others) for one in duels)
    return {
        "config": best,
        "hot_us": round(times[0] * 1e6, 3),
        "cold_us": round(times[1] * 1e6, 3),
        "best_hot": hot.best,
        "best_cold": cold.best,
        "tried": len(configs),
    }
