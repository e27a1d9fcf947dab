"""The grid of the policies benchmark: traces, rates, and the policies that run each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.benchmark import load_grid_values
from benchmarks.policies.traces import TracedRequest, Workload
from vlora.atmm.search.timing import rotated

SUMMARY_SETTING: Mapping[str, Any] = {"load": 0.8, "skew": 0.6}
"""Load and skew at which the summary compares policies."""

CAPACITY = "capacity"
MEASURED, TWO_ADAPTERS, SIMULATED_AGAIN = "measured", "few adapters", "simulated again"
SIMULATED, CLOSED_LOOP = "simulated", "closed loop"
"""Kinds of rows.

capacity: throughput of unmerge_only with all requests at once.
measured: the grid in real time.
few adapters: traces with two adapters, as in figure 21, in real time.
simulated again: the measured traces, simulated with the cost model after all measurements.
simulated: larger traces, simulated with the same cost model.
closed loop: the rows of `closed_loop`.
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

    def trace(self, capacity: float) -> list[TracedRequest]:
        """Return the trace's requests.

        capacity: throughput of unmerge_only in requests per second.
        """
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
class PolicyGrid:
    """Contents of a grid file.

    The following entries list policies:

    - `policies` run with ATMM on all traces.
    - `also` run with ATMM, with some seeds only.
    - `few` also run on traces with fewer adapters.
    - `own` are systems that run with the operators that they were published with, at one load and
      skew, with some seeds only.
    """

    values: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path, *, quick: bool) -> PolicyGrid:
        return cls(load_grid_values(path, quick=quick))

    def cells(self) -> Iterator[PolicyCell]:
        """Yield the cells to measure, one seed after another.

        If the run ends early, the seeds before the current one are complete.
        The order of the policies rotates from cell to cell.
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
                if seed in also["seeds"]:
                    names += also["policies"]
                policies = tuple(rotated(names, number))
                workload = self.workload(entry, skew=skew)
                yield PolicyCell(workload, entry["count"], seed, load, policies)
                number += 1
            for entry in values["workloads"] if seed in few["seeds"] else ():
                workload = self.workload(
                    entry, skew=SUMMARY_SETTING["skew"], adapters=few["adapters"]
                )
                policies = tuple(rotated(few["policies"], number))
                load = SUMMARY_SETTING["load"]
                yield PolicyCell(workload, entry["count"], seed, load, policies, TWO_ADAPTERS)

    def simulated_cells(self) -> Iterator[PolicyCell]:
        """Yield the cells whose traces are simulated and not measured."""
        values = self.values["simulated"]
        for entry, arrivals, adapters, load, skew in itertools.product(
            self.values["workloads"],
            values["arrivals"],
            values["adapters"],
            values["loads"],
            values["skews"],
        ):
            workload = self.workload(entry, skew=skew, adapters=adapters, arrivals=arrivals)
            yield PolicyCell(
                workload, values["count"], 1, load, tuple(values["policies"]), SIMULATED
            )

    def workload(self, entry: Mapping[str, Any], **settings: Any) -> Workload:
        """Return the workload that an entry of the grid's `workloads` describes."""
        values = {"adapters": self.values["adapters"], "scale": entry["scale"], **settings}
        return Workload(entry["application"], **values)
