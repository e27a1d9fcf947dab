"""A trace through the engine in real time, and through the scheduler alone in simulated time.

Both run the same scheduler under the same policy; simulated, a step takes what the cost model
predicts, and nothing is computed.
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
from benchmarks.policies.traces import Asked
from vlora.engine.cost import CostModel
from vlora.engine.engine import Engine
from vlora.engine.policies.base import Policy
from vlora.engine.scheduler import Budgets, Scheduler
from vlora.engine.sequence import Sequence as EngineSequence
from vlora.ids import BASE
from vlora.memory.block_table import BlockTable
from vlora.memory.pool import PagePool
from vlora.model.inputs import Prompt
from vlora.request import Request
from vlora.sampling import SamplingParams

_numbers = itertools.count()


@dataclass
class Replay:
    """Seconds from the trace's start: when each request came, first answered, ended; by request.
    tokens: of all answers. modes: seconds of steps by mode. errors: of predicted steps.
    adapter_share: simulated: what adapters take of all steps."""

    came: dict[str, float] = field(default_factory=dict)
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
        """Average token latency (§6.1): all end-to-end times over all tokens."""
        return sum(self.end[i] - self.came[i] for i in self.end) / self.tokens

    def as_row(self) -> dict[str, Any]:
        whole = [self.end[i] - self.came[i] for i in self.end]
        begun = [self.first[i] - self.came[i] for i in self.first]
        p50, p95, p99 = (float(np.percentile(whole, q)) for q in (50, 95, 99))
        span = max(self.end.values()) - min(self.came.values())
        return {
            "token_latency_ms": round(self.token_latency * 1e3, 3),
            "p50_s": round(p50, 4),
            "p95_s": round(p95, 4),
            "p99_s": round(p99, 4),
            "first_token_s": round(fmean(begun), 4),
            "requests_per_s": round(len(whole) / span, 4),
            "tokens_per_s": round(self.tokens / span, 2),
            "steps": self.steps,
            "switches": self.switches,
            "merges": self.merges,
            "switch_s": round(self.switch_seconds, 4),
            "mode_s": {mode: round(seconds, 3) for mode, seconds in sorted(self.modes.items())},
            "prediction_error": round(median(self.errors), 4) if self.errors else None,
        }


def measured(
    engine: Engine, checkpoint: Checkpoint, trace: Sequence[Asked], policy: Policy
) -> Replay:
    """In real time, one thread; prompts are read before the clock starts. While nobody is there the
    clock goes straight to the next request: nothing would happen meanwhile."""
    names, sizes = checkpoint.adapter_names, checkpoint.sizes
    due = []
    for asked in trace:
        number = next(_numbers)
        params = SamplingParams(temperature=0.0, max_tokens=asked.limit, ignore_eos=True)
        text = prompt(asked.prompt - 1, number, sizes)
        adapter = names[asked.adapter % len(names)]
        state = engine.prepare(Request(f"replay-{number}", text, params, adapter=adapter))
        # Its end of text comes here, which only the model would know.
        state.sequence.max_tokens = asked.output
        due.append((asked.at, state))
    engine.scheduler.policy = policy
    engine.switcher.switch(BASE)
    before = engine.stats()
    found = Replay()
    start = time.monotonic()
    at = 0
    while at < len(due) or not engine.idle:
        now = time.monotonic() - start
        while at < len(due) and due[at][0] <= now:
            came, state = due[at]
            found.came[state.sequence.id] = came
            engine.add(state, start + came)
            at += 1
        if engine.idle:
            start -= max(0.0, due[at][0] - now)
            continue
        outputs = engine.step()
        now = time.monotonic() - start
        for output in outputs:
            assert output.error is None, output.error
            found.first.setdefault(output.request_id, now)
            found.tokens += len(output.token_ids)
            if output.finished:
                found.end[output.request_id] = now
    after = engine.stats()
    found.steps = after.steps - before.steps
    found.switches = after.switches - before.switches
    found.merges = after.merges - before.merges
    found.switch_seconds = after.switch_seconds - before.switch_seconds
    found.modes = {
        mode: seconds - before.mode_seconds.get(mode, 0.0)
        for mode, seconds in after.mode_seconds.items()
    }
    found.errors = list(engine.costs.corrections.errors)[-found.steps :]
    return found


def simulated(
    trace: Sequence[Asked],
    budgets: Budgets,
    pages: int,
    block: int,
    costs: CostModel,
    policy: Callable[[CostModel], Policy],
) -> Replay:
    """In the time of the cost model."""
    held = [BASE]
    mine = replace(costs, merged_slot=lambda: held[0])
    plain = without_adapters(mine)
    pool = PagePool(pages)
    scheduler = Scheduler(budgets, policy(mine))
    found = Replay()
    live, now, at = BASE, 0.0, 0
    adapters = 0.0
    outputs: dict[str, int] = {}
    while at < len(trace) or not scheduler.idle:
        while at < len(trace) and trace[at].at <= now:
            sequence = _sequence(f"s{at}", trace[at], BlockTable(pool, block))
            outputs[sequence.id] = trace[at].output
            found.came[sequence.id] = trace[at].at
            scheduler.add(sequence)
            at += 1
        if scheduler.idle:
            now = trace[at].at
            continue
        plan = scheduler.schedule(now, live)
        assert plan.chunks, "there is work, and nothing is done"
        if plan.live != live:
            found.switches += 1
            found.merges += plan.live not in (BASE, held[0])
            found.switch_seconds += mine.switch(live, plan.live)
            now += mine.switch(live, plan.live)
            live = plan.live
            held[0] = held[0] if live == BASE else live
        seconds = mine.predict(plan.parts, live)
        now += seconds
        adapters += seconds - plain.predict(plan.parts, live)
        found.steps += 1
        mode = plan.mode.value
        found.modes[mode] = found.modes.get(mode, 0.0) + seconds
        by_id = {s.id: s for s in scheduler.running}
        for chunk in plan.chunks:
            sequence = by_id[chunk.sequence_id]
            sequence.computed += chunk.length
            if not chunk.completes:
                continue
            sequence.tokens.append(0)
            found.tokens += 1
            found.first.setdefault(sequence.id, now)
            if sequence.output_length == outputs[sequence.id]:
                found.end[sequence.id] = now
                scheduler.remove(sequence)
    found.adapter_share = adapters / sum(found.modes.values())
    return found


def _sequence(name: str, asked: Asked, table: BlockTable) -> EngineSequence:
    params = SamplingParams(max_tokens=asked.limit)
    sequence = EngineSequence(
        Request(name, "", params),
        Prompt.of_text([0] * asked.prompt),
        resident_adapter(asked.adapter),
        asked.limit,
        table,
    )
    sequence.arrival = asked.at
    return sequence
