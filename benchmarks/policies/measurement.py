"""`vlora bench policies`: the policies on seeded traces, measured, and simulated beside.

Every measured replay has the simulated one of the same trace beside it; larger traces are simulated
alone. A run goes on where its file ends, row by row.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.llava import MODELS, Checkpoint, make
from benchmarks.policies.closed_loop import ClosedLoop, ratio
from benchmarks.policies.own_operators import OWN, RULE_OF, operator
from benchmarks.policies.replay import Replay, measured, simulated
from benchmarks.policies.simulation import fork, without_adapters
from benchmarks.policies.source_fingerprint import source_fingerprint
from benchmarks.policies.traces import Asked, Workload
from benchmarks.synthetic_model import NAMES
from benchmarks.timing import geometric_mean
from vlora import paths
from vlora.config import Options
from vlora.engine.cost import CostModel
from vlora.engine.engine import Engine
from vlora.engine.policies.base import Policy
from vlora.engine.policies.registry import make_policy
from vlora.engine.scheduler import Budgets

OURS, PLAIN = "predictive", "unmerge_only"
BASELINES = (PLAIN, "merge_only", "dlora")
PAPER = {"vs_unmerge_only": 0.41, "vs_merge_only": 0.67, "vs_dlora": 0.79}
"""The paper's ratios (figure 19: −59 %, −33 %, −21 %), for the table."""
AT: Mapping[str, Any] = {"load": 0.8, "skew": 0.6}
"""Where the summary's ratios are taken."""
MEASURED, FEW, AGAIN = "measured", "few adapters", "simulated again"
SIMULATED, CLOSED = "simulated", "closed loop"
"""Kinds of rows: of the grid; of figure 21's two adapters; the grid in the time of one cost model,
as it is when all has been measured; larger traces likewise; of `closed.py`."""
SIMULATING = 0.06
"""Of the time: for traces that are simulated alone."""


@dataclass(frozen=True)
class Cell:
    """One trace at one rate. load: over the capacity of unmerge_only. policies: that it is for.
    kind: of its rows."""

    workload: Workload
    count: int
    seed: int
    load: float
    policies: tuple[str, ...]
    kind: str = MEASURED

    @property
    def name(self) -> str:
        w = self.workload
        return f"{w.application} load {self.load:g} skew {w.skew:g} seed {self.seed}"

    def trace(self, capacity: float) -> list[Asked]:
        return self.workload.trace(self.seed, self.load * capacity, self.count)

    def as_row(self) -> dict[str, Any]:
        w = self.workload
        return {
            "application": w.application,
            "adapters": w.adapters,
            "arrivals": w.arrivals,
            "skew": w.skew,
            "load": self.load,
            "seed": self.seed,
            "count": self.count,
        }


@dataclass(frozen=True)
class Grid:
    """policies: with ATMM. own: with their own operators, at one load and skew."""

    given: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path, *, quick: bool) -> Grid:
        given = json.loads(path.read_text())
        return cls(given | (given["quick"] if quick else {}))

    def cells(self) -> Iterator[Cell]:
        """Seed by seed, so that whatever has been measured when time runs out is whole; in each
        cell another policy goes first."""
        given = self.given
        own, few = given["own"], given["few"]
        turn = 0
        for seed in given["seeds"]:
            for load, skew, one in itertools.product(
                given["loads"], given["skews"], given["workloads"]
            ):
                there = own["at"] == {"load": load, "skew": skew} and seed in own["seeds"]
                names = (*given["policies"], *(own["policies"] if there else ()))
                names += tuple(given["also"]["policies"] if seed in given["also"]["seeds"] else ())
                workload = self.workload(one, skew=skew)
                yield Cell(workload, one["count"], seed, load, _turned(names, turn))
                turn += 1
            for one in given["workloads"] if seed in few["seeds"] else ():
                workload = self.workload(one, skew=AT["skew"], adapters=few["adapters"])
                names = _turned(few["policies"], turn)
                yield Cell(workload, one["count"], seed, AT["load"], names, FEW)

    def simulated(self) -> Iterator[Cell]:
        given = self.given["simulated"]
        for one, arrivals, adapters, load, skew in itertools.product(
            self.given["workloads"],
            given["arrivals"],
            given["adapters"],
            given["loads"],
            given["skews"],
        ):
            workload = self.workload(one, skew=skew, adapters=adapters, arrivals=arrivals)
            yield Cell(workload, given["count"], 1, load, tuple(given["policies"]), SIMULATED)

    def workload(self, one: Mapping[str, Any], **more: Any) -> Workload:
        values = {"adapters": self.given["adapters"], "scale": one["scale"], **more}
        return Workload(one["application"], **values)


class Bed:
    """The engine that all replays share, and what its cost model makes of a trace."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, **more: Any) -> None:
        self.checkpoint = checkpoint
        self.options = Options(
            model=checkpoint.folder, adapters=checkpoint.adapters, dtype=NAMES[dtype], **more
        )
        self.engine = Engine(self.options)
        self.engine.calibrate(force=True)
        # As they are while each adapter's slot is its number: a replay may bring them into others.
        slots, costs = range(len(checkpoint.adapter_names)), self.engine.costs
        self._sizes = [costs.sizes(slot) for slot in slots]
        self._mergeable = [costs.can_merge(slot) for slot in slots]

    def policy(self, name: str, costs: CostModel | None = None) -> Policy:
        rule = RULE_OF.get(name, name)
        return make_policy(replace(self.options, policy=rule), costs or self.engine.costs)

    def measure(self, name: str, trace: Sequence[Asked]) -> Replay:
        if name not in OWN:
            return measured(self.engine, self.checkpoint, trace, self.policy(name))
        # What another operator takes says nothing about ours.
        costs = fork(self.engine.costs)
        with operator(OWN[name]), patch.object(self.engine, "costs", costs):
            return measured(self.engine, self.checkpoint, trace, self.policy(name, costs))

    def simulate(self, name: str, trace: Sequence[Asked], *, free: bool = False) -> Replay:
        """free: in a world where adapters cost nothing, the most that any mode could win."""
        options = self.options
        costs = replace(
            self.engine.costs,
            sizes=self._sizes.__getitem__,
            can_merge=self._mergeable.__getitem__,
        )
        if free:
            costs = without_adapters(costs)
        budgets = Budgets(options.max_num_seqs, options.max_num_batched_tokens)
        pages = options.kv_cache_tokens // options.block_size
        count = len(self.checkpoint.adapter_names)
        known = [replace(asked, adapter=asked.adapter % count) for asked in trace]
        return simulated(
            known if count else list(trace),
            budgets,
            pages,
            options.block_size,
            costs,
            lambda mine: self.policy(name, mine),
        )


def run(
    grid: Grid,
    bed: Bed,
    rows: list[dict[str, Any]],
    *,
    deadline: float,
    kept: Callable[[], None],
    told: Callable[[str, float], None],
) -> None:
    """Adds rows until all are there or the time is over. kept: called after each. told: what is
    being done, and how much of all of it."""
    capacities = _capacities(grid, bed, rows, kept, told)
    began = time.monotonic() - 1e-3
    last = deadline - SIMULATING * max(0.0, deadline - began)
    if time.monotonic() <= last:
        _close(grid, rows, kept, told)
    todo = list(grid.cells())
    steps = sum(len(cell.policies) for cell in todo)
    done = 0
    for cell in todo:
        trace = cell.trace(capacities[cell.workload.application])
        for name in cell.policies:
            done += 1
            key = _key(cell, name)
            now = time.monotonic()
            if _known(rows, key) is None and now <= last:
                told(f"{cell.name}: {name}", max(done / steps, (now - began) / (last - began)))
                found = bed.measure(name, trace)
                beside = None if name in OWN else bed.simulate(name, trace).token_latency
                rows.append(
                    key | found.as_row() | {"simulated_ms": beside and round(beside * 1e3, 3)}
                )
                kept()
    # All anew, and however late it is: this takes a second or two a seed.
    rows[:] = [row for row in rows if row["kind"] != AGAIN]
    for cell in todo:
        if _known(rows, {"kind": MEASURED, **cell.as_row()}) is None:
            continue
        names = (*grid.given["policies"], *grid.given["also"]["policies"])
        for name in names:
            key = _key(cell, name, AGAIN)
            if _known(rows, key) is None:
                told(f"simulated: {cell.name}", 1.0)
                rows.append(
                    key | _simulated(bed, name, cell.trace(capacities[cell.workload.application]))
                )
        kept()
    for cell in grid.simulated():
        trace = cell.trace(capacities[cell.workload.application])
        for name in cell.policies:
            key = _key(cell, name)
            if _known(rows, key) is None and time.monotonic() <= deadline:
                told(f"simulated: {cell.name}, {cell.workload.adapters} adapters: {name}", 1.0)
                rows.append(key | bed.simulate(name, trace).as_row())
                kept()


def _key(cell: Cell, policy: str, kind: str | None = None) -> dict[str, Any]:
    told = {"kind": kind or cell.kind, "policy": policy, "code": source_fingerprint(policy)}
    return told | cell.as_row()


def _close(
    grid: Grid,
    rows: list[dict[str, Any]],
    kept: Callable[[], None],
    told: Callable[[str, float], None],
) -> None:
    """The closed loop: all policies anew where one has changed, since rounds are compared."""
    given = grid.given["closed"]
    names = given["policies"] if given else ()
    keys = [{"kind": CLOSED, "policy": name, "code": source_fingerprint(name)} for name in names]
    if all(_known(rows, key) for key in keys):
        return
    told(CLOSED, 0.0)
    rows[:] = [row for row in rows if row["kind"] != CLOSED]
    for row in ClosedLoop(paths.root() / "tools" / "demo", given).rows(names, given["rounds"]):
        rows.append({"kind": CLOSED, "code": source_fingerprint(row["policy"]), **row})
    kept()


def _simulated(bed: Bed, name: str, trace: Sequence[Asked]) -> dict[str, Any]:
    """With the share of steps that adapters take, and the latency where they take nothing, which is
    the most that modes could win."""
    found = bed.simulate(name, trace)
    row = found.as_row()
    if name in (OURS, PLAIN):
        free = bed.simulate(name, trace, free=True).token_latency
        share = found.adapter_share
        row |= {"free_adapters_ms": round(free * 1e3, 3)}
        row |= {"adapter_share": share and round(share, 4)}
    return row


def _turned(names: Sequence[str], turn: int) -> tuple[str, ...]:
    turn %= len(names)
    return (*names[turn:], *names[:turn])


def _capacities(
    grid: Grid,
    bed: Bed,
    rows: list[dict[str, Any]],
    kept: Callable[[], None],
    told: Callable[[str, float], None],
) -> dict[str, float]:
    """Requests a second of unmerge_only, all asked at once, by application."""
    found = {}
    for one in grid.given["workloads"]:
        name, count = one["application"], grid.given["capacity_count"]
        key = {"kind": "capacity", "application": name, "count": count}
        row = _known(rows, key)
        if row is None:
            told(f"capacity: {name}", 0.0)
            at_once = grid.workload(one, skew=AT["skew"]).trace(0, 1e9, count)
            bed.measure("unmerge_only", at_once)
            row = key | bed.measure("unmerge_only", at_once).as_row()
            rows.append(row)
            kept()
        found[name] = row["requests_per_s"]
    return found


def _known(rows: Sequence[Mapping[str, Any]], key: Mapping[str, Any]) -> dict[str, Any] | None:
    return next((dict(row) for row in rows if key.items() <= row.items()), None)


# -- what it comes to ------------------------------------------------------------------------


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keys of the issue, and what there is to win; null for what was not run. Ratios below 1:
    ours is faster."""
    done, again = ([row for row in rows if row["kind"] == kind] for kind in (MEASURED, AGAIN))
    places = _places(done)
    summary: dict[str, Any] = {}
    for name in BASELINES:
        summary[f"vs_{name}"] = _rounded(_ratios(done, name, **AT))
    summary["vs_own_operators"] = _largest(_rounded(_ratios(done, name, **AT)) for name in OWN)
    summary["worst_vs_best_baseline"] = _largest(_vs_best(done, at) for at in places)
    level = _on_one_machine(done, again)
    summary["level_worst_vs_best_baseline"] = _largest(_vs_best(level, at) for at in places)
    for name in BASELINES:
        summary[f"level_vs_{name}"] = _rounded(_ratios(level, name, **AT))
    simulated = (_vs_best(again, at) for at in _places(again))
    summary["simulated_worst_vs_best_baseline"] = _largest(simulated)
    high = [at for at in places if at["skew"] >= AT["skew"]]
    for name in BASELINES:
        found = (_rounded(_ratios(done, name, **at)) for at in high)
        summary[f"worst_vs_{name}_at_high_skew"] = _largest(found)
    for name in ("credit", "paper"):
        summary[f"{name}_vs_{PLAIN}"] = _rounded(_ratios(done, PLAIN, name, **AT))
    summary[f"closed_loop_vs_{PLAIN}"] = ratio(rows, OURS, PLAIN)
    errors = [row["prediction_error"] for row in done if row["policy"] not in OWN]
    summary["step_prediction_median_error"] = round(median(errors), 4) if errors else None
    beside = [(row["token_latency_ms"], row["simulated_ms"]) for row in done if row["simulated_ms"]]
    apart = [abs(predicted / came - 1) for came, predicted in beside]
    summary["simulation_median_error"] = round(median(apart), 4) if apart else None
    summary["adapter_share"] = _rounded(_shares(again))
    summary["most_to_win"] = _rounded(_free(again, PLAIN))
    summary["most_to_win_of_ours"] = _rounded(_free(again, OURS))
    summary["seeds"] = len({row["seed"] for row in done})
    return summary


def _largest(found: Iterable[float | None]) -> float | None:
    return max((ratio for ratio in found if ratio is not None), default=None)


def _on_one_machine(
    done: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Measured rows, their latencies times what the simulation of the same on one machine says over
    that on the machine of the moment, which may be half as fast again a minute later."""
    levelled = {(row["policy"], _trace(row)): row["token_latency_ms"] for row in again}
    keys = [(row, (row["policy"], _trace(row))) for row in done if row["simulated_ms"]]
    return [
        {**row, "token_latency_ms": row["token_latency_ms"] * levelled[key] / row["simulated_ms"]}
        for row, key in keys
        if key in levelled
    ]


def _shares(rows: Sequence[Mapping[str, Any]], **at: Any) -> list[float]:
    """What adapters take of the steps of first come, first served."""
    mine = (row for row in rows if row["policy"] == PLAIN and at.items() <= row.items())
    return [row["adapter_share"] for row in mine if row["adapter_share"]]


def _free(rows: Sequence[Mapping[str, Any]], name: str, **at: Any) -> list[float]:
    """Simulated: a policy's latency where adapters take nothing over that where they do."""
    mine = (row for row in rows if row["policy"] == name and at.items() <= row.items())
    return [row["free_adapters_ms"] / row["token_latency_ms"] for row in mine]


def to_win(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By place: what adapters take of a step, what merging could save of latency at most, and each
    policy's latency over first come, first served, measured and simulated."""
    done, again = ([row for row in rows if row["kind"] == kind] for kind in (MEASURED, AGAIN))
    names = [name for name in dict.fromkeys(row["policy"] for row in done) if name not in OWN]
    return [
        at
        | {
            "adapter_share": _rounded(_shares(again, **at)),
            "most": _rounded(_free(again, PLAIN, **at)),
        }
        | {name: _rounded(_ratios(done, PLAIN, name, **at)) for name in sorted(names)}
        | {f"{OURS}, simulated": _rounded(_ratios(again, PLAIN, **at))}
        for at in sorted(_places(done), key=lambda at: tuple(at.values()))
    ]


def _ratios(
    rows: Sequence[Mapping[str, Any]], name: str, ours: str = OURS, **at: Any
) -> list[float]:
    """Our average token latency over this policy's, on each trace that both have run."""
    mine = {_trace(row): row for row in rows if row["policy"] == ours and at.items() <= row.items()}
    theirs = [row for row in rows if row["policy"] == name and _trace(row) in mine]
    return [mine[_trace(row)]["token_latency_ms"] / row["token_latency_ms"] for row in theirs]


def _trace(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        row[key] for key in ("application", "adapters", "arrivals", "skew", "load", "seed")
    )


def _places(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    keys = ("application", "load", "skew")
    return [
        dict(place) for place in dict.fromkeys(tuple((k, row[k]) for k in keys) for row in rows)
    ]


def _vs_best(rows: Sequence[Mapping[str, Any]], at: Mapping[str, Any]) -> float | None:
    """Over the seeds of one place: ours over the baseline that is best there."""
    return _largest(_rounded(_ratios(rows, name, **at)) for name in BASELINES)


def _rounded(values: Sequence[float]) -> float | None:
    mean = geometric_mean(list(values))
    return None if mean is None else round(mean, 4)


def checkpoint_of(grid: Grid, root: Path | None) -> Checkpoint:
    return make(MODELS[grid.given["model"]], root)
