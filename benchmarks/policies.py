"""The policies benchmark: scheduling policies on seeded traces, measured and simulated.

Every measured replay is also simulated on the same trace. Larger traces are only simulated. A later
run of the same commit with the same --json file adds only the rows that the file does not contain.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, ClassVar

import typer
from rich.console import RenderableType

from benchmarks import baseline_policies, frame, llava
from benchmarks.driver import WORDS
from benchmarks.frame import DEMO, Bar, Benchmark, Row, at_least, at_most, below, percent
from benchmarks.machine import server_threads, set_threads
from benchmarks.published_operators import OPERATORS
from benchmarks.replay import PolicyEngine, TracedRequest, Workload
from benchmarks.timing import rounded_mean
from vlora.atmm.search.timing import rotated
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.policies.registry import make_policy
from vlora.engine.requests import RequestState
from vlora.ids import BASE
from vlora.request import Request
from vlora.sampling import SamplingParams

baseline_policies.register()

QUICK_SECONDS = 40.0
"""Duration of a run with --quick, including loading and calibration."""
SIMULATION_SHARE = 0.06
"""Share of the duration that is reserved for traces that are only simulated."""
OURS, FCFS = "predictive", "unmerge_only"
"""The evaluated policy, and the baseline: first come, first served, without merging."""
BASELINES = (FCFS, "merge_only", "dlora")
SUMMARY_SETTING: Mapping[str, Any] = {"load": 0.8, "skew": 0.6}
"""Load and skew at which the summary compares policies."""
SETTING = ("application", "load", "skew")
MODES = ("merged", "mixture", "unmerged")

CAPACITY = "capacity"
MEASURED, TWO_ADAPTERS, SIMULATED_AGAIN = "measured", "few adapters", "simulated again"
SIMULATED, CLOSED_LOOP = "simulated", "closed loop"
"""Kinds of rows.

capacity: throughput of unmerge_only with all requests at once.
measured: the grid in real time.
few adapters: traces with two adapters, as in figure 21, in real time.
simulated again: the measured traces, simulated with the cost model after all measurements.
simulated: larger traces, simulated with the same cost model.
closed loop: the rows of `ClosedLoop`.
"""


@dataclass(frozen=True)
class PolicyCell:
    """One trace at one rate, and the policies that run it, in order.

    load: arrival rate divided by the throughput of unmerge_only.
    kind: kind of the rows that it adds to the results.
    """

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

    def as_row(self) -> Row:
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


class PolicyGrid:
    """Contents of a grid file.

    Four entries list policies: `policies` run with ATMM on all traces, `also` with some seeds only,
    and `few` on traces with fewer adapters. `own` are systems that run with the operators that they
    were published with, at one load and skew, with some seeds only.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def cells(self) -> Iterator[PolicyCell]:
        """Yield the cells to measure, one seed after another.

        If the run ends early, the seeds before the current one are complete. The order of the
        policies rotates from cell to cell.
        """
        values = self.values
        own, few, also = values["own"], values["few"], values["also"]
        number = 0
        for seed in values["seeds"]:
            for load, skew, entry in itertools.product(
                values["loads"], values["skews"], values["workloads"]
            ):
                names = [*values["policies"]]
                if own["at"] == {"load": load, "skew": skew} and seed in own["seeds"]:
                    names += own["policies"]
                names += also["policies"] if seed in also["seeds"] else []
                workload = self.workload(entry, skew=skew)
                policies = tuple(rotated(names, number))
                yield PolicyCell(workload, entry["count"], seed, load, policies)
                number += 1
            for entry in values["workloads"] if seed in few["seeds"] else ():
                skew, load = SUMMARY_SETTING["skew"], SUMMARY_SETTING["load"]
                workload = self.workload(entry, skew=skew, adapters=few["adapters"])
                policies = tuple(rotated(few["policies"], number))
                yield PolicyCell(workload, entry["count"], seed, load, policies, TWO_ADAPTERS)

    def simulated_cells(self) -> Iterator[PolicyCell]:
        """Yield the cells whose traces are simulated and not measured."""
        values = self.values["simulated"]
        lists = (values[key] for key in ("arrivals", "adapters", "loads", "skews"))
        for entry, arrivals, adapters, load, skew in itertools.product(
            self.values["workloads"], *lists
        ):
            workload = self.workload(entry, skew=skew, adapters=adapters, arrivals=arrivals)
            policies = tuple(values["policies"])
            yield PolicyCell(workload, values["count"], 1, load, policies, SIMULATED)

    def workload(self, entry: Mapping[str, Any], **settings: Any) -> Workload:
        """Return the workload that an entry of the grid's `workloads` describes."""
        values = {"adapters": self.values["adapters"], "scale": entry["scale"], **settings}
        return Workload(entry["application"], **values)


Job = tuple[str, PolicyCell, str] | None
"""Kind of the row, its trace and its policy; or None for all rows of the closed loop."""


@dataclass(kw_only=True)
class Policies(Benchmark):
    """Average token latency by policy, measured in real time and simulated."""

    name = "policies"
    title = "average token latency with our policy, divided by that with another"
    conditions = ("command", "quick", "grid", "dtype", "threads", "workloads", "cpu", "commit")
    bars: ClassVar[Mapping[str, Bar]] = {
        **{f"vs_{name}": below(1) for name in (*BASELINES, "own_operators")},
        **{f"worst_vs_{name}_at_high_skew": below(1) for name in BASELINES},
        "worst_vs_best_baseline": at_most(1.03),
        "simulated_worst_vs_best_baseline": at_most(1.03),
        "closed_loop_vs_unmerge_only": at_least(1),
        "step_prediction_median_error": at_most(0.1),
        "simulation_median_error": at_most(0.1),
        "seeds": at_least(5),
    }

    minutes: Annotated[
        float | None,
        typer.Option(metavar="MINUTES", help="Stop measuring after this many minutes."),
    ] = None
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="Storage type: fp32 or bf16.")] = "bf16"
    plot: frame.PlotFolder = None
    root: frame.Root = None

    def prepare(self) -> None:
        super().prepare()
        (self.dtype,) = frame.parse_types(self.dtype)
        self._threads = server_threads()
        set_threads(self._threads)
        self._grid = PolicyGrid(self.values)
        seconds = QUICK_SECONDS if self.quick else 1e9
        seconds = seconds if self.minutes is None else self.minutes * 60
        self._deadline = time.monotonic() + seconds
        self._last_measurement: float | None = None
        self._capacities: dict[str, float] = {}
        self._engine: PolicyEngine | None = None

    def settings(self) -> dict[str, Any]:
        workloads = self.values["workloads"]
        return {"dtype": self.dtype, "threads": self._threads, "workloads": workloads}

    def cells(self) -> Sequence[Job]:
        # The cost model may have changed since an earlier run wrote rows of this kind.
        self.rows[:] = [row for row in self.rows if row["kind"] != SIMULATED_AGAIN]
        values, measured = self.values, list(self._grid.cells())
        jobs: list[Job] = []
        for entry in values["workloads"]:  # All requests arrive at the same time.
            workload = self._grid.workload(entry, skew=SUMMARY_SETTING["skew"])
            cell = PolicyCell(workload, values["capacity_count"], 0, 1.0, (), CAPACITY)
            jobs.append((CAPACITY, cell, FCFS))
        jobs += [None] if values["closed"] else []
        jobs += [(cell.kind, cell, policy) for cell in measured for policy in cell.policies]
        again = (*values["policies"], *values["also"]["policies"])
        grid = [cell for cell in measured if cell.kind == MEASURED]
        jobs += [(SIMULATED_AGAIN, cell, policy) for cell in grid for policy in again]
        simulated = self._grid.simulated_cells()
        return jobs + [(SIMULATED, cell, policy) for cell in simulated for policy in cell.policies]

    def measure(self, job: Job) -> Iterator[Row]:
        if job is not None and job[0] == CAPACITY:
            yield from self._measure_capacity(job[1])
            return
        if self._last_measurement is None:
            left = max(0.0, self._deadline - time.monotonic())
            self._last_measurement = self._deadline - SIMULATION_SHARE * left
        if job is None:
            yield from self._measure_closed_loop()
            return
        kind, cell, policy = job
        key = {"kind": kind, "policy": policy} | cell.as_row()
        if self._known_row(key) is not None:
            return
        if kind == SIMULATED_AGAIN:
            yield from self._simulate_again(cell, policy, key)
        elif kind == SIMULATED:
            if time.monotonic() <= self._deadline:
                self.status(f"simulated: {cell.name}, {cell.workload.adapters} adapters: {policy}")
                replay = self._started_engine().simulate(policy, self._trace(cell))
                yield key | replay.as_row()
        elif self._may_measure():
            self.status(f"{cell.name}: {policy}")
            trace, engine = self._trace(cell), self._started_engine()
            row = key | engine.measure(policy, trace).as_row() | {"simulated_ms": None}
            if policy not in OPERATORS:
                simulated = engine.simulate(policy, trace).token_latency
                row["simulated_ms"] = round(simulated * 1e3, 3)
            yield row

    def _measure_capacity(self, cell: PolicyCell) -> Iterator[Row]:
        """Measure how many requests per second unmerge_only completes, after a warm-up."""
        application = cell.workload.application
        key = {"kind": CAPACITY, "application": application, "count": cell.count}
        row = self._known_row(key)
        if row is None:
            self.status(f"capacity: {application}")
            trace, engine = cell.workload.trace(0, 1e9, cell.count), self._started_engine()
            engine.measure(FCFS, trace)
            row = {**key, **engine.measure(FCFS, trace).as_row()}
            yield row
        self._capacities[application] = row["requests_per_s"]

    def _measure_closed_loop(self) -> Iterator[Row]:
        if self._known_row({"kind": CLOSED_LOOP}) is None and self._may_measure():
            self.status("closed loop")
            grid = self.values["closed"]
            for row in ClosedLoop(DEMO, grid).rows(grid["policies"], grid["rounds"]):
                yield {"kind": CLOSED_LOOP, **row}

    def _simulate_again(self, cell: PolicyCell, policy: str, key: Row) -> Iterator[Row]:
        """Simulate a measured trace with the cost model that the engine has after all measurements.

        The time limit of the run is ignored, since a simulation takes only a second or two.
        """
        if self._known_row({"kind": MEASURED, **cell.as_row()}) is None:
            return
        self.status(f"simulated: {cell.name}: {policy}")
        trace, engine = self._trace(cell), self._started_engine()
        replay = engine.simulate(policy, trace)
        row = key | replay.as_row()
        if policy in (OURS, FCFS):
            free = engine.simulate(policy, trace, free_adapters=True).token_latency
            share = replay.adapter_share
            row |= {"free_adapters_ms": round(free * 1e3, 3)}
            row |= {"adapter_share": share and round(share, 4)}
        yield row

    def _may_measure(self) -> bool:
        """Return whether enough time is left to measure another cell."""
        return self._last_measurement is not None and time.monotonic() <= self._last_measurement

    def _trace(self, cell: PolicyCell) -> list[TracedRequest]:
        rate = cell.load * self._capacities[cell.workload.application]
        return cell.workload.trace(cell.seed, rate, cell.count)

    def _started_engine(self) -> PolicyEngine:
        """Return the engine of all replays. The first call loads and calibrates it."""
        if self._engine is None:
            checkpoint = llava.make(llava.MODELS[self.values["model"]], self.root)
            self._engine = PolicyEngine(checkpoint, self.dtype)
        return self._engine

    def _known_row(self, key: Mapping[str, Any]) -> Row | None:
        """Return the row that has all items of `key`, or None."""
        return next((row for row in self.rows if key.items() <= row.items()), None)

    def summarize(self) -> dict[str, Any]:
        return summarize(self.rows)

    def tables(self) -> Iterable[RenderableType]:
        columns: dict[str, Any] = {"trace": _setting_name, "policy": "policy"}
        columns |= {"ms/token": "token_latency_ms", "p50 s": "p50_s", "p95 s": "p95_s"}
        columns |= {"p99 s": "p99_s", "first s": "first_token_s", "req/s": "requests_per_s"}
        columns |= {"switches": "switches", **{mode: mode for mode in MODES}}
        title = "means over seeds; modes: share of the steps' time; predicted: simulated/measured"
        rows = means_over_seeds(self.rows)
        yield frame.table(title, rows, columns | {"predicted": "predicted"}, labels=2)
        gains = gains_by_setting(self.rows)
        names = [name for name in (gains[0] if gains else ()) if name not in SETTING]
        yield frame.table(
            "adapter share: adapters' share of the steps' time; most: latency if adapters cost"
            " nothing; latencies are divided by that of unmerge only",
            gains,
            {"trace": _setting_name, **{name.replace("_", " "): name for name in names}},
        )

    def draw(self) -> Iterable[Path]:
        return [] if self.plot is None else draw_figures(self.rows, self.plot)


class ClosedLoop:
    """An engine on which each finished request is replaced by a new one.

    All but the first requests generate the same number of tokens. They rotate over the base model
    and some adapters. The number of concurrent requests is constant, so their latency is this
    number divided by the throughput; only the throughput is measured. Here a policy gains nothing
    from the order of requests. The steps are short, which makes the overhead of a policy visible.

    The grid's entry holds `count` (number of requests), `tokens` (tokens per request), `at_once`
    (number of concurrent requests) and `adapters` (number of adapters, without the base model).
    """

    def __init__(self, demo: Path, grid: Mapping[str, Any]) -> None:
        self._grid = grid
        self._options = Options(
            model=demo / "checkpoint", adapters=demo / "adapters", enable_prefix_caching=False
        )
        self._engine = Engine(self._options)
        self._engine.calibrate(force=True)
        self._names = [None, *sorted(self._engine.adapters.names())[: grid["adapters"]]]
        self._numbers = itertools.count()

    def rows(self, policies: Sequence[str], rounds: int) -> list[Row]:
        """Run all policies once per round after a warm-up, in an order that rotates."""
        for policy in policies:
            self._run(policy, self._grid["at_once"])
        return [
            {"policy": policy, "round": number, **self._run(policy, self._grid["count"])}
            for number in range(rounds)
            for policy in rotated(policies, number)
        ]

    def _run(self, policy: str, count: int) -> Row:
        engine, concurrent = self._engine, self._grid["at_once"]
        states = [self._prepare(number) for number in range(count)]
        engine.scheduler.policy = make_policy(replace(self._options, policy=policy), engine.costs)
        engine.switcher.switch(BASE)
        before = engine.stats()
        added = running = 0
        started = time.monotonic()
        while added < count or running:
            while added < count and running < concurrent:
                engine.add(states[added], time.monotonic())
                added, running = added + 1, running + 1
            for output in engine.step():
                assert output.error is None, output.error
                running -= output.finished
        seconds = time.monotonic() - started
        after = engine.stats()
        steps = after.steps - before.steps
        measured = after.step_seconds - before.step_seconds
        predicted = after.predicted_seconds - before.predicted_seconds
        return {
            "requests_per_s": round(count / seconds, 2),
            "rows_per_step": round((after.rows - before.rows) / steps, 2),
            "step_ms": round(seconds / steps * 1e3, 3),
            "merges": after.merges - before.merges,
            "predicted_over_taken": round(predicted / measured, 3),
        }

    def _prepare(self, number: int) -> RequestState:
        tokens, concurrent = self._grid["tokens"], self._grid["at_once"]
        # The first requests differ in length, so that requests do not all end together.
        length = 1 + tokens * number // concurrent if number < concurrent else tokens
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        request_id, adapter = (
            f"closed-{next(self._numbers)}",
            self._names[number % len(self._names)],
        )
        return self._engine.prepare(Request(request_id, " ".join(WORDS), params, adapter=adapter))


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the summary's figures by key.

    Most figures are the latency of OURS divided by that of another policy on the same trace. Below
    1, OURS is faster. "worst" in a key means the largest such ratio of all settings. "level" means
    that the latencies are those that `_on_one_machine` returns. Other figures are errors of
    predictions, and upper bounds of what merging can gain. A figure that was not measured is None.
    """
    measured, again = _of_kind(rows, MEASURED), _of_kind(rows, SIMULATED_AGAIN)
    level = _on_one_machine(measured, again)
    settings = _settings(measured)

    def mean_ratio(rows: Sequence[Row], name: str, setting: Row | None = None) -> float | None:
        return _mean(_ratios(rows, name, **(SUMMARY_SETTING if setting is None else setting)))

    summary: dict[str, Any] = {f"vs_{name}": mean_ratio(measured, name) for name in BASELINES}
    summary["vs_own_operators"] = _largest(mean_ratio(measured, name) for name in OPERATORS)
    summary["worst_vs_best_baseline"] = _worst_vs_best(measured, settings)
    summary["level_worst_vs_best_baseline"] = _worst_vs_best(level, settings)
    summary |= {f"level_vs_{name}": mean_ratio(level, name) for name in BASELINES}
    summary["simulated_worst_vs_best_baseline"] = _worst_vs_best(again, _settings(again))
    high_skew = [setting for setting in settings if setting["skew"] >= SUMMARY_SETTING["skew"]]
    for name in BASELINES:
        worst = _largest(mean_ratio(measured, name, setting) for setting in high_skew)
        summary[f"worst_vs_{name}_at_high_skew"] = worst
    for name in ("credit", "paper"):
        summary[f"{name}_vs_{FCFS}"] = _mean(_ratios(measured, FCFS, name, **SUMMARY_SETTING))
    summary[f"closed_loop_vs_{FCFS}"] = throughput_ratio(rows, OURS, FCFS)
    steps = [row["prediction_error"] for row in measured if row["policy"] not in OPERATORS]
    errors = [
        abs(r["simulated_ms"] / r["token_latency_ms"] - 1) for r in measured if r["simulated_ms"]
    ]
    return summary | {
        "step_prediction_median_error": round(median(steps), 4) if steps else None,
        "simulation_median_error": round(median(errors), 4) if errors else None,
        "adapter_share": _mean(_adapter_shares(again)),
        "most_to_win": _mean(_free_adapter_ratios(again, FCFS)),
        "most_to_win_of_ours": _mean(_free_adapter_ratios(again, OURS)),
        "seeds": len({row["seed"] for row in measured}),
    }


def gains_by_setting(rows: Sequence[Row]) -> list[Row]:
    """Return one row per setting. It has the setting and these figures.

    adapter_share: share of the steps' time that adapters cost.
    most: latency of FCFS if adapters cost nothing, divided by its latency with their cost.
    name of a policy: latency of the policy divided by that of FCFS.
    """
    measured, again = _of_kind(rows, MEASURED), _of_kind(rows, SIMULATED_AGAIN)
    names = sorted({row["policy"] for row in measured} - {*OPERATORS})
    return [
        setting
        | {
            "adapter_share": _mean(_adapter_shares(again, **setting)),
            "most": _mean(_free_adapter_ratios(again, FCFS, **setting)),
        }
        | {name: _mean(_ratios(measured, FCFS, name, **setting)) for name in names}
        | {f"{OURS}, simulated": _mean(_ratios(again, FCFS, **setting))}
        for setting in sorted(_settings(measured), key=lambda setting: tuple(setting.values()))
    ]


def means_over_seeds(rows: Sequence[Row]) -> list[Row]:
    """Return one row per setting and policy with means over the seeds of the measured rows."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in _of_kind(rows, MEASURED):
        groups.setdefault((*(row[key] for key in SETTING), row["policy"]), []).append(row)
    means = []
    for key, same in sorted(groups.items()):
        seconds = {mode: sum(row["mode_s"].get(mode, 0.0) for row in same) for mode in MODES}
        total = sum(seconds.values()) or 1.0
        predicted = [r["simulated_ms"] / r["token_latency_ms"] for r in same if r["simulated_ms"]]
        numbers = [k for k, v in same[0].items() if isinstance(v, int | float)]
        means.append(
            {k: fmean(row[k] for row in same) for k in numbers}
            | dict(zip((*SETTING, "policy"), key, strict=True))
            | {mode: percent(share / total) for mode, share in seconds.items()}
            | {"predicted": fmean(predicted) if predicted else None}
        )
    return means


def throughput_ratio(rows: Sequence[Row], policy: str, baseline: str) -> float | None:
    """Return the median over rounds of a policy's throughput divided by the baseline's."""
    loops = [row for row in rows if "round" in row]
    rates = {(row["policy"], row["round"]): row["requests_per_s"] for row in loops}
    ratios = [
        rate / rates[baseline, number]
        for (name, number), rate in rates.items()
        if name == policy and (baseline, number) in rates
    ]
    return round(median(ratios), 3) if ratios else None


def _on_one_machine(measured: Sequence[Row], again: Sequence[Row]) -> list[Row]:
    """Return the measured rows, with latencies as if the machine's speed had not changed.

    The speed of a shared machine may change by half within a minute. The cost model follows these
    changes. So each trace is simulated twice: with the cost model from the time of the measurement,
    and with the cost model from the end of the run. The corrected latency is the measured latency ·
    the second simulated latency / the first simulated latency.
    """
    later = {(row["policy"], _trace_of(row)): row["token_latency_ms"] for row in again}
    keys = [(row, (row["policy"], _trace_of(row))) for row in measured if row["simulated_ms"]]
    return [
        row | {"token_latency_ms": row["token_latency_ms"] * later[key] / row["simulated_ms"]}
        for row, key in keys
        if key in later
    ]


def _worst_vs_best(rows: Sequence[Row], settings: Iterable[Row]) -> float | None:
    """Return the largest ratio of OURS to the best baseline over all settings."""
    return _largest(_mean(_ratios(rows, name, **s)) for s in settings for name in BASELINES)


def _ratios(rows: Sequence[Row], name: str, policy: str = OURS, **setting: Any) -> list[float]:
    """Return the latency of `policy` divided by that of `name`, for each trace that both ran."""
    matching = [row for row in rows if setting.items() <= row.items()]
    own = {_trace_of(row): row["token_latency_ms"] for row in matching if row["policy"] == policy}
    others = [row for row in rows if row["policy"] == name and _trace_of(row) in own]
    return [own[_trace_of(row)] / row["token_latency_ms"] for row in others]


def _adapter_shares(again: Sequence[Row], **setting: Any) -> list[float]:
    """Return the share of the steps' time that adapters cost, for each simulated trace of FCFS."""
    rows = (row for row in again if row["policy"] == FCFS and setting.items() <= row.items())
    return [row["adapter_share"] for row in rows if row["adapter_share"]]


def _free_adapter_ratios(again: Sequence[Row], name: str, **setting: Any) -> list[float]:
    """Return the latency if adapters cost nothing, divided by the latency with their cost, for each
    simulated trace of the policy `name` that matches `setting`.
    """
    rows = (row for row in again if row["policy"] == name and setting.items() <= row.items())
    return [row["free_adapters_ms"] / row["token_latency_ms"] for row in rows]


def _of_kind(rows: Iterable[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _trace_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in (*SETTING, "adapters", "arrivals", "seed"))


def _settings(rows: Sequence[Row]) -> list[Row]:
    distinct = dict.fromkeys(tuple(row[key] for key in SETTING) for row in rows)
    return [dict(zip(SETTING, setting, strict=True)) for setting in distinct]


def _setting_name(row: Row) -> str:
    return f"{row['application']} {row['load']:g} {row['skew']:g}"


def _largest(ratios: Iterable[float | None]) -> float | None:
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def _mean(values: Iterable[float]) -> float | None:
    return rounded_mean(values, 4)


def draw_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the paper's figures 19, 21 and 22, and latencies by load and by number of adapters.

    Figure 19: policies by skew. Figure 21: policies with two adapters. Figure 22: systems with
    their own operators. The switch benchmark draws figure 20. Return the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    measured = _of_kind(rows, MEASURED)
    policies = [row for row in measured if row["policy"] not in OPERATORS]
    systems = [row for row in measured if row["policy"] in {*OPERATORS, OURS}]
    figures = {
        "figure-19-policies": (policies, "skew"),
        "figure-21-two-adapters": (_of_kind(rows, TWO_ADAPTERS), "application"),
        "figure-22-systems": (systems, "skew"),
        "by-load": (policies, "load"),
        "by-adapters-simulated": (_of_kind(rows, SIMULATED), "adapters"),
    }
    drawn = (_draw_bars(*of, folder / f"{name}.png") for name, of in figures.items())
    return [path for path in drawn if path is not None]


def _draw_bars(rows: Sequence[Row], axis: str, path: Path) -> Path | None:
    """Draw the average token latency by policy over the values of one key of the rows.

    Traces that some policy has not run are left out. Return the file, or None if no trace remains.
    """
    from matplotlib.figure import Figure

    names = sorted({row["policy"] for row in rows})
    traces = [{_trace_of(row) for row in rows if row["policy"] == name} for name in names]
    common = set.intersection(*traces) if traces else set()
    rows = [row for row in rows if _trace_of(row) in common]
    if not rows:
        return None
    values = sorted({row[axis] for row in rows})
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    plot = figure.subplots()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        own = [[r for r in rows if (r["policy"], r[axis]) == (name, v)] for v in values]
        heights = [fmean(row["token_latency_ms"] for row in at) if at else 0.0 for at in own]
        positions = [x + (i - (len(names) - 1) / 2) * width for x in range(len(values))]
        plot.bar(positions, heights, width, label=name.replace("_", " "))
    plot.set_xticks(range(len(values)), [f"{v:g}" if axis != "application" else v for v in values])
    plot.set_xlabel(axis)
    plot.set_ylabel("average token latency, ms")
    plot.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    return path
