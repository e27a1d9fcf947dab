"""Steps that repeat recorded kernel calls give the logits of steps that make each call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.modes import drive
from tests.support.questions import Case
from tests.support.schedules import Arrival, Schedule, run
from vlora import backends, native
from vlora.atmm import tiles
from vlora.atmm.types import Segments
from vlora.backends import Backend
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.ids import BASE
from vlora.model import step_recordings
from vlora.model.attention import AttentionPlan
from vlora.model.chunk import Chunk
from vlora.model.inputs import text_prompt

STEPS_PER_ADAPTER = 5
"""Number of steps for which an adapter stays live."""


def logits_of_steps(
    options: Options,
    cases: list[Case],
    before_step: Callable[[int], None] = lambda step: None,
) -> tuple[list[torch.Tensor], int]:
    """Compute all cases with a new engine whose live adapter changes every STEPS_PER_ADAPTER steps.

    The cases arrive one after another, so the numbers of rows vary. `before_step` is called with
    the number of each step. Return the logits of each step, and the number of steps that repeated a
    recording.
    """
    engine = Engine(options)
    slots = [BASE]
    if options.quantization is None:
        slots += [engine.adapters.slot(name) for name in engine.adapters.names()[:2]]

    def live(step: int) -> int:
        before_step(step)
        slot = slots[step // STEPS_PER_ADAPTER % len(slots)]
        return slot if slot in engine.adapters.resident else BASE

    drive(engine, live)
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


def check_repetitions(compute: Callable[[], tuple[list[torch.Tensor], int]]) -> None:
    """Check that steps which repeat recordings give the logits of steps that make each call."""
    with step_recordings.disabled():
        each_call, none = compute()
    repeated, count = compute()
    assert none == 0
    assert count >= 10
    assert len(repeated) == len(each_call)
    assert all(map(torch.equal, repeated, each_call))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"merging": "in_place"},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int8-dynamic"},
        {"quantization": "int4-dynamic"},
        {"quantization": "int4", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_repeated_steps_give_the_same_logits(
    options: dict[str, Any], cases: list[Case], checkpoint: Path, parity_adapters: Path
) -> None:
    chosen = Options(model=checkpoint, adapters=parity_adapters, **options)
    check_repetitions(lambda: logits_of_steps(chosen, cases))


def test_repeated_steps_follow_changes_between_steps(
    cases: list[Case],
    checkpoint: Path,
    parity_adapters: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of threads and the instruction set change every few steps, the rotary table grows
    in the middle of an answer, and the adapters evict each other from a small pool.
    """
    monkeypatch.setattr("vlora.model.rotary.INITIAL_POSITIONS", 16)
    adapters = Engine(Options(model=checkpoint, adapters=parity_adapters)).adapters
    largest = max(adapters.tiers.packed_bytes(adapters.handle(name)) for name in adapters.names())
    options = Options(
        model=checkpoint,
        adapters=parity_adapters,
        block_size=4,
        kv_cache_tokens=512,
        adapter_pool_bytes=largest,
    )
    isas, runtime = tiles.isas(), native.kernels().runtime

    def change(step: int) -> None:
        torch.set_num_threads(1 + step // 2 % 2)
        runtime.request_isa(isas[step // 3 % len(isas)])

    def compute() -> tuple[list[torch.Tensor], int]:
        threads, isa = torch.get_num_threads(), runtime.requested_isa()
        try:
            return logits_of_steps(options, cases, change)
        finally:
            torch.set_num_threads(threads)
            runtime.request_isa(isa)

    check_repetitions(compute)


class OneStep:
    """A decoder without an engine, whose caller provides the residual stream of each step.

    Each row is the first token of a sequence of its own.
    """

    def __init__(self, engine: Engine, rows: int) -> None:
        self.decoder = engine._runner._decoder
        self.hidden = torch.randn(rows, self.decoder._config.hidden)
        self._input = self.hidden.clone()
        self._cache = engine._runner._kv_cache

    def compute(self, planned_rows: int | None = None, backend: Backend | None = None) -> Any:
        """Return the result of a step, with a plan of `planned_rows` rows instead of all."""
        rows = len(self.hidden) if planned_rows is None else planned_rows
        chunks = [
            Chunk(str(row), BASE, row, 0, (0,), text_prompt((0,)), (row,), True)
            for row in range(rows)
        ]
        heads = self.decoder._config.heads
        plan = AttentionPlan(chunks, self._cache, heads, backend=backend)
        self.hidden.copy_(self._input)
        return self.decoder.forward(self.hidden, plan, Segments(), None, Segments())


def test_the_key_contains_the_addresses_that_the_calls_use(checkpoint: Path) -> None:
    """The first step allocates the workspace."""
    step = OneStep(Engine(Options(model=checkpoint)), rows=3)
    assert torch.equal(step.compute(), step.compute())
    assert step.decoder.recordings.repeated == 1


def test_a_plan_with_another_number_of_rows_is_refused(checkpoint: Path) -> None:
    step = OneStep(Engine(Options(model=checkpoint)), rows=3)
    for _ in range(3):
        step.compute()
    with pytest.raises(ValueError, match="qkv"):
        step.compute(planned_rows=2)


def test_a_step_of_the_reference_is_not_recorded(checkpoint: Path) -> None:
    """A repetition would contain only the calls of the compiled attention."""
    step = OneStep(Engine(Options(model=checkpoint)), rows=3)
    with backends.override("kernels", "reference"):
        expected = step.compute(backend="cpu")
        for _ in range(2):
            assert torch.equal(step.compute(backend="cpu"), expected)
    assert step.decoder.recordings.repeated == 0
