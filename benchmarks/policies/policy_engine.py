"""The engine that runs all replays of a benchmark run, and simulations with its cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from benchmarks.dtypes import ENGINE_NAMES
from benchmarks.llava import Checkpoint
from benchmarks.policies.published_operators import OPERATORS, POLICY_OF_SYSTEM, use_operator
from benchmarks.policies.replay import Replay, replay_measured, replay_simulated
from benchmarks.policies.simulation import fork, without_adapters
from benchmarks.policies.traces import TracedRequest
from vlora.config import Options
from vlora.engine.cost import CostModel
from vlora.engine.engine import Engine
from vlora.engine.policies.base import Policy
from vlora.engine.policies.registry import make_policy
from vlora.engine.scheduler import Budgets


class PolicyEngine:
    """A calibrated engine that replays traces with any policy."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, **options: Any) -> None:
        self.checkpoint = checkpoint
        self.options = Options(
            model=checkpoint.folder,
            adapters=checkpoint.adapters,
            dtype=ENGINE_NAMES[dtype],
            **options,
        )
        self.engine = Engine(self.options)
        self.engine.calibrate(force=True)
        # At this point, the slot of each adapter is its index. Replays may change the slots.
        slots, costs = range(len(checkpoint.adapter_names)), self.engine.costs
        self._sizes = [costs.sizes(slot) for slot in slots]
        self._mergeable = [costs.can_merge(slot) for slot in slots]

    def measure(self, name: str, trace: Sequence[TracedRequest]) -> Replay:
        """Replay a trace in real time with a policy, or with a system's policy and operator."""
        if name not in OPERATORS:
            return replay_measured(self.engine, self.checkpoint, trace, self._policy(name))
        # The cost model of our operator must not learn from the times of another operator.
        costs = fork(self.engine.costs)
        with use_operator(OPERATORS[name]), patch.object(self.engine, "costs", costs):
            policy = self._policy(name, costs)
            return replay_measured(self.engine, self.checkpoint, trace, policy)

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
        if count:
            trace = [replace(traced, adapter=traced.adapter % count) for traced in trace]
        return replay_simulated(
            trace,
            Budgets(options.max_num_seqs, options.max_num_batched_tokens),
            options.kv_cache_tokens // options.block_size,
            options.block_size,
            costs,
            lambda simulated_costs: self._policy(name, simulated_costs),
        )

    def _policy(self, name: str, costs: CostModel | None = None) -> Policy:
        policy = POLICY_OF_SYSTEM.get(name, name)
        return make_policy(replace(self.options, policy=policy), costs or self.engine.costs)
