"""Replays of the traces of `vlora.load.trace` with any policy.

A trace is replayed by the engine in real time, or by the scheduler in simulated time. Both use the
same scheduler and policy. In the simulation nothing is computed, and a step takes the time that the
cost model predicts.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

from benchmarks.driver import Driver, DriverRequest, Outcome
from benchmarks.llava import Checkpoint, prompt
from benchmarks.models import ENGINE_NAMES
from benchmarks.published_operators import OPERATORS, POLICY_OF_SYSTEM, use_operator
from vlora.adapters.files import AdapterDescription, AdapterInfo
from vlora.adapters.handle import AdapterHandle, AdapterState
from vlora.config import Options
from vlora.engine.cost import CostModel
from vlora.engine.engine import Engine
from vlora.engine.plan import StepPlan
from vlora.engine.policies.base import Policy
from vlora.engine.policies.registry import make_policy
from vlora.engine.scheduler import Budgets, Scheduler
from vlora.engine.sequence import Sequence as EngineSequence
from vlora.ids import BASE
from vlora.load.trace import TracedRequest
from vlora.memory.kv_cache import BlockTable
from vlora.memory.pool import PagePool
from vlora.model.inputs import text_prompt
from vlora.request import Request
from vlora.sampling import SamplingParams


@dataclass
class Replay:
    """Times and counts of one replay, in seconds.

    outcome: times of the requests, from their arrival.
    modes: total duration of the steps, by mode.
    errors: relative error of each step's predicted time; empty for a simulation.
    adapter_share: share of the steps' total time that adapters cost; None for a measured replay.
    """

    outcome: Outcome = field(default_factory=Outcome)
    switches: int = 0
    merges: int = 0
    modes: dict[str, float] = field(default_factory=dict)
    errors: Sequence[float] = ()
    adapter_share: float | None = None

    @property
    def token_latency(self) -> float:
        """Average token latency (§6.1): the sum of all end-to-end times divided by all tokens."""
        return self.outcome.token_latency

    def as_row(self) -> dict[str, Any]:
        return {
            "token_latency_ms": self.token_latency * 1e3,
            "first_token_s": fmean(self.outcome.first),
            "requests_per_s": len(self.outcome.end) / self.outcome.span,
            "switches": self.switches,
            "merges": self.merges,
            "mode_s": self.modes,
            "prediction_error": median(self.errors) if self.errors else None,
        }


class Simulation:
    """Run of a trace in the time that the cost model predicts.

    pages, block: number of KV pages, and number of tokens per page.
    policy: returns the policy for the simulation's cost model.
    """

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
        self._replay.outcome.span = self._now - self._trace[0].at
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
        self._scheduler.add(sequence)

    def _switch(self, live: int) -> None:
        seconds = self._costs.switch(self._live, live)
        self._replay.switches += 1
        self._replay.merges += live not in (BASE, self._merged)
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
    """A calibrated engine that replays traces with any policy."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        self.checkpoint = checkpoint
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

    def measure(self, name: str, trace: Sequence[TracedRequest]) -> Replay:
        """Replay a trace in real time with a policy, or with a system's policy and operator."""
        if name not in OPERATORS:
            return self._measure(self._policy(name), trace)
        # The cost model of our operator must not learn from the times of another operator.
        costs = fork(self.engine.costs)
        with use_operator(OPERATORS[name]), patch.object(self.engine, "costs", costs):
            return self._measure(self._policy(name, costs), trace)

    def _measure(self, policy: Policy, trace: Sequence[TracedRequest]) -> Replay:
        engine, names = self.engine, self.checkpoint.adapter_names
        engine.scheduler.policy = policy
        engine.switcher.switch(BASE)
        requests = [
            DriverRequest(
                prompt(traced.prompt - 1, next(self._numbers), self.checkpoint.sizes),
                names[traced.adapter % len(names)],
                traced.output,
                at=traced.at,
                limit=traced.limit,
            )
            for traced in trace
        ]
        before = engine.stats()
        outcome = self._driver.run(requests)
        assert not outcome.failed
        after = engine.stats()
        modes = {
            mode: seconds - before.mode_seconds.get(mode, 0.0)
            for mode, seconds in after.mode_seconds.items()
        }
        errors = list(engine.costs.corrections.errors)[before.steps - after.steps :]
        switches, merges = after.switches - before.switches, after.merges - before.merges
        return Replay(outcome, switches, merges, modes, errors)

    def simulate(
        self, name: str, trace: Sequence[TracedRequest], *, free_adapters: bool = False
    ) -> Replay:
        """Replay a trace in simulated time.

        free_adapters: whether adapters cost nothing. The result then bounds the gain of any choice
            of modes.
        """
        options = self.options
        costs = replace(
            self.engine.costs,
            sizes=self._sizes.__getitem__,
            can_merge=self._mergeable.__getitem__,
        )
        if free_adapters:
            costs = without_adapters(costs)
        count = len(self.checkpoint.adapter_names)
        trace = [replace(traced, adapter=traced.adapter % count) for traced in trace]
        return Simulation(
            trace,
            Budgets(options.max_num_seqs, options.max_num_batched_tokens),
            options.kv_cache_tokens // options.block_size,
            options.block_size,
            costs,
            lambda simulated_costs: self._policy(name, simulated_costs),
        ).run()

    def _policy(self, name: str, costs: CostModel | None = None) -> Policy:
        policy = POLICY_OF_SYSTEM.get(name, name)
        return make_policy(replace(self.options, policy=policy), costs or self.engine.costs)
