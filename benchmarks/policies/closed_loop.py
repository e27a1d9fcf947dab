"""Requests that come as others end, on the demo checkpoint: a policy has nothing to win there by
order, and loses whatever its steps cost more.

All but the first ask for the same number of tokens, the base and some adapters in turn. So many are
always there that latency is their number over the throughput, which is all that is measured. Steps
are short: what a policy takes to choose is a part of them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.adapters.measurement import WORDS
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.policies.registry import make_policy
from vlora.ids import BASE
from vlora.request import Request
from vlora.sampling import SamplingParams


class ClosedLoop:
    """given: `count` requests of `tokens` tokens, `at_once` of them at a time; `adapters` beside
    the base."""

    def __init__(self, demo: Path, given: Mapping[str, Any]) -> None:
        """demo: the folder of a checkpoint and its adapters."""
        self._given = given
        self._options = Options(
            model=demo / "checkpoint", adapters=demo / "adapters", enable_prefix_caching=False
        )
        self._engine = Engine(self._options)
        self._engine.calibrate(force=True)
        self._names = [None, *sorted(self._engine.adapters.names())[: given["adapters"]]]
        self._numbers = itertools.count()

    def rows(self, policies: Sequence[str], rounds: int) -> list[dict[str, Any]]:
        """All policies once a round, another one first each time; before that all warm up."""
        for policy in policies:
            self._once(policy, self._given["at_once"])
        found = []
        for number in range(rounds):
            turn = number % len(policies)
            for policy in (*policies[turn:], *policies[:turn]):
                figures = self._once(policy, self._given["count"])
                found.append({"policy": policy, "round": number, **figures})
        return found

    def _once(self, policy: str, count: int) -> dict[str, Any]:
        engine, names = self._engine, self._names
        tokens, at_once = self._given["tokens"], self._given["at_once"]
        asked = []
        for i in range(count):
            # The first ones end one after the other, or all would go in step for ever.
            said = 1 + tokens * i // at_once if i < at_once else tokens
            params = SamplingParams(temperature=0.0, max_tokens=said, ignore_eos=True)
            name, adapter = f"closed-{next(self._numbers)}", names[i % len(names)]
            asked.append(engine.prepare(Request(name, " ".join(WORDS), params, adapter=adapter)))
        engine.scheduler.policy = make_policy(replace(self._options, policy=policy), engine.costs)
        engine.switcher.switch(BASE)
        before = engine.stats()
        at = there = 0
        began = time.monotonic()
        while at < count or there:
            while at < count and there < at_once:
                engine.add(asked[at], time.monotonic())
                at, there = at + 1, there + 1
            for output in engine.step():
                assert output.error is None, output.error
                there -= output.finished
        seconds = time.monotonic() - began
        after = engine.stats()
        steps, told = after.steps - before.steps, after.step_seconds - before.step_seconds
        return {
            "requests_per_s": round(count / seconds, 2),
            "rows_per_step": round((after.rows - before.rows) / steps, 2),
            "step_ms": round(seconds / steps * 1e3, 3),
            "merges": after.merges - before.merges,
            "predicted_over_taken": round(
                (after.predicted_seconds - before.predicted_seconds) / told, 3
            ),
        }


def ratio(rows: Sequence[Mapping[str, Any]], policy: str, plain: str) -> float | None:
    """Median over rounds of a policy's throughput over that of `plain` in the same round."""
    rates = {(row["policy"], row["round"]): row["requests_per_s"] for row in rows if "round" in row}
    found = [
        rate / rates[plain, number]
        for (name, number), rate in rates.items()
        if name == policy and (plain, number) in rates
    ]
    return round(median(found), 3) if found else None
