"""Tests of the recordings of steps: which calls are recorded, and when they are repeated."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from vlora import native
from vlora.atmm import op
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import LoraPair, Segment, Segments
from vlora.kernels import ops
from vlora.kernels.formats import Format
from vlora.kernels.quantize import quantize
from vlora.kernels.quantized import QuantizedMatrix, allocate
from vlora.model.attention import AttentionPlan
from vlora.model.rotary import Rotary
from vlora.model.step_recordings import MAX_RECORDINGS, RecordingKey, StepRecordings
from vlora.model.switcher import Active


class Steps:
    """The recordings, and a product in place of the layers of a step."""

    def __init__(self, matrix: ops.Matrix) -> None:
        self.recordings = StepRecordings()
        self.plan = Mock(AttentionPlan)
        self.computed = 0
        self.out: torch.Tensor | None = torch.empty(2, matrix.shape[0])
        self._matrix = matrix
        self._x = torch.randn(2, matrix.shape[1])
        self._active = Active(-1, ())

    def run(self, key: int = 0) -> None:
        key_of_step = RecordingKey(2, key, (), ())
        rotary, segments = cast(Rotary, None), Segments()
        self.recordings.run(key_of_step, self._active, self.plan, rotary, segments, self._compute)

    def _compute(self) -> None:
        self.computed += 1
        self._matrix(self._x, out=self.out)


def float_matrix() -> ops.Matrix:
    return ops.Matrix(torch.randn(32, 64))


def quantized_matrix(order: torch.Tensor | None = None) -> ops.Matrix:
    weight = allocate(Format(8, None), 32, 64, torch.float32)
    quantize(torch.randn(32, 64), weight)
    return QuantizedMatrix(replace(weight, order=order))


@pytest.mark.parametrize("make", [float_matrix, quantized_matrix])
def test_a_step_is_recorded_once_and_then_repeated(make: Any) -> None:
    steps = Steps(make())
    for _ in range(3):
        steps.run()
    assert steps.computed == 1
    assert steps.recordings.repeated == steps.plan.repeat.call_count == 2
    assert len(steps.plan.repeat.call_args.args[0]) == 1
    steps.run(key=1)
    assert steps.computed == 2


def test_a_step_with_memory_of_its_own_is_computed_each_time() -> None:
    """The result of a product without `out`, or the permuted rows of a product with an order, are
    freed after the step."""
    allocating = Steps(float_matrix())
    allocating.out = None
    permuting = Steps(quantized_matrix(torch.randperm(64)))
    for steps in (allocating, permuting):
        for _ in range(3):
            steps.run()
        assert steps.computed == 3
        assert steps.recordings.repeated == 0


def test_a_step_that_fails_is_recorded_again() -> None:
    steps = Steps(float_matrix())
    out, steps.out = steps.out, torch.empty(2, 3)
    with pytest.raises(ValueError, match="out"):
        steps.run()
    steps.out = out
    for _ in range(2):
        steps.run()
    assert (steps.computed, steps.recordings.repeated) == (2, 1)


def test_a_repetition_that_fails_does_not_affect_the_calls_after_it() -> None:
    """The caller's floating-point mode is restored, and the recording can be repeated again."""
    group = LoraGroup.of(64, [LoraPair(torch.randn(4, 64), torch.randn(32, 4))])
    x, y = torch.randn(2, 64), torch.zeros(2, 32)
    core = native.kernels()
    plan = core.attention.Plan("fp32", 16, 1, 1, 16, 0, 1, [], [], 1, False)
    recording = core.steps.Recording()
    recording.begin()
    op.apply(y, x, Segments([Segment(0, 2, 0)]), group, backend="cpu")
    recording.end()
    added = y.clone()
    with pytest.raises(ValueError, match="slot 1 is not one of the 1 adapters"):
        recording.repeat(plan, 0, 0, Segments([Segment(0, 2, 1)]).native, 1)
    assert torch.equal(y, added)
    subnormal = torch.full((1,), 1e-40)
    assert (subnormal * 1.0).item() > 0
    recording.repeat(plan, 0, 0, Segments([Segment(0, 2, 0, -1)]).native, 1)
    torch.testing.assert_close(y, torch.zeros_like(y), rtol=0, atol=1e-5)


def test_the_least_recently_used_recording_is_discarded() -> None:
    steps = Steps(float_matrix())
    for key in range(MAX_RECORDINGS + 1):
        steps.run(key)
        steps.run(0)
    steps.run(1)
    assert steps.computed == MAX_RECORDINGS + 2


def test_calls_of_other_threads_are_not_recorded() -> None:
    matrix, x, out = float_matrix(), torch.randn(2, 64), torch.empty(2, 32)
    recording = native.kernels().steps.Recording()
    recording.begin()
    other = threading.Thread(target=matrix, args=(x,), kwargs={"out": out})
    other.start()
    other.join()
    with pytest.raises(RuntimeError, match="records another step already"):
        native.kernels().steps.Recording().begin()
    recording.end()
    assert recording.complete
    assert len(recording) == 0
