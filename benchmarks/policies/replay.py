"""Replays of a trace: by the engine in real time, and by the scheduler in simulated time.

Both use the same scheduler and policy. In the simulation nothing is computed, and a step takes the
time that the cost model predicts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.llava import Checkpoint, prompt
from benchmarks.policies.simulation import resident_adapter, without_adapters
from benchmarks.policies.traces import TracedRequest
from vlora.engine.cost import CostModel
from vlora.engine.engine import Engine
from vlora.engine.plan import StepPlan
from vlora.engine.policies.base import Policy
from vlora.engine.scheduler import Budgets, Scheduler
from vlora.engine.sequence import Sequence as EngineSequence
from vlora.ids import BASE
from vlora.memory.kv_cache import BlockTable
from vlora.memory.pool import PagePool
from vlora.model.inputs import text_prompt
from vlora.request import Request
from vlora.sampling import SamplingParams

_request_numbers = itertools.count()


@dataclass
class Replay:
    """Times and counts of one replay. Times are in seconds from its start.

    arrival, first, end: times of arrival, first token and end, by request.
    tokens: number of tokens of all answers.
    modes: total duration of the steps, by mode.
    errors: relative error of each step's predicted time; empty for a simulation.
    adapter_share: share of the steps' total time that adapters cost; None for a measured replay.
    """

    arrival: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    end: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    steps: int = 0
    switches: int = 0
    merges: int = 0
    switch_seconds: float = 0.0
    modes: dict[str, float] = field(default_factory=dict)
    errors: list[float] = field(default_factory=list)
    adapter_share: float | None = None

    @property
    def token_latency(self) -> float:
        """Average token latency (§6.1): the sum of all end-to-end times divided by all tokens."""
        return sum(self.end[i] - self.arrival[i] for i in self.end) / self.tokens

    def as_row(self) -> dict[str, Any]:
        latencies = [self.end[i] - self.arrival[i] for i in self.end]
        first_tokens = [self.first[i] - self.arrival[i] for i in self.first]
        p50, p95, p99 = (float(np.percentile(latencies, q)) for q in (50, 95, 99))
        span = max(self.end.values()) - min(self.arrival.values())
        return {
            "token_latency_ms": round(self.token_latency * 1e3, 3),
            "p50_s": round(p50, 4),
            "p95_s": round(p95, 4),
            "p99_s": round(p99, 4),
            "first_token_s": round(fmean(first_tokens), 4),
            "requests_per_s": round(len(latencies) / span, 4),
            "tokens_per_s": round(self.tokens / span, 2),
            "steps": self.steps,
            "switches": self.switches,
            "merges": self.merges,
            "switch_s": round(self.switch_seconds, 4),
            "mode_s": {mode: round(seconds, 3) for mode, seconds in sorted(self.modes.items())},
            "prediction_error": round(median(self.errors), 4) if self.errors else None,
        }


def replay_measured(
    engine: Engine, checkpoint: Checkpoint, trace: Sequence[TracedRequest], policy: Policy
) -> Replay:
    """Run a trace in real time on the calling thread, and return its times and counts.

    Prompts are prepared before the clock starts. While the engine is idle, the clock jumps to the
    next arrival.
    """
    names, sizes = checkpoint.adapter_names, checkpoint.sizes
    arrivals = []
    for traced in trace:
        number = next(_request_numbers)
        params = SamplingParams(temperature=0.0, max_tokens=traced.limit, ignore_eos=True)
        text = prompt(traced.prompt - 1, number, sizes)
        adapter = names[traced.adapter % len(names)]
        state = engine.prepare(Request(f"replay-{number}", text, params, adapter=adapter))
        # The answer ends after this many tokens, as if the model had generated end-of-text.
        state.sequence.max_tokens = traced.output
        arrivals.append((traced.at, state))
    engine.scheduler.policy = policy
    engine.switcher.switch(BASE)
    before = engine.stats()
    replay = Replay()
    start = time.monotonic()
    index = 0
    while index < len(arrivals) or not engine.idle:
        now = time.monotonic() - start
        while index < len(arrivals) and arrivals[index][0] <= now:
            at, state = arrivals[index]
            replay.arrival[state.sequence.id] = at
            engine.add(state, start + at)
            index += 1
        if engine.idle:
            start -= max(0.0, arrivals[index][0] - now)
            continue
        outputs = engine.step()
        now = time.monotonic() - start
        for output in outputs:
            assert output.error is None, output.error
            replay.first.setdefault(output.request_id, now)
            replay.tokens += len(output.token_ids)
            if output.finished:
                replay.end[output.request_id] = now
    after = engine.stats()
    replay.steps = after.steps - before.steps
    replay.switches = after.switches - before.switches
    replay.merges = after.merges - before.merges
    replay.switch_seconds = after.switch_seconds - before.switch_seconds
    replay.modes = {
        mode: seconds - before.mode_seconds.get(mode, 0.0)
        for mode, seconds in after.mode_seconds.items()
    }
    replay.errors = list(engine.costs.corrections.errors)[-replay.steps :]
    return replay


def replay_simulated(
    trace: Sequence[TracedRequest],
    budgets: Budgets,
    pages: int,
    block: int,
    costs: CostModel,
    policy: Callable[[CostModel], Policy],
) -> Replay:
    """Run a trace in the time that the cost model predicts.

    pages, block: number of KV pages, and number of tokens per page.
    policy: returns the policy for the simulation's cost model.
    """
    return _Simulation(trace, budgets, pages, block, costs, policy).run()


class _Simulation:
    """Scheduler and pages of a simulation, in which a step takes its predicted time."""

    def __init__(
        self,
        trace: Sequence[TracedRequest],
        budgets: Budgets,
        pages: int,
        block: int,
        costs: CostModel,
        policy: Callable[[CostModel], Policy],
    ) -> None:
        self._trace = trace
        self._costs = replace(costs, merged_slot=lambda: self._merged)
        self._free_costs = without_adapters(self._costs)
        self._pool, self._block = PagePool(pages), block
        self._scheduler = Scheduler(budgets, policy(self._costs))
        self._live = self._merged = BASE
        """Slots of the live adapter, and of the adapter whose merged weights exist. Switching to
        BASE keeps the merged weights.
        """
        self._now = 0.0
        self._adapter_seconds = 0.0
        self._output_lengths: dict[str, int] = {}
        self._replay = Replay()

    def run(self) -> Replay:
        index = 0
        while index < len(self._trace) or not self._scheduler.idle:
            while index < len(self._trace) and self._trace[index].at <= self._now:
                self._add(f"s{index}", self._trace[index])
                index += 1
            if self._scheduler.idle:
                self._now = self._trace[index].at
                continue
            plan = self._scheduler.schedule(self._now, self._live)
            assert plan.chunks, "the scheduler is not idle and its plan is empty"
            if plan.live != self._live:
                self._switch(plan.live)
            self._step(plan)
        self._replay.adapter_share = self._adapter_seconds / sum(self._replay.modes.values())
        return self._replay

    def _add(self, request_id: str, traced: TracedRequest) -> None:
        params = SamplingParams(max_tokens=traced.limit)
        sequence = EngineSequence(
            Request(request_id, "", params),
            text_prompt([0] * traced.prompt),
            resident_adapter(traced.adapter),
            traced.limit,
            BlockTable(self._pool, self._block),
        )
        sequence.arrival = traced.at
        self._output_lengths[request_id] = traced.output
        self._replay.arrival[request_id] = traced.at
        self._scheduler.add(sequence)

    def _switch(self, live: int) -> None:
        seconds = self._costs.switch(self._live, live)
        self._replay.switches += 1
        self._replay.merges += live not in (BASE, self._merged)
        self._replay.switch_seconds += seconds
        self._now += seconds
        self._live = live
        if live != BASE:
            self._merged = live

    def _step(self, plan: StepPlan) -> None:
        replay, live = self._replay, self._live
        seconds = self._costs.predict(plan.parts, live)
        self._now += seconds
        self._adapter_seconds += seconds - self._free_costs.predict(plan.parts, live)
        replay.steps += 1
        mode = plan.mode.value
        replay.modes[mode] = replay.modes.get(mode, 0.0) + seconds
        running = {sequence.id: sequence for sequence in self._scheduler.running}
        for chunk in plan.chunks:
            sequence = running[chunk.sequence_id]
            sequence.computed += chunk.length
            if not chunk.completes:
                continue
            sequence.tokens.append(0)
            replay.tokens += 1
            replay.first.setdefault(sequence.id, self._now)
            if sequence.output_length == self._output_lengths[sequence.id]:
                replay.end[sequence.id] = self._now
                self._scheduler.remove(sequence)
