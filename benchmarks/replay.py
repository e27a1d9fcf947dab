"""Replays of the traces of `vlora.load.trace` with any policy.

A trace is replayed by the engine in real time, or by the scheduler in simulated time. Both use the
same scheduler and policy. In the simulation nothing is computed, and a step takes the time that the
cost model predicts.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.driver import Driver, DriverRequest, Outcome
from benchmarks.llava import Checkpoint, prompt
from benchmarks.models import ENGINE_NAMES
from benchmarks.published_operators import OPERATORS, POLICY_OF_SYSTEM, use_operator
from vlora.adapters.files import AdapterDescription, AdapterInfo
from vlora.adapters.handle import AdapterHandle, AdapterState
from vlora.config import Options
from vlora.engine.cost import CostModel, Part
from vlora.engine.engine import Engine
from vlora.engine.plan import Mode, StepPlan
from vlora.engine.policies.base import Policy, make_policy
from vlora.engine.scheduler import Budgets, Scheduler
from vlora.engine.sequence import Sequence as EngineSequence
from vlora.ids import BASE
from vlora.load.trace import TracedRequest
from vlora.memory.kv_cache import BlockTable
from vlora.memory.pool import PagePool
from vlora.model.inputs import text_prompt
from vlora.request import Request
from vlora.sampling import SamplingParams

MODES = [mode.value for mode in Mode]


@dataclass
class Replay:
    """Times and counts of one replay, in seconds.

    outcome: times of the requests, from their arrival.
    modes, mode_steps: total duration and number of the steps, by mode.
    switch_seconds: total duration of the switches.
    errors: relative error of each step's predicted time; empty for a simulation.
    pace: mean of the cost model's factor for the speed of the machine, of a replay in real time.

    Those of a simulation only:
    adapter_share: share of the steps' total time that adapters cost.
    longest_wait, wait_bound: longest time until a request was first in a step, and its bound
        (decision 41).
    underfilled_steps: number of steps with less than half of the requests that a full one would
        have, and of the rows that it would compute per second.
    """

    outcome: Outcome = field(default_factory=Outcome)
    switches: int = 0
    merges: int = 0
    switch_seconds: float = 0.0
    modes: dict[str, float] = field(default_factory=dict)
    mode_steps: dict[str, int] = field(default_factory=dict)
    errors: Sequence[float] = ()
    pace: float = 1.0
    adapter_share: float | None = None
    longest_wait: float | None = None
    wait_bound: float | None = None
    underfilled_steps: int | None = None

    @property
    def busy(self) -> float:
        """Seconds of all steps and switches."""
        return sum(self.modes.values()) + self.switch_seconds

    @property
    def token_latency(self) -> float:
        """Average token latency (§6.1): the sum of all end-to-end times divided by all tokens."""
        return self.outcome.token_latency

    def as_row(self) -> dict[str, Any]:
        steps = sum(self.mode_steps.values())
        return {
            "token_latency_ms": self.token_latency * 1e3,
            "mean_s": fmean(self.outcome.end),
            "p99_s": float(np.quantile(self.outcome.end, 0.99)),
            "duration_s": self.outcome.span,
            "late": self.outcome.late,
            **{mode: self.mode_steps.get(mode, 0) / steps for mode in MODES},
            "switches": self.switches,
            "merges": self.merges,
            "switch_s": self.switch_seconds,
            "adapter_share": self.adapter_share,
            "longest_wait_s": self.longest_wait,
            "wait_bound_s": self.wait_bound,
            "underfilled_steps": self.underfilled_steps,
            "prediction_error": median(self.errors) if self.errors else None,
        }


class Simulation:
    """Run of a trace with a policy, under an engine's options, in predicted time."""

    def __init__(
        self,
        trace: Sequence[TracedRequest],
        options: Options,
        costs: CostModel,
    ) -> None:
        self._trace = trace
        self._costs = replace(costs, merged_slot=lambda: self._merged)
        self._free_costs = without_adapters(self._costs)
        self._block = options.block_size
        self._pool = PagePool(options.kv_cache_tokens // options.block_size)
        budgets = Budgets(options.max_num_seqs, options.max_num_batched_tokens)
        self._scheduler = Scheduler(budgets, make_policy(options, self._costs))
        self._live = self._merged = BASE
        """Slots of the live adapter, and of the adapter whose merged weights exist. Switching to
        BASE keeps the merged weights.
        """
        self._now = 0.0
        self._adapter_seconds = 0.0
        self._output_lengths: dict[str, int] = {}
        self._replay = Replay(longest_wait=0.0, underfilled_steps=0)
        self._options = options
        self._in_flight, self._longest_step = 0, 0.0  # Largest values so far.

    def run(self) -> Replay:
        index = 0
        while index < len(self._trace) or not self._scheduler.idle:
            while index < len(self._trace) and self._trace[index].at <= self._now:
                self._add(f"s{index}", self._trace[index])
                index += 1
            self._end_late()
            if self._scheduler.idle:
                self._now = max(self._now, self._trace[min(index, len(self._trace) - 1)].at)
                continue
            self._in_flight = max(self._in_flight, self._unfinished)
            started = self._now
            plan = self._scheduler.schedule(self._now, self._live)
            assert plan.chunks, "the scheduler is not idle and its plan is empty"
            if plan.live != self._live:
                self._switch(plan.live)
            self._note_waits(plan)
            self._step(plan)
            self._longest_step = max(self._longest_step, self._now - started)
        self._replay.wait_bound = self._wait_bound()
        self._replay.adapter_share = self._adapter_seconds / sum(self._replay.modes.values())
        self._replay.outcome.span = self._now - self._trace[0].at
        return self._replay

    @property
    def _unfinished(self) -> int:
        return len(self._scheduler.running) + len(self._scheduler.waiting)

    def _wait_bound(self) -> float:
        """Return the bound of decision 41 with the largest numbers of this run."""
        options, rows = self._options, self._options.max_num_batched_tokens
        batch = options.max_step_requests
        steps = max(-(-batch * traced.prompt // rows) + traced.output for traced in self._trace)
        # Policies with shorter steps need more of them.
        full_step = self._costs.predict([Part(0, rows, 0, True)], BASE)
        before = -(-self._in_flight // batch) * steps + 1
        return options.max_wait_seconds + before * max(self._longest_step, full_step)

    def _note_waits(self, plan: StepPlan) -> None:
        """Note how long the requests of a step waited if they are new, and whether it is full."""
        running = {sequence.id: sequence for sequence in self._scheduler.running}
        chosen = [running.pop(chunk.sequence_id) for chunk in plan.chunks]
        waits = [self._now - sequence.arrival for sequence in chosen if not sequence.computed]
        replay = self._replay
        replay.longest_wait = max(replay.longest_wait or 0.0, *waits, 0.0)
        most = self._options.max_step_requests
        others = [*running.values(), *self._scheduler.waiting][: most - len(chosen)]
        if len(chosen) < len(others):
            possible = plan.rows + sum(sequence.missing for sequence in others)
            possible = min(possible, self._options.max_num_batched_tokens)
            rates = [rows / self._costs.products(rows, 1) for rows in (plan.rows, possible)]
            replay.underfilled_steps = (replay.underfilled_steps or 0) + (2 * rates[0] < rates[1])

    def _add(self, request_id: str, traced: TracedRequest) -> None:
        has_deadline = traced.deadline < math.inf
        deadline_ms = 1e3 * traced.deadline if has_deadline else None
        params = SamplingParams(max_tokens=traced.limit, deadline_ms=deadline_ms)
        adapter = resident_adapter(traced.adapter)
        sequence = EngineSequence(
            Request(request_id, "", params, adapter=adapter.name if adapter else None),
            text_prompt([0] * traced.prompt),
            adapter,
            traced.limit,
            BlockTable(self._pool, self._block),
        )
        sequence.queue_at(traced.at)
        self._output_lengths[request_id] = traced.output
        self._scheduler.add(sequence)

    def _end_late(self) -> None:
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            if sequence.deadline <= self._now:
                self._replay.outcome.end.append(self._now - sequence.arrival)
                self._replay.outcome.late += 1
                self._scheduler.remove(sequence)

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
        replay, outcome, live = self._replay, self._replay.outcome, self._live
        seconds = self._costs.predict(plan.parts, live)
        self._now += seconds
        self._adapter_seconds += seconds - self._free_costs.predict(plan.parts, live)
        mode = plan.mode.value
        replay.modes[mode] = replay.modes.get(mode, 0.0) + seconds
        replay.mode_steps[mode] = replay.mode_steps.get(mode, 0) + 1
        running = {sequence.id: sequence for sequence in self._scheduler.running}
        for chunk in plan.chunks:
            sequence = running[chunk.sequence_id]
            sequence.computed += chunk.length
            if not chunk.completes:
                continue
            sequence.tokens.append(0)
            outcome.tokens += 1
            seconds = self._now - sequence.arrival
            if sequence.output_length == 1:
                outcome.first.append(seconds)
            if sequence.output_length == self._output_lengths[sequence.id]:
                outcome.end.append(seconds)
                self._scheduler.remove(sequence)


@contextmanager
def noted_paces(costs: CostModel) -> Iterator[list[float]]:
    """Return a list, to which each step in the `with` block adds the logarithm of the pace."""
    paces: list[float] = []
    record = costs.record

    def noted(*arguments: Any) -> float:
        predicted = record(*arguments)
        paces.append(costs.corrections.pace.log)
        return predicted

    with patch.object(costs, "record", noted):
        yield paces


def fork(costs: CostModel) -> CostModel:
    """Return a copy of a cost model; from now on the two learn separately."""
    return replace(costs, corrections=copy.deepcopy(costs.corrections))


def without_adapters(costs: CostModel) -> CostModel:
    """Return a copy of a cost model in which adapters cost nothing."""
    free: dict[str, Any] = {"lora_calls": 0.0, "merge": (0.0, 0.0)}
    free |= {"adapter_element": 0.0, "adapter_element_row": 0.0}
    return replace(costs, profile=replace(costs.profile, **free))


def resident_adapter(slot: int) -> AdapterHandle | None:
    """Return an adapter without files that is resident in this slot, or None for the base."""
    if slot == BASE:
        return None
    info = AdapterInfo(f"slot {slot}", f"digest {slot}", (), (), (), {}, (), ())
    described = AdapterDescription(info, {}, 0)
    return AdapterHandle(info.name, Path(), b"", described, AdapterState.RESIDENT, slot=slot)


class PolicyEngine:
    """A calibrated engine that replays traces with any policy.

    names: adapters of the requests, by the number of the adapter in the trace; those of the
        checkpoint if None.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, names: Sequence[str] | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self._names = names or checkpoint.adapter_names
        self.options = Options(
            model=checkpoint.folder, adapters=checkpoint.adapters, dtype=ENGINE_NAMES[dtype]
        )
        self.engine = Engine(self.options)
        self.engine.calibrate(force=True)
        self._driver, self._numbers = Driver(self.engine), itertools.count()
        # At this point, the slot of each adapter is its index. Replays may change the slots.
        slots, costs = range(len(checkpoint.adapter_names)), self.engine.costs
        self._sizes = [costs.sizes(slot) for slot in slots]
        self._mergeable = [costs.can_merge(slot) for slot in slots]

    def measure(self, name: str, trace: Sequence[TracedRequest], **options: Any) -> Replay:
        """Replay a trace in real time with a policy, or with a system's policy and operator."""
        used = self.options_of(name, **options)
        if name not in OPERATORS:
            return self._measure(make_policy(used, self.engine.costs), trace)
        # The cost model of our operator must not learn from the times of another operator.
        costs = fork(self.engine.costs)
        with use_operator(OPERATORS[name]), patch.object(self.engine, "costs", costs):
            return self._measure(make_policy(used, costs), trace)

    def _measure(self, policy: Policy, trace: Sequence[TracedRequest]) -> Replay:
        engine, names = self.engine, self._names
        engine.scheduler.policy = policy
        engine.switcher.switch(BASE)
        requests = [
            DriverRequest(
                prompt(traced.prompt - 1, next(self._numbers), self.checkpoint.sizes),
                names[traced.adapter % len(names)],
                traced.output,
                at=traced.at,
                limit=traced.limit,
                deadline=traced.deadline,
            )
            for traced in trace
        ]
        before = engine.stats()
        with noted_paces(engine.costs) as paces:
            outcome = self._driver.run(requests)
        assert not outcome.failed
        after = engine.stats()
        errors = list(engine.costs.corrections.errors)[before.steps - after.steps :]
        return Replay(
            outcome,
            after.switches - before.switches,
            after.merges - before.merges,
            after.switch_seconds - before.switch_seconds,
            _growth(before.mode_seconds, after.mode_seconds),
            _growth(before.mode_steps, after.mode_steps),
            errors,
            math.exp(fmean(paces or [0.0])),
        )

    def simulate(
        self, name: str, trace: Sequence[TracedRequest], pace: float = 1.0, **options: Any
    ) -> Replay:
        """Replay a trace in simulated time, on a machine of this pace (see `Replay`)."""
        sizes, mergeable = self._sizes.__getitem__, self._mergeable.__getitem__
        costs = replace(fork(self.engine.costs), sizes=sizes, can_merge=mergeable)
        costs.corrections.pace.log = math.log(pace)
        return Simulation(trace, self.options_of(name, **options), costs).run()

    def options_of(self, name: str, **options: Any) -> Options:
        """Return the engine's options with the policy of a system or of this name, and others."""
        return replace(self.options, policy=POLICY_OF_SYSTEM.get(name, name), **options)


def _growth(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value - before.get(key, 0) for key, value in after.items()}
