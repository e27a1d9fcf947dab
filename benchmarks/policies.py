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

from benchmarks import baseline_policies, frame
from benchmarks.driver import WORDS, Driver, DriverRequest
from benchmarks.frame import DEMO, Row, ThreadedBenchmark, matching, mean_of
from benchmarks.published_operators import OPERATORS
from benchmarks.replay import PolicyEngine, TracedRequest, Workload
from vlora.atmm.search.timing import rotated
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.policies.registry import make_policy
from vlora.ids import BASE

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

CAPACITY, CLOSED_LOOP = "capacity", "closed loop"
MEASURED, TWO_ADAPTERS = "measured", "few adapters"
SIMULATED_AGAIN, SIMULATED = "simulated again", "simulated"
"""Kinds of rows.

capacity: throughput of unmerge_only with all requests at once.
closed loop: the rows of `closed_loop`.
measured: the grid in real time.
few adapters: traces with two adapters, as in figure 21, in real time.
simulated again: the measured traces, simulated with the cost model after all measurements.
simulated: larger traces, simulated with the same cost model.
"""


def jobs_of(values: Mapping[str, Any]) -> list[Row]:
    """Return all jobs of a grid in their order. A job is the start of its row: kind, policy, trace.

    Four entries of the grid list policies: `policies` run with ATMM on all traces, `also` with some
    seeds only, and `few` on traces with fewer adapters. `own` are systems that run with the
    operators that they were published with, at one load and skew, with some seeds only.

    One seed is measured after another. If the run ends early, the seeds before the current one are
    complete. The order of the policies rotates from trace to trace.
    """
    defaults = {"adapters": values["adapters"], "arrivals": "poisson", **SUMMARY_SETTING}

    def jobs(kind: str, policies: Iterable[str], entry: Row, **trace: Any) -> list[Row]:
        own = {"application": entry["application"], **defaults, "count": entry["count"]} | trace
        return [{"kind": kind, "policy": policy, **own} for policy in policies]

    entries, own, few, also = (values[key] for key in ("workloads", "own", "few", "also"))
    capacity = {"seed": 0, "load": 1.0, "count": values["capacity_count"]}
    first = [job for entry in entries for job in jobs(CAPACITY, [FCFS], entry, **capacity)]
    first += [{"kind": CLOSED_LOOP}] if values["closed"] else []
    measured: list[Row] = []
    number = 0
    for seed in values["seeds"]:
        for load, skew, entry in itertools.product(values["loads"], values["skews"], entries):
            names = [*values["policies"]]
            if own["at"] == {"load": load, "skew": skew} and seed in own["seeds"]:
                names += own["policies"]
            names += also["policies"] if seed in also["seeds"] else []
            at = {"load": load, "skew": skew, "seed": seed}
            measured += jobs(MEASURED, rotated(names, number), entry, **at)
            number += 1
        for entry in entries if seed in few["seeds"] else ():
            at = {"adapters": few["adapters"], "seed": seed}
            measured += jobs(TWO_ADAPTERS, rotated(few["policies"], number), entry, **at)
    known = {*values["policies"], *also["policies"]}
    again = [
        job | {"kind": SIMULATED_AGAIN}
        for job in measured
        if job["kind"] == MEASURED and job["policy"] in known
    ]
    simulated = values["simulated"]
    traces = itertools.product(
        entries, *(simulated[key] for key in ("arrivals", "adapters", "loads", "skews"))
    )
    for entry, arrivals, adapters, load, skew in traces:
        at = {"arrivals": arrivals, "adapters": adapters, "load": load, "skew": skew, "seed": 1}
        at["count"] = simulated["count"]
        again += jobs(SIMULATED, simulated["policies"], entry, **at)
    return first + measured + again


@dataclass(kw_only=True)
class Policies(ThreadedBenchmark):
    """Average token latency by policy, measured in real time and simulated."""

    name = "policies"
    title = "average token latency with our policy, divided by that with another"
    conditions = ("command", "quick", "grid", "dtype", "threads", "workloads", "cpu", "commit")
    bars: ClassVar = {
        **{f"vs_{name}": "< 1" for name in (*BASELINES, "own_operators")},
        **{f"worst_vs_{name}_at_high_skew": "< 1" for name in BASELINES},
        "worst_vs_best_baseline": "≤ 1.03",
        "simulated_worst_vs_best_baseline": "≤ 1.03",
        "closed_loop_vs_unmerge_only": "≥ 1",
        "step_prediction_median_error": "≤ 0.1",
        "simulation_median_error": "≤ 0.1",
        "seeds": "≥ 5",
    }

    minutes: Annotated[
        float | None,
        typer.Option(metavar="MINUTES", help="Stop measuring after this many minutes."),
    ] = None
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="Storage type: fp32 or bf16.")] = "bf16"
    plot: frame.PlotFolder = None

    def prepare(self) -> None:
        super().prepare()
        (self.dtype,) = frame.parse_types(self.dtype)
        seconds = QUICK_SECONDS if self.quick else 1e9
        seconds = seconds if self.minutes is None else self.minutes * 60
        self._deadline = time.monotonic() + seconds
        self._last_measurement: float | None = None
        self._made: PolicyEngine | None = None

    def settings(self) -> dict[str, Any]:
        workloads = self.values["workloads"]
        return {"dtype": self.dtype, "threads": self.threads, "workloads": workloads}

    def cells(self) -> Sequence[Row]:
        # The cost model may have changed since an earlier run wrote rows of this kind.
        self.rows[:] = [row for row in self.rows if row["kind"] != SIMULATED_AGAIN]
        return jobs_of(self.values)

    def measure(self, job: Row) -> Iterator[Row]:
        kind = job["kind"]
        now = time.monotonic()
        if kind != CAPACITY and self._last_measurement is None:
            self._last_measurement = self._deadline - SIMULATION_SHARE * max(
                0.0, self._deadline - now
            )
        if matching(self.rows, **job):
            return
        if kind in (MEASURED, TWO_ADAPTERS, CLOSED_LOOP) and now > (self._last_measurement or 0.0):
            return
        if kind == SIMULATED and now > self._deadline:
            return
        if kind == SIMULATED_AGAIN and not matching(self.rows, **job | {"kind": MEASURED}):
            return  # Simulations of measured traces ignore the time limit: they take a second.
        if kind == CLOSED_LOOP:
            self.status(kind)
            yield from closed_loop(self.values["closed"])
            return
        policy = job["policy"]
        self.status(f"{kind}: {_setting_name(job)}, seed {job['seed']}: {policy}")
        engine, trace = self._engine(), self._trace(job)
        if kind in (SIMULATED, SIMULATED_AGAIN):
            replay = engine.simulate(policy, trace)
            row = job | replay.as_row()
            if kind == SIMULATED_AGAIN and policy in (OURS, FCFS):
                free = engine.simulate(policy, trace, free_adapters=True).token_latency
                row |= {"free_adapters_ms": free * 1e3, "adapter_share": replay.adapter_share}
            yield row
            return
        if kind == CAPACITY:
            engine.measure(policy, trace)  # Warm up.
        row = job | engine.measure(policy, trace).as_row() | {"simulated_ms": None}
        if policy not in OPERATORS and kind != CAPACITY:
            row["simulated_ms"] = engine.simulate(policy, trace).token_latency * 1e3
        yield row

    def _trace(self, job: Row) -> list[TracedRequest]:
        application = job["application"]
        (entry,) = matching(self.values["workloads"], application=application)
        shape = {key: job[key] for key in ("skew", "adapters", "arrivals")}
        rate = 1e9
        if job["kind"] != CAPACITY:
            (capacity,) = matching(self.rows, kind=CAPACITY, application=application)
            rate = job["load"] * capacity["requests_per_s"]
        workload = Workload(application, scale=entry["scale"], **shape)
        return workload.trace(job["seed"], rate, job["count"])

    def _engine(self) -> PolicyEngine:
        """Return the engine of all replays. The first call loads and calibrates it."""
        if self._made is None:
            self._made = PolicyEngine(self.generated(self.values["model"]), self.dtype)
        return self._made

    def summarize(self) -> dict[str, Any]:
        return summarize(self.rows)

    def tables(self) -> Iterable[RenderableType]:
        title = f"means over seeds; over: over {FCFS}; predicted: simulated/measured"
        keys = "application load skew policy token_latency_ms over first_token_s"
        keys += " requests_per_s switches predicted"
        yield frame.table(title, means_over_seeds(self.rows), keys)

    def draw(self) -> Iterable[Path]:
        return [] if self.plot is None else draw_figures(self.rows, self.plot)


def closed_loop(grid: Mapping[str, Any]) -> Iterator[Row]:
    """Measure the throughput of an engine on which each finished request is replaced by a new one.

    All but the first requests generate the same number of tokens. They rotate over the base model
    and some adapters of the demo. The number of concurrent requests is constant, so their latency
    is this number divided by the throughput. Here a policy gains nothing from the order of
    requests. The steps are short, which makes the overhead of a policy visible. All policies run
    once per round after a warm-up, in an order that rotates.
    """
    adapters = DEMO / "adapters"
    options = Options(model=DEMO / "checkpoint", adapters=adapters, enable_prefix_caching=False)
    engine = Engine(options)
    engine.calibrate(force=True)
    driver, concurrent = Driver(engine), grid["at_once"]
    names = [None, *sorted(engine.adapters.names())[: grid["adapters"]]]

    def run(policy: str, count: int) -> Row:
        requests = []
        for number in range(count):
            # The first requests differ in length, so that requests do not all end together.
            early = 1 + grid["tokens"] * number // concurrent
            length = early if number < concurrent else grid["tokens"]
            adapter = names[number % len(names)]
            requests.append(DriverRequest(" ".join(WORDS), adapter, length))
        engine.scheduler.policy = make_policy(replace(options, policy=policy), engine.costs)
        engine.switcher.switch(BASE)
        outcome = driver.run(requests, at_once=concurrent)
        assert not outcome.failed
        rows_per_step = outcome.rows / len(outcome.steps)
        return {"requests_per_s": count / outcome.span, "rows_per_step": rows_per_step}

    for policy in grid["policies"]:
        run(policy, concurrent)
    for number in range(grid["rounds"]):
        for policy in rotated(grid["policies"], number):
            row = {"kind": CLOSED_LOOP, "policy": policy, "round": number}
            yield row | run(policy, grid["count"])


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the summary's figures by key.

    Most figures are the latency of OURS divided by that of another policy on the same trace. Below
    1, OURS is faster. "worst" in a key means the largest such ratio of all settings. "level" means
    that the latencies are those that `_on_one_machine` returns. Other figures are errors of
    predictions, and upper bounds of what merging can gain. A figure that was not measured is None.
    """
    measured, again = (matching(rows, kind=kind) for kind in (MEASURED, SIMULATED_AGAIN))
    level = _on_one_machine(measured, again)
    settings = _settings(measured)

    def mean_ratio(rows: Sequence[Row], name: str, setting: Mapping[str, Any]) -> float | None:
        return mean_of(_ratios(rows, name, **setting))

    def worst(rows: Sequence[Row]) -> float | None:
        ratios = [mean_ratio(rows, name, s) for s in _settings(rows) for name in BASELINES]
        return _largest(ratios)

    here = SUMMARY_SETTING
    summary = {f"vs_{name}": mean_ratio(measured, name, here) for name in BASELINES}
    summary["vs_own_operators"] = _largest(mean_ratio(measured, n, here) for n in OPERATORS)
    summary["worst_vs_best_baseline"] = worst(measured)
    summary["level_worst_vs_best_baseline"] = worst(level)
    summary |= {f"level_vs_{name}": mean_ratio(level, name, here) for name in BASELINES}
    summary["simulated_worst_vs_best_baseline"] = worst(again)
    high_skew = [setting for setting in settings if setting["skew"] >= here["skew"]]
    for name in BASELINES:
        ratios = (mean_ratio(measured, name, setting) for setting in high_skew)
        summary[f"worst_vs_{name}_at_high_skew"] = _largest(ratios)
    summary[f"paper_vs_{FCFS}"] = mean_of(_ratios(measured, FCFS, "paper", **here))
    summary[f"closed_loop_vs_{FCFS}"] = throughput_ratio(rows, OURS, FCFS)
    steps = [row["prediction_error"] for row in measured if row["policy"] not in OPERATORS]
    errors = [
        abs(r["simulated_ms"] / r["token_latency_ms"] - 1) for r in measured if r["simulated_ms"]
    ]
    fcfs, ours = (matching(again, policy=name) for name in (FCFS, OURS))
    return summary | {
        "step_prediction_median_error": median(steps) if steps else None,
        "simulation_median_error": median(errors) if errors else None,
        "adapter_share": mean_of(row["adapter_share"] or None for row in fcfs),
        "most_to_win": mean_of(r["free_adapters_ms"] / r["token_latency_ms"] for r in fcfs),
        "most_to_win_of_ours": mean_of(r["free_adapters_ms"] / r["token_latency_ms"] for r in ours),
        "seeds": len({row["seed"] for row in measured}),
    }


def means_over_seeds(rows: Sequence[Row]) -> list[Row]:
    """Return one row per setting and policy with means over the seeds of the measured rows.

    over: latency divided by that of FCFS. predicted: simulated latency divided by the measured one.
    """
    measured, means = matching(rows, kind=MEASURED), []
    for setting in sorted(_settings(measured), key=lambda setting: tuple(setting.values())):
        for policy in sorted({row["policy"] for row in matching(measured, **setting)}):
            same = matching(measured, policy=policy, **setting)
            predicted = [
                r["simulated_ms"] / r["token_latency_ms"] for r in same if r["simulated_ms"]
            ]
            numbers = [key for key, value in same[0].items() if isinstance(value, int | float)]
            figures: Row = {key: fmean(row[key] for row in same) for key in numbers}
            figures |= {"over": mean_of(_ratios(measured, FCFS, policy, **setting))}
            figures |= {"predicted": fmean(predicted) if predicted else None}
            means.append(figures | setting | {"policy": policy})
    return means


def throughput_ratio(rows: Sequence[Row], policy: str, baseline: str) -> float | None:
    """Return the median over rounds of a policy's throughput divided by the baseline's."""
    loops = matching(rows, kind=CLOSED_LOOP)
    rates = {(row["policy"], row["round"]): row["requests_per_s"] for row in loops}
    ratios = [
        rate / rates[baseline, number]
        for (name, number), rate in rates.items()
        if name == policy and (baseline, number) in rates
    ]
    return median(ratios) if ratios else None


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


def _ratios(rows: Sequence[Row], name: str, policy: str = OURS, **setting: Any) -> list[float]:
    """Return the latency of `policy` divided by that of `name`, for each trace that both ran."""
    matched = matching(rows, policy=policy, **setting)
    own = {_trace_of(row): row["token_latency_ms"] for row in matched}
    others = [row for row in matching(rows, policy=name) if _trace_of(row) in own]
    return [own[_trace_of(row)] / row["token_latency_ms"] for row in others]


def _trace_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in (*SETTING, "adapters", "arrivals", "seed"))


def _settings(rows: Sequence[Row]) -> list[Row]:
    distinct = dict.fromkeys(tuple(row[key] for key in SETTING) for row in rows)
    return [dict(zip(SETTING, setting, strict=True)) for setting in distinct]


def _setting_name(row: Row) -> str:
    return f"{row['application']} {row['load']:g} {row['skew']:g}"


def _largest(ratios: Iterable[float | None]) -> float | None:
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def draw_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the paper's figures 19, 21 and 22, and latencies by load and by number of adapters.

    Figure 19: policies by skew. Figure 21: policies with two adapters. Figure 22: systems with
    their own operators. Traces that some policy has not run are left out. Return the files.
    """
    measured = matching(rows, kind=MEASURED)
    policies = [row for row in measured if row["policy"] not in OPERATORS]
    systems = [row for row in measured if row["policy"] in {*OPERATORS, OURS}]
    figures = {
        "figure-19-policies": (policies, "skew"),
        "figure-21-two-adapters": (matching(rows, kind=TWO_ADAPTERS), "application"),
        "figure-22-systems": (systems, "skew"),
        "by-load": (policies, "load"),
        "by-adapters-simulated": (matching(rows, kind=SIMULATED), "adapters"),
    }
    paths = []
    for title, (shown, axis) in figures.items():
        names = sorted({row["policy"] for row in shown})
        traces = [{_trace_of(row) for row in matching(shown, policy=name)} for name in names]
        common = set.intersection(*traces) if traces else set()
        values = sorted({row[axis] for row in shown if _trace_of(row) in common})
        if not common:
            continue
        paths.append(folder / f"{title}.png")
        with frame.figure(paths[-1], axis, "average token latency, ms") as plot:
            width = 0.8 / len(names)
            for i, name in enumerate(names):
                own = [row for row in matching(shown, policy=name) if _trace_of(row) in common]
                at = [matching(own, **{axis: value}) for value in values]
                heights = [fmean(r["token_latency_ms"] for r in rows) if rows else 0 for rows in at]
                middle = (i - (len(names) - 1) / 2) * width
                positions = [x + middle for x in range(len(values))]
                plot.bar(positions, heights, width, label=name.replace("_", " "))
            plot.set_xticks(range(len(values)), values)
    return paths
