"""The policies benchmark: scheduling policies on drawn traces, replayed in real time and simulated.

A trace is replayed by an engine on this machine with every policy. Each replay is also simulated.
Other traces are only simulated, in the predicted times of four assumed chips. That shows what a
policy decides without a quiet machine, but not what it costs.

A later run of the same commit with the same --json file adds only the traces that the file lacks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, ClassVar, NamedTuple

import typer
from rich.console import RenderableType

from benchmarks import baseline_policies, frame
from benchmarks.frame import Row, ThreadedBenchmark, matching, mean_of
from benchmarks.published_operators import OPERATORS
from benchmarks.replay import MODES, PolicyEngine, Replay, Simulation
from vlora.atmm.search.timing import rotated
from vlora.config import Options
from vlora.engine.cost import AdapterSize, CostModel, Profile
from vlora.ids import BASE
from vlora.load.trace import TracedRequest, Workload

baseline_policies.register()

OURS, PAPER, FCFS = "predictive", "paper", "unmerge_only"
AGAIN = "unmerge_only again"
"""FCFS a second time. Its figures relative to those of FCFS show the noise."""
THIS_MACHINE = "this machine"
EXERCISED = 0.05
"""Share of merged and mixture steps, or of each mode, above which it counts as exercised."""
DEADLINES_IN, DEADLINES = 3, (0.5, 2.0)
"""One trace in so many has deadlines: FCFS's median latency times a number from this range."""
FIGURES = ("mean", "p99", "duration")
"""Figures in seconds have these keys with `_s`, and those relative to FCFS without."""


class Chip(NamedTuple):
    """An assumed chip, and the bf16 decoder that it serves.

    fixed: seconds that a step takes longer than its matrix products, however few rows it has.
    scale: smallest scale of its traces (see `Workload`).
    """

    bytes_per_second: float
    operations_per_second: float
    lora_call_seconds: float
    elements: float
    layers: int
    fixed: float = 0.0
    scale: float = 1 / 16


CHIPS = {
    "avx2": Chip(1e10, 5e10, 15e-6, 4e8, 24),
    "avx512": Chip(1.5e10, 2e11, 12e-6, 4e8, 24),
    "amx": Chip(2e10, 8e11, 10e-6, 4e8, 24),
    "gpu": Chip(2e12, 2e14, 8e-6, 6.5e9, 32, 2e-3, 1 / 4),
}


@dataclass(frozen=True)
class Case:
    """The setting of a drawn trace. These are also the first keys of its rows.

    load: requests per second, divided by those that FCFS serves if all arrive at once.
    deadlines: whether every second request has a deadline.
    batch, theta: the options `max_batch_requests` and `theta_steps`.
    """

    chip: str
    seed: int
    application: str
    skew: float
    load: float
    adapters: int
    arrivals: str
    scale: float
    batch: int
    theta: float
    count: int
    deadlines: bool

    @property
    def options(self) -> Row:
        return {"max_batch_requests": self.batch, "theta_steps": self.theta}

    def trace(self, rate: float, count: int) -> list[TracedRequest]:
        shape = (self.application, self.skew, self.adapters, self.arrivals, self.scale)
        return Workload(*shape).trace(self.seed, rate, count)  # type: ignore[arg-type]


def drawn_case(seed: int, count: int, grid: Row, chip: str = "") -> Case:
    """Return the case of a seed; on the chips of the grid if `chip` is empty."""
    draw = random.Random(seed)
    chip = chip or draw.choice(list(CHIPS))
    least = CHIPS[chip].scale if chip in CHIPS else grid["scale"]
    return Case(
        chip,
        seed,
        draw.choice(grid["applications"]),
        draw.uniform(*grid["skews"]),
        draw.uniform(*grid["loads"]),
        draw.choice([n for n in grid["adapters"] if chip in CHIPS or n <= 16]),
        draw.choice(grid["arrivals"]),
        draw.choice([least, 4 * least]) if chip in CHIPS else least,
        draw.choice(grid["batches"]),
        draw.choice(grid["thetas"]),
        count,
        seed % DEADLINES_IN == 0,
    )


class ChipEngine:
    """Simulates the traces of a case on its chip, with adapters of drawn ranks."""

    def __init__(self, case: Case) -> None:
        self.ranks = random.Random(case.seed).choices([8, 16, 32, 64], k=case.adapters)
        self.costs = costs_on(CHIPS[case.chip], self.ranks)

    def simulate(self, name: str, trace: Sequence[TracedRequest], **options: Any) -> Replay:
        used = Options(policy=name, kv_cache_tokens=16 * 10**5, **options)
        return Simulation(trace, used, self.costs).run()


def costs_on(chip: Chip, ranks: Sequence[int]) -> CostModel:
    """Return the predicted costs of a chip with adapters of these ranks."""
    read, multiply = 2 / chip.bytes_per_second, 2 / chip.operations_per_second
    width = (chip.elements / chip.layers / 16) ** 0.5
    rows = (1, 8, 64, 256)
    profile = Profile(
        tuple((n, max(read, n * multiply) * chip.elements + chip.fixed) for n in rows),
        lora_calls=7 * chip.layers * chip.lora_call_seconds,
        adapter_element=read,
        adapter_element_row=1.5 * multiply,
        merge=(2 * read * chip.elements, multiply),
    )
    sizes = [
        AdapterSize(round(r * chip.layers * 20 * width), r * int(chip.elements)) for r in ranks
    ]
    return CostModel(profile, sizes.__getitem__)


def timed_trace(case: Case, engine: ChipEngine | PolicyEngine) -> list[TracedRequest]:
    """Return the trace of a case, with the arrivals that make its load by simulation."""
    half = case.count // 2
    capacity = half / engine.simulate(FCFS, case.trace(1e9, half), **case.options).outcome.span
    trace = case.trace(case.load * capacity, case.count)
    if not case.deadlines:
        return trace
    usual = median(engine.simulate(FCFS, trace, **case.options).outcome.end)
    draw = random.Random(case.seed)
    return [
        replace(one, deadline=usual * draw.uniform(*DEADLINES)) if number % 2 else one
        for number, one in enumerate(trace)
    ]


def policy_of(name: str) -> str:
    return FCFS if name == AGAIN else name


@dataclass(kw_only=True)
class Policies(ThreadedBenchmark):
    """Latencies by policy, relative to those of FCFS on the same trace."""

    name = "policies"
    title = "latencies divided by those of unmerge_only; simulated: on assumed chips"
    conditions = ("command", "quick", "grid", "dtype", "threads", "cpu", "commit")
    bars: ClassVar = {
        f"{kind}{key}": bar
        for kind in ("", "simulated_")
        for key, bar in {
            f"{OURS}_mean_if_hot": "≤ 0.93",
            f"{OURS}_worst_mean": "≤ 1.02",
            f"{OURS}_worst_p99": "≤ 1.05",
            f"{OURS}_worst_duration": "≤ 1.05",
            f"{OURS}_late_beyond_best": "≤ 0",
            f"{PAPER}_share_with_all_modes": "≥ 0.333",
        }.items()
    } | {
        "simulation_median_error": "≤ 0.1",
        "simulation_largest_error": "≤ 0.1",
        "longest_wait": "≤ 1",
        "underfilled": "≤ 0",
    }

    replays: Annotated[
        int | None, typer.Option(metavar="N", help="Traces to replay; default: as in the grid.")
    ] = None
    simulations: Annotated[
        int | None, typer.Option(metavar="N", help="Traces to simulate on assumed chips.")
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the first trace; the others follow.")] = 1
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="Storage type: fp32 or bf16.")] = "bf16"
    plot: frame.PlotFolder = None

    def prepare(self) -> None:
        super().prepare()
        (self.dtype,) = frame.parse_types(self.dtype)
        if self.replays is None:
            self.replays = self.values["replays"]
        if self.simulations is None:
            self.simulations = self.values["simulations"]
        self._predicted: dict[int, float] = {}  # Seconds of the replays to come, by seed.

    def settings(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "threads": self.threads}

    def cells(self) -> Sequence[Case]:
        def cases(count: int | None, chip: str) -> list[Case]:
            seeds = range(self.seed, self.seed + (count or 0))
            drawn = [drawn_case(n, self.values["count"], self.values, chip) for n in seeds]
            known = {(row["chip"], row["seed"]) for row in self.rows}
            return [case for case in drawn if (case.chip, case.seed) not in known]

        simulated, replayed = cases(self.simulations, ""), cases(self.replays, THIS_MACHINE)
        for case in replayed:
            predicted = self._engine.simulate(
                FCFS, timed_trace(case, self._engine), **case.options
            ).busy
            self._predicted[case.seed] = predicted * len(self._names(case))
        if replayed:
            minutes = sum(self._predicted.values()) / 60
            self.status(f"{len(replayed)} traces to replay take about {minutes:.1f} min")
        return [*simulated, *replayed]

    def measure(self, case: Case) -> Iterable[Row]:
        engine = ChipEngine(case) if case.chip in CHIPS else self._engine
        trace = timed_trace(case, engine)
        rows: list[Row] = []
        for name in self._names(case):
            policy = policy_of(name)
            row: Row = {"policy": name}
            if isinstance(engine, ChipEngine):
                row |= engine.simulate(policy, trace, **case.options).as_row()
            else:
                measured = engine.measure(policy, trace, **case.options)
                row |= measured.as_row()
                if name not in OPERATORS:
                    simulated = engine.simulate(policy, trace, measured.pace, **case.options)
                    row["simulated_s"] = fmean(simulated.outcome.end)
                    row["adapter_share"] = simulated.adapter_share
            rows.append(asdict(case) | row)
        if case.chip not in CHIPS:
            self._report(rows)
        return rows

    def _names(self, case: Case) -> list[str]:
        """Return the policies of a case, in an order that rotates from case to case."""
        names, own = [*self.values["policies"]], self.values["own"]
        if case.chip in CHIPS:
            return [name for name in names if name != AGAIN]
        if case.seed - self.seed < own["replays"]:
            names += own["policies"]
        return rotated(names, case.seed)

    def _report(self, rows: Sequence[Row]) -> None:
        """Print the figures of a replayed trace, and the time left."""
        seed, application = rows[0]["seed"], rows[0]["application"]
        del self._predicted[seed]
        left = sum(self._predicted.values()) / 60
        self.status(f"seed {seed}, {application}: about {left:.1f} min are left")
        for row in relative(rows):
            modes = ", ".join(f"{row[mode]:.0%} {mode}" for mode in MODES)
            switches = f"{row['switches']} switches in {row['switch_s']:.2f} s"
            print(f"        {row['policy']}: {row['shown']} ({modes}; {switches})", flush=True)

    @cached_property
    def _engine(self) -> PolicyEngine:
        return PolicyEngine(self.generated(self.values["model"]), self.dtype)

    def summarize(self) -> dict[str, Any]:
        return summarize(self.rows)

    def tables(self) -> Iterable[RenderableType]:
        steps = f"policy traces {' '.join(MODES)} switches switch_s longest_wait underfilled"
        latencies = "policy exercised_in mean mean_if_hot mean_of_all worst_mean worst_p99"
        latencies += " worst_duration late"
        for kind, rows in (("replayed", replayed(self.rows)), ("simulated", on_chips(self.rows))):
            if rows:
                made = by_policy(rows)
                yield frame.table(f"{kind}: steps, switches, longest wait / bound", made, steps)
                yield frame.table(f"{kind}: latencies / {FCFS}'s", made, latencies)
        if compared := errors(self.rows):
            title = "error of the simulated mean latency"
            yield frame.table(title, compared, "policy traces median_error largest_error")

    def draw(self) -> Iterable[Path]:
        return [] if self.plot is None else draw_figures(self.rows, self.plot)


def replayed(rows: Iterable[Row]) -> list[Row]:
    return matching(rows, chip=THIS_MACHINE)


def on_chips(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["chip"] in CHIPS]


def relative(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with the latencies relative to those of FCFS on the same trace.

    shown: the mean latency, or "not exercised" if the policy merged in almost no step.
    """
    rows = [*rows]
    first = {(row["chip"], row["seed"]): row for row in matching(rows, policy=FCFS)}
    made = []
    for row in rows:
        base = first[row["chip"], row["seed"]]
        own = row | {key: row[f"{key}_s"] / base[f"{key}_s"] for key in FIGURES}
        merges = policy_of(row["policy"]) != FCFS and row["policy"] not in OPERATORS
        own["exercised"] = not merges or 1 - row["unmerged"] > EXERCISED
        own["shown"] = frame.show(own["mean"]) if own["exercised"] else "not exercised"
        made.append(own)
    return made


def by_policy(rows: Iterable[Row]) -> list[Row]:
    """Return a row per policy with the means of its traces. Latencies are relative to FCFS.

    mean, mean_if_hot: of the traces in which the policy merged, or "not exercised" without any.
    Other latencies are of all traces, as a policy may lose time in other ways than by merging. No
    latency is of traces with deadlines, as a request that misses its deadline is less work. hot: at
    least half of the requests have the same adapter. longest_wait: as a share of its bound.
    underfilled: number of such steps (see `Replay`). late: number of missed deadlines.
    """
    known = relative(rows)
    made = []
    for name in dict.fromkeys(row["policy"] for row in known):
        own = matching(known, policy=name)
        timed = matching(own, deadlines=False)
        used = matching(timed, exercised=True)
        hot = [row["mean"] for row in used if row["skew"] >= 0.5]
        row: Row = {"policy": name, "traces": len(own), "exercised_in": len(used)}
        row |= {key: fmean(r[key] for r in own) for key in (*MODES, "switches", "switch_s")}
        missing = "not exercised"
        row["mean"] = mean_of(r["mean"] for r in used) or missing
        row["mean_if_hot"] = mean_of(hot) if used else missing
        if all(r["wait_bound_s"] is not None for r in own):
            row["longest_wait"] = max(r["longest_wait_s"] / r["wait_bound_s"] for r in own)
            row["underfilled"] = sum(r["underfilled_steps"] for r in own)
        row["late"] = sum(r["late"] for r in own)
        row["mean_of_all"] = mean_of(r["mean"] for r in timed)
        row |= {f"worst_{key}": max((r[key] for r in timed), default=None) for key in FIGURES}
        made.append(row)
    return made


def errors(rows: Iterable[Row]) -> list[Row]:
    """Return a row per policy, and one of all, with the errors of the simulated latencies."""
    known = [row for row in replayed(rows) if row.get("simulated_s")]
    made = []
    for name in (*dict.fromkeys(row["policy"] for row in known), "all"):
        own = known if name == "all" else matching(known, policy=name)
        off = [abs(row["simulated_s"] / row["mean_s"] - 1) for row in own]
        if off:
            figures = {"median_error": median(off), "largest_error": max(off)}
            made.append({"policy": name, "traces": len(off)} | figures)
    return made


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of OURS and PAPER, longest waits and underfilled steps of the package's
    policies, the noise, errors of the simulation, and the share of steps that adapters take."""
    summary: dict[str, Any] = {}
    for kind, own in (("", replayed(rows)), ("simulated_", on_chips(rows))):
        for row in by_policy(own):
            if row["policy"] in (OURS, PAPER):
                keys = ("mean", "mean_if_hot", "mean_of_all", *(f"worst_{key}" for key in FIGURES))
                figures = {key: row[key] for key in keys if row[key] != "not exercised"}
                summary |= {f"{kind}{row['policy']}_{key}": value for key, value in figures.items()}
            if row["policy"] in (OURS, PAPER, FCFS) and "longest_wait" in row:
                for key in ("longest_wait", "underfilled"):
                    summary[key] = max(summary.get(key, 0), row[key])
        late = {row["policy"]: row["late"] for row in by_policy(own)}
        if OURS in late and len(late) > 1:
            others = [count for name, count in late.items() if name not in (OURS, *OPERATORS)]
            summary[f"{kind}{OURS}_late_beyond_best"] = late[OURS] - min(others)
        paper = matching(own, policy=PAPER)
        if paper:
            full = sum(min(row[mode] for mode in MODES) > EXERCISED for row in paper)
            summary[f"{kind}{PAPER}_share_with_all_modes"] = full / len(paper)
    again = [abs(row["mean"] - 1) for row in matching(relative(rows), policy=AGAIN)]
    summary["noise_floor"] = max(again, default=None)
    shares = [row["adapter_share"] for row in matching(replayed(rows), policy=FCFS)]
    summary["adapter_share"] = fmean(shares) if shares else None
    (*_, total) = errors(rows) or [{}]
    for key in ("median_error", "largest_error"):
        summary[f"simulation_{key}"] = total.get(key)
    return summary


def draw_figures(rows: Sequence[Row], folder: Path) -> Iterator[Path]:
    """Draw figures 19 (each trace by skew) and 20 (what a merge saves)."""
    for title, own in (("replayed", replayed(rows)), ("simulated", on_chips(rows))):
        known = relative(own)
        path = folder / f"{title}.png"
        if known:
            with frame.figure(path, "skew", f"mean latency / {FCFS}'s") as plot:
                for name in dict.fromkeys(row["policy"] for row in known if row["policy"] != FCFS):
                    points = matching(known, policy=name)
                    xs, ys = [p["skew"] for p in points], [p["mean"] for p in points]
                    plot.scatter(xs, ys, 8, label=name.replace("_", " "))
                plot.axhline(1.0, color="gray", linewidth=0.5)
                plot.set_yscale("log")
            yield path
    yield draw_modes(folder / "modes.png")


def draw_modes(path: Path) -> Path:
    """Draw what merging an adapter does to a step of decoding, by the share of its requests."""
    with frame.figure(path, "share of requests for the merged adapter", "step / unmerged") as plot:
        for chip, rank, batch in (
            *(("avx2", 16, 64), ("avx2", 64, 64), ("avx2", 64, 8)),
            *(("amx", 64, 64), ("gpu", 64, 64)),
        ):
            costs = costs_on(CHIPS[chip], [rank] * 4)
            shares, ratios = [own / batch for own in range(1, batch + 1)], []
            for own in range(1, batch + 1):
                # The other requests are spread over three adapters.
                rows_of = {0: own} | {1 + i: n for i in range(3) if (n := (batch - own + i) // 3)}
                products = costs.products(batch, batch)
                merged, unmerged = (products + costs.adapters(rows_of, live) for live in (0, BASE))
                ratios.append(merged / unmerged)
            plot.plot(shares, ratios, label=f"{chip}, rank {rank}, batch {batch}")
        plot.axhline(1.0, color="gray", linewidth=0.5)
    return path
