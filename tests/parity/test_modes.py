"""Parity of the engine with the oracle in every mode, and the modes that are reported.

The schedules of test_schedules.py contain random sequences of modes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.modes import drive
from tests.support.questions import Case
from tests.support.schedules import Arrival, Schedule, Tally, check, run
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.plan import Mode
from vlora.ids import BASE


def all_at_once(cases: list[Case], rows: int) -> Schedule:
    arrivals = tuple(Arrival(index, 0, None) for index in range(len(cases)))
    return Schedule(arrivals, sequences=64, rows=rows, block_size=16, slack=0)


@pytest.mark.parametrize("merging", ["out_of_place", "in_place"])
def test_tokens_and_scores_are_the_oracles_whichever_adapter_is_live(
    cases: list[Case], checkpoint: Path, parity_adapters: Path, tally: Tally, merging: str
) -> None:
    """The live adapter changes in each step, so a request's keys and values mix all of them."""
    engine = Engine(
        Options(
            model=checkpoint,
            adapters=parity_adapters,
            max_num_batched_tokens=200,
            merging=merging,
        )
    )
    slots = [BASE, *(engine.adapters.slot(name) for name in engine.adapters.names())]
    plans = drive(engine, lambda step: slots[step % len(slots)])
    outputs = run(engine, all_at_once(cases, 200), cases)
    for index, case in enumerate(cases):
        check(case, Arrival(index, 0, None), outputs[f"r{index}"], tally)
    modes = Counter(plan.mode for plan in plans if plan.chunks)
    assert modes[Mode.MIXTURE] > modes[Mode.UNMERGED] > 0
    stats = engine.stats()
    assert stats.mode_steps == {mode.value: count for mode, count in modes.items()}
    assert stats.switches == len(plans) - 1
    for request_outputs in outputs.values():
        assert sum(request_outputs[-1].modes.values()) >= len(request_outputs)
