"""Steps that repeat recorded kernel calls give the logits of steps that make each call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.modes import drive
from tests.support.questions import Case
from tests.support.schedules import Arrival, Schedule, run
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.ids import BASE
from vlora.model import step_recordings

STEPS_PER_ADAPTER = 5
"""Number of steps for which an adapter stays live."""


def logits_of_steps(options: Options, cases: list[Case]) -> tuple[list[torch.Tensor], int]:
    """Compute all cases with a new engine whose live adapter changes every STEPS_PER_ADAPTER steps.

    The cases arrive one after another, so the numbers of rows vary. Return the logits of each step,
    and the number of steps that repeated a recording.
    """
    engine = Engine(options)
    slots = [BASE]
    if options.quantization is None:
        slots += [engine.adapters.slot(name) for name in engine.adapters.names()[:2]]
    drive(engine, lambda step: slots[step // STEPS_PER_ADAPTER % len(slots)])
    runner = engine._runner
    forward: Callable[..., Any] = runner.forward
    logits: list[torch.Tensor] = []

    def recording_forward(*arguments: Any) -> Any:
        result = forward(*arguments)
        logits.append(result.logits.clone())
        return result

    runner.forward = recording_forward  # type: ignore[method-assign]
    arrivals = tuple(Arrival(index, 2 * index, None) for index in range(len(cases)))
    run(engine, Schedule(arrivals, sequences=64, rows=200, block_size=16, slack=0), cases)
    return logits, runner._decoder.recordings.repeated


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"merging": "in_place"},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_repeated_steps_give_the_same_logits(
    options: dict[str, Any], cases: list[Case], checkpoint: Path, parity_adapters: Path
) -> None:
    def compute(context: AbstractContextManager[None]) -> tuple[list[torch.Tensor], int]:
        with context:
            return logits_of_steps(
                Options(model=checkpoint, adapters=parity_adapters, **options), cases
            )

    each_call, none = compute(step_recordings.disabled())
    repeated, count = compute(nullcontext())
    assert none == 0
    assert count >= 10
    assert len(repeated) == len(each_call)
    assert all(map(torch.equal, repeated, each_call))
