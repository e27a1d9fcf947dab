"""The policies benchmark: seeded traces, measured in real time and simulated.

Every measured replay is also simulated on the same trace. Larger traces are only simulated. With
--json, a later run adds only the rows that the file does not contain.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import RenderableType

from benchmarks.benchmark import (
    GRIDS,
    Bar,
    Benchmark,
    GridOption,
    QuickOption,
    RootOption,
    Row,
    at_least,
    at_most,
    below,
    demo_folder,
    parse_types,
    server_threads,
)

if TYPE_CHECKING:
    from benchmarks.policies.grid import PolicyCell
    from benchmarks.policies.policy_engine import PolicyEngine

QUICK_SECONDS = 40.0
"""Duration of a run with --quick, including loading and calibration."""
SIMULATION_SHARE = 0.06
"""Share of the duration that is reserved for traces that are only simulated."""


@dataclass(frozen=True)
class Job:
    """The work of one row, or of all rows of the closed loop.

    kind: kind of the row, a constant of `grid`.
    cell, policy: the trace and the policy that runs it; None and "" for the closed loop.
    """

    kind: str
    cell: PolicyCell | None = None
    policy: str = ""


class PoliciesBenchmark(Benchmark[Job]):
    """Average token latency by policy, measured in real time and simulated."""

    name = "policies"
    resumable = True
    conditions = ("command", "quick", "grid", "dtype", "threads", "workloads", "cpu")
    bars: ClassVar[Mapping[str, Bar]] = {
        "vs_unmerge_only": below(1),
        "vs_merge_only": below(1),
        "vs_dlora": below(1),
        "vs_own_operators": below(1),
        "worst_vs_unmerge_only_at_high_skew": below(1),
        "worst_vs_merge_only_at_high_skew": below(1),
        "worst_vs_dlora_at_high_skew": below(1),
        "worst_vs_best_baseline": at_most(1.03),
        "simulated_worst_vs_best_baseline": at_most(1.03),
        "closed_loop_vs_unmerge_only": at_least(1),
        "step_prediction_median_error": at_most(0.1),
        "simulation_median_error": at_most(0.1),
        "seeds": at_least(5),
    }

    def __init__(
        self,
        *,
        minutes: Annotated[
            float | None,
            typer.Option(metavar="MINUTES", help="Stop measuring after this many minutes."),
        ] = None,
        dtype: Annotated[
            str, typer.Option(metavar="TYPE", help="Storage type: fp32 or bf16.")
        ] = "bf16",
        plot: Annotated[
            Path | None, typer.Option(metavar="FOLDER", help="Draw figures into this folder.")
        ] = None,
        quick: QuickOption = False,
        grid: GridOption = None,
        root: RootOption = None,
    ) -> None:
        super().__init__(quick=quick, grid=grid or GRIDS / "policies.json")
        from benchmarks import machine
        from benchmarks.policies.grid import PolicyGrid

        (self._dtype,) = parse_types(dtype)
        self._threads = server_threads()
        machine.set_threads(self._threads)
        self._grid = PolicyGrid.load(self.grid_path, quick=quick)
        self._plot, self._root = plot, root
        seconds = minutes * 60 if minutes is not None else QUICK_SECONDS if quick else 1e9
        self._deadline = time.monotonic() + seconds
        self._last_measurement: float | None = None
        self._capacities: dict[str, float] = {}
        self._engine: PolicyEngine | None = None
        self._simulating_again = False

    def settings(self) -> dict[str, Any]:
        workloads = self._grid.values["workloads"]
        return {"dtype": self._dtype, "threads": self._threads, "workloads": workloads}

    def resume(self, rows: Sequence[Row]) -> list[Row]:
        from benchmarks.policies.source_fingerprint import current

        return current(rows)

    def cells(self) -> Sequence[Job]:
        from benchmarks.policies import grid

        values = self._grid.values
        measured = list(self._grid.cells())
        again = (*values["policies"], *values["also"]["policies"])
        return [
            *(Job(grid.CAPACITY, cell, "unmerge_only") for cell in self._capacity_cells()),
            *([Job(grid.CLOSED_LOOP)] if values["closed"] else ()),
            *(Job(cell.kind, cell, policy) for cell in measured for policy in cell.policies),
            *(
                Job(grid.SIMULATED_AGAIN, cell, policy)
                for cell in measured
                if cell.kind == grid.MEASURED
                for policy in again
            ),
            *(
                Job(cell.kind, cell, policy)
                for cell in self._grid.simulated_cells()
                for policy in cell.policies
            ),
        ]

    def run(self, cell: Job) -> Iterator[Row]:
        from benchmarks.policies import grid

        job = cell
        if job.kind == grid.CAPACITY:
            yield from self._measure_capacity(job)
            return
        if self._last_measurement is None:
            now = time.monotonic()
            self._last_measurement = self._deadline - SIMULATION_SHARE * max(
                0.0, self._deadline - now
            )
        if job.kind == grid.CLOSED_LOOP:
            yield from self._run_closed_loop()
        elif job.kind == grid.SIMULATED_AGAIN:
            yield from self._simulate_again(job)
        elif job.kind == grid.SIMULATED:
            yield from self._simulate(job)
        else:
            yield from self._measure(job)

    def summarize(self) -> dict[str, Any]:
        from benchmarks.policies.summary import summarize

        return summarize(self.rows)

    def tables(self) -> Iterable[RenderableType]:
        from benchmarks.policies.summary import gains_by_setting
        from benchmarks.policies.tables import gain_table, policy_table

        return [policy_table(self.rows), gain_table(gains_by_setting(self.rows))]

    def summary_title(self) -> str:
        return "average token latency with our policy, divided by that with another"

    def draw(self) -> Iterable[Path]:
        from benchmarks.policies.tables import draw_figures

        return [] if self._plot is None else draw_figures(self.rows, self._plot)

    def _capacity_cells(self) -> Iterator[PolicyCell]:
        """Yield one cell for each application. All requests of the cell arrive at the same time."""
        from benchmarks.policies.grid import CAPACITY, SUMMARY_SETTING, PolicyCell

        values = self._grid.values
        for entry in values["workloads"]:
            workload = self._grid.workload(entry, skew=SUMMARY_SETTING["skew"])
            yield PolicyCell(workload, values["capacity_count"], 0, 1.0, (), CAPACITY)

    def _measure_capacity(self, job: Job) -> Iterator[Row]:
        """Measure how many requests per second unmerge_only completes, after a warm-up."""
        assert job.cell is not None
        application, count = job.cell.workload.application, job.cell.count
        key = {"kind": job.kind, "application": application, "count": count}
        row = self._known_row(key)
        if row is None:
            self.status(f"capacity: {application}")
            trace, engine = job.cell.trace(1e9), self._started_engine()
            engine.measure(job.policy, trace)
            row = {**key, **engine.measure(job.policy, trace).as_row()}
            yield row
        self._capacities[application] = row["requests_per_s"]

    def _run_closed_loop(self) -> Iterator[Row]:
        """Measure the closed loop. If one policy's code has changed, measure all policies again,
        because they are compared round by round."""
        from benchmarks.policies.closed_loop import ClosedLoop
        from benchmarks.policies.grid import CLOSED_LOOP
        from benchmarks.policies.source_fingerprint import source_fingerprint

        grid = self._grid.values["closed"]
        codes = {name: source_fingerprint(name) for name in grid["policies"]}
        keys = ({"kind": CLOSED_LOOP, "policy": name, "code": codes[name]} for name in codes)
        if all(self._known_row(key) for key in keys) or not self._may_measure():
            return
        self.status("closed loop")
        self.rows[:] = [row for row in self.rows if row["kind"] != CLOSED_LOOP]
        for row in ClosedLoop(demo_folder(), grid).rows(grid["policies"], grid["rounds"]):
            yield {"kind": CLOSED_LOOP, "code": codes[row["policy"]], **row}

    def _measure(self, job: Job) -> Iterator[Row]:
        """Measure and simulate one trace with one policy."""
        from benchmarks.policies.published_operators import OPERATORS

        key = self._key(job)
        if self._known_row(key) is not None or not self._may_measure():
            return
        assert job.cell is not None
        self.status(f"{job.cell.name}: {job.policy}")
        trace, engine = self._trace(job.cell), self._started_engine()
        replay = engine.measure(job.policy, trace)
        simulated_ms = None
        if job.policy not in OPERATORS:
            simulated_ms = round(engine.simulate(job.policy, trace).token_latency * 1e3, 3)
        yield key | replay.as_row() | {"simulated_ms": simulated_ms}

    def _simulate_again(self, job: Job) -> Iterator[Row]:
        """Simulate a measured trace with the cost model that the engine has after all measurements.

        The time limit of the run is ignored, since a simulation takes only a second or two. The
        first call removes the rows of this kind that an earlier run wrote.
        """
        from benchmarks.policies.grid import MEASURED, SIMULATED_AGAIN
        from benchmarks.policies.summary import FCFS, OURS

        if not self._simulating_again:
            self._simulating_again = True
            self.rows[:] = [row for row in self.rows if row["kind"] != SIMULATED_AGAIN]
        assert job.cell is not None
        key = self._key(job)
        if self._known_row({"kind": MEASURED, **job.cell.as_row()}) is None or self._known_row(key):
            return
        self.status(f"simulated: {job.cell.name}: {job.policy}")
        trace, engine = self._trace(job.cell), self._started_engine()
        replay = engine.simulate(job.policy, trace)
        row = key | replay.as_row()
        if job.policy in (OURS, FCFS):
            free = engine.simulate(job.policy, trace, free_adapters=True).token_latency
            share = replay.adapter_share
            row |= {"free_adapters_ms": round(free * 1e3, 3)}
            row |= {"adapter_share": share and round(share, 4)}
        yield row

    def _simulate(self, job: Job) -> Iterator[Row]:
        """Simulate one trace that is not measured."""
        key = self._key(job)
        if self._known_row(key) is not None or time.monotonic() > self._deadline:
            return
        assert job.cell is not None
        adapters = job.cell.workload.adapters
        self.status(f"simulated: {job.cell.name}, {adapters} adapters: {job.policy}")
        replay = self._started_engine().simulate(job.policy, self._trace(job.cell))
        yield key | replay.as_row()

    def _may_measure(self) -> bool:
        """Return whether enough time is left to measure another cell."""
        return self._last_measurement is not None and time.monotonic() <= self._last_measurement

    def _trace(self, cell: PolicyCell) -> Any:
        return cell.trace(self._capacities[cell.workload.application])

    def _started_engine(self) -> PolicyEngine:
        """Return the engine of all replays. The first call loads and calibrates it."""
        if self._engine is None:
            from benchmarks import llava
            from benchmarks.policies.policy_engine import PolicyEngine

            checkpoint = llava.make(llava.MODELS[self._grid.values["model"]], self._root)
            self._engine = PolicyEngine(checkpoint, self._dtype)
        return self._engine

    def _key(self, job: Job) -> Row:
        """Return the items of a row that identify this job."""
        from benchmarks.policies.source_fingerprint import source_fingerprint

        assert job.cell is not None
        code = source_fingerprint(job.policy)
        return {"kind": job.kind, "policy": job.policy, "code": code} | job.cell.as_row()

    def _known_row(self, key: Mapping[str, Any]) -> Row | None:
        """Return the row that has all items of `key`, or None."""
        return next((row for row in self.rows if key.items() <= row.items()), None)
