"""Policies on drawn traces, in simulated time on four chips, which needs no quiet machine.

It shows what a policy decides, not what a machine measures: steps take the predicted times of an
assumed chip, and nothing else runs there.

usage: python -m benchmarks.simulated_chips --traces 160 --seed 1
"""

from __future__ import annotations

import random
from statistics import fmean
from typing import Annotated, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from benchmarks import baseline_policies, frame
from benchmarks.frame import Row
from benchmarks.replay import Replay, Simulation, TracedRequest, Workload
from vlora.config import Options
from vlora.engine.cost import AdapterSize, CostModel, Profile
from vlora.engine.policies.registry import make_policy
from vlora.engine.scheduler import Budgets

FCFS = "unmerge_only"
POLICIES = (FCFS, "predictive", "paper", "dlora", "merge_only")


class Chip(NamedTuple):
    """An assumed chip, and the bf16 decoder that it serves.

    fixed: seconds that a step takes longer than its matrix products, however few rows it has.
    """

    bytes_per_second: float
    operations_per_second: float
    lora_call_seconds: float
    elements: float
    layers: int
    fixed: float = 0.0


CHIPS = {
    "avx2": Chip(1e10, 5e10, 15e-6, 4e8, 24),
    "avx512": Chip(1.5e10, 2e11, 12e-6, 4e8, 24),
    "amx": Chip(2e10, 8e11, 10e-6, 4e8, 24),
    "gpu": Chip(2e12, 2e14, 8e-6, 6.5e9, 32, 2e-3),
}


class Case(NamedTuple):
    """A drawn trace. ranks: rank of each adapter. batch: MaxBS."""

    chip: str
    skew: float
    ranks: list[int]
    batch: int
    trace: list[TracedRequest]

    def run(self, policy: str) -> Replay:
        options = Options(policy=policy, max_batch_requests=self.batch)
        budgets = Budgets(options.max_num_seqs, options.max_num_batched_tokens)
        costs = costs_on(CHIPS[self.chip], self.ranks)
        return Simulation(
            self.trace, budgets, 10**5, 16, costs, lambda c: make_policy(options, c)
        ).run()


def costs_on(chip: Chip, ranks: list[int]) -> CostModel:
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


def drawn_case(seed: int, count: int = 128) -> Case:
    """Return the trace of a seed: 0.5 to 1.1 of the capacity, 4 to 64 adapters of rank 8 to 64."""
    draw = random.Random(seed)
    chip, application = draw.choice(list(CHIPS)), draw.choice(["retrieval", "analytics"])
    scale = draw.choice([1 / 16, 1 / 4]) * (4 if chip == "gpu" else 1)
    ranks = [draw.choice([8, 16, 32, 64]) for _ in range(draw.choice([4, 8, 16, 32, 64]))]
    arrivals = draw.choice(["poisson", "bursty"])
    work = Workload(application, draw.uniform(0.2, 0.9), len(ranks), arrivals, scale)  # type: ignore[arg-type]
    case = Case(chip, work.skew, ranks, draw.choice([8, 16, 64]), work.trace(seed, 1e9, count // 2))
    rate = draw.uniform(0.5, 1.1) * (count // 2) / case.run(FCFS).outcome.span
    return case._replace(trace=work.trace(seed, rate, count))


def figures(replay: Replay) -> tuple[float, float, float]:
    """Return mean and 99th percentile of the latency, and the duration of the run, in seconds."""
    ends = replay.outcome.end
    return fmean(ends), float(np.percentile(ends, 99)), replay.outcome.span


def compare(cases: list[Case]) -> list[Row]:
    """Return a row for each policy, with figures relative to those of FCFS on the same trace."""
    baseline_policies.register()
    base = [figures(case.run(FCFS)) for case in cases]
    rows = []
    for policy in track(POLICIES[1:], "simulating", console=Console(stderr=True)):
        replays = [case.run(policy) for case in cases]
        ratios = np.array([figures(r) for r in replays]) / np.array(base)
        merged = [1 - r.modes.get("unmerged", 0.0) / sum(r.modes.values()) for r in replays]
        hot = [ratio for ratio, case in zip(ratios[:, 0], cases, strict=True) if case.skew >= 0.5]
        row: Row = {"policy": policy, "merged_or_mixture": fmean(merged)}
        row |= {"exercised_in": sum(share > 0.05 for share in merged), "traces": len(cases)}
        row |= {"mean": fmean(ratios[:, 0]), "mean_if_hot": fmean(hot)}
        worst = ratios.max(axis=0)
        row |= {"worst_mean": worst[0], "worst_p99": worst[1], "worst_duration": worst[2]}
        rows.append(row)
    return rows


def main(
    traces: Annotated[int, typer.Option(help="Number of traces.")] = 160,
    seed: Annotated[int, typer.Option(help="Seed of the first trace; the others follow.")] = 1,
) -> None:
    """Compare the policies with first come, first served, on drawn traces in simulated time."""
    rows = compare([drawn_case(seed + number) for number in range(traces)])
    keys = "policy merged_or_mixture exercised_in traces mean mean_if_hot worst_mean worst_p99"
    title = f"relative to {FCFS}; share of the time of merged and mixture steps"
    Console().print(frame.table(title, rows, keys + " worst_duration"))


if __name__ == "__main__":
    typer.run(main)
