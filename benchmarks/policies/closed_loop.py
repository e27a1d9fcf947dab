"""A closed loop on the demo checkpoint: each finished request is replaced by a new one.

All but the first requests generate the same number of tokens. They rotate over the base model and
some adapters. The number of concurrent requests is constant, so their latency is this number
divided by the throughput; only the throughput is measured. Here a policy gains nothing from the
order of requests. The steps are short, which makes the overhead of a policy visible.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.driver import WORDS
from vlora.atmm.search.timing import rotated
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.policies.registry import make_policy
from vlora.engine.requests import RequestState
from vlora.ids import BASE
from vlora.request import Request
from vlora.sampling import SamplingParams


class ClosedLoop:
    """An engine with a constant number of concurrent requests.

    The grid's entry holds `count` (number of requests), `tokens` (tokens per request), `at_once`
    (number of concurrent requests) and `adapters` (number of adapters, without the base model).
    """

    def __init__(self, demo: Path, grid: Mapping[str, Any]) -> None:
        """Load the engine.

        demo: folder of a checkpoint and its adapters.
        """
        self._grid = grid
        self._options = Options(
            model=demo / "checkpoint", adapters=demo / "adapters", enable_prefix_caching=False
        )
        self._engine = Engine(self._options)
        self._engine.calibrate(force=True)
        self._names = [None, *sorted(self._engine.adapters.names())[: grid["adapters"]]]
        self._numbers = itertools.count()

    def rows(self, policies: Sequence[str], rounds: int) -> list[dict[str, Any]]:
        """Run all policies once per round after a warm-up, in an order that rotates; return the
        rows.
        """
        for policy in policies:
            self._run(policy, self._grid["at_once"])
        return [
            {"policy": policy, "round": number, **self._run(policy, self._grid["count"])}
            for number in range(rounds)
            for policy in rotated(policies, number)
        ]

    def _run(self, policy: str, count: int) -> dict[str, Any]:
        engine, concurrent = self._engine, self._grid["at_once"]
        states = self._prepare(count)
        engine.scheduler.policy = make_policy(replace(self._options, policy=policy), engine.costs)
        engine.switcher.switch(BASE)
        before = engine.stats()
        added = running = 0
        started = time.monotonic()
        while added < count or running:
            while added < count and running < concurrent:
                engine.add(states[added], time.monotonic())
                added, running = added + 1, running + 1
            for output in engine.step():
                assert output.error is None, output.error
                running -= output.finished
        seconds = time.monotonic() - started
        after = engine.stats()
        steps = after.steps - before.steps
        measured = after.step_seconds - before.step_seconds
        predicted = after.predicted_seconds - before.predicted_seconds
        return {
            "requests_per_s": round(count / seconds, 2),
            "rows_per_step": round((after.rows - before.rows) / steps, 2),
            "step_ms": round(seconds / steps * 1e3, 3),
            "merges": after.merges - before.merges,
            "predicted_over_taken": round(predicted / measured, 3),
        }

    def _prepare(self, count: int) -> list[RequestState]:
        tokens, concurrent = self._grid["tokens"], self._grid["at_once"]
        states = []
        for i in range(count):
            # The first requests differ in length, so that requests do not all end together.
            length = 1 + tokens * i // concurrent if i < concurrent else tokens
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            request_id, adapter = f"closed-{next(self._numbers)}", self._names[i % len(self._names)]
            request = Request(request_id, " ".join(WORDS), params, adapter=adapter)
            states.append(self._engine.prepare(request))
        return states


def throughput_ratio(rows: Sequence[Mapping[str, Any]], policy: str, baseline: str) -> float | None:
    """Return the median over rounds of a policy's throughput divided by the baseline's."""
    rates = {(row["policy"], row["round"]): row["requests_per_s"] for row in rows if "round" in row}
    ratios = [
        rate / rates[baseline, number]
        for (name, number), rate in rates.items()
        if name == policy and (baseline, number) in rates
    ]
    return round(median(ratios), 3) if ratios else None
