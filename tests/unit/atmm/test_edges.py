"""Tests of invalid arguments of the operator, and of groups that change while calls run."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from benchmarks.step import LORA, PRODUCTS, timed_parts
from tests.support.atmm_problems import (
    FP32,
    check,
    compiled,
    counters,
    expected,
    group_of,
    pinned,
    reset_counters,
)
from vlora import native
from vlora.atmm import op, tiles
from vlora.atmm.groups import HeadGroup, LoraGroup, factors
from vlora.atmm.types import HeadMatrix, LoraPair, MergeUpdate, Segment
from vlora.backends import Backend
from vlora.kernels import ops

pytestmark = compiled


def test_tensors_on_another_device_are_rejected() -> None:
    group, segments = group_of(16, [8], [4]), [Segment(0, 4, 0)]
    y, x = torch.zeros(4, 8), torch.randn(4, 16)
    pair = LoraPair(torch.randn(4, 16, device="meta"), torch.randn(8, 4, device="meta"))
    elsewhere = LoraGroup(16, [8])
    elsewhere.append([pair])
    heads = HeadGroup(16)
    heads.append(HeadMatrix(torch.randn(3, 16), torch.randn(3)))
    slab = torch.zeros(128)
    for call in (
        lambda: op.apply(y, x.to("meta"), segments, group, backend="cpu"),
        lambda: op.apply(y.to("meta"), x, segments, group),
        lambda: group.append([pair]),
        lambda: op.apply(y, x, segments, elsewhere, backend="cpu"),
        lambda: op.merge(slab, slab, [MergeUpdate(0, pair)], backend="cpu"),
        lambda: op.heads(x.to("meta"), segments, heads, backend="cpu"),
    ):
        with pytest.raises(ValueError, match="on meta"):
            call()


def test_a_slot_that_is_filled_again_or_cleared_is_served_as_it_is(backend: Backend) -> None:
    group = group_of(64, [32, 48], [8, 16])
    others = group_of(64, [32, 48], [40, 5])
    x, y, segments = torch.randn(9, 64), torch.randn(9, 80), [Segment(0, 4, 0), Segment(4, 5, 1)]
    check(y, x, segments, group, backend)
    group.put(0, [column[0] for column in others.pairs])
    check(y, x, segments, group, backend)
    group.clear(1)
    check(y, x, segments, group, backend)
    op.apply(actual := y.clone(), x, segments, group, backend=backend)
    assert torch.equal(actual[4:], y[4:])
    with pytest.raises(ValueError, match="slot 3 is neither one of the 2 slots nor the next"):
        group.put(3, [None, None])
    group.put(1, [column[1] for column in others.pairs])
    group.append([column[0] for column in others.pairs])
    check(y, x, [*segments, Segment(2, 3, 2, -1)], group, backend)
    heads = HeadGroup(64)
    heads.put(0, None)
    heads.append(HeadMatrix(torch.randn(5, 64), torch.randn(5)))
    for classes in (3, 5, 7):
        head = HeadMatrix(torch.randn(classes, 64), torch.randn(classes))
        heads.put(0, head)
        scores = op.heads(x, [Segment(0, 9, 0)], heads, backend=backend)
        desired = x @ head.weight.T + head.bias
        torch.testing.assert_close(scores[:, :classes], desired, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slot_is_packed_into_the_callers_memory(dtype: torch.dtype) -> None:
    group, own = LoraGroup(70, [24, 50], dtype), LoraGroup(70, [24, 50], dtype)
    pairs = [
        LoraPair(torch.randn(5, 70).to(dtype), torch.randn(24, 5).to(dtype)),
        LoraPair(torch.randn(19, 70).to(dtype), torch.randn(50, 19).to(dtype)),
    ]
    needed = group.slot_bytes([5, 19])
    memory = torch.full((needed + 128,), 77, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    group.put(0, pairs, (memory.data_ptr() + start, needed))
    own.put(0, pairs)
    assert bool((memory[:start] == 77).all())
    assert bool((memory[start + needed :] == 77).all())
    x, segments = torch.randn(6, 70).to(dtype), [Segment(0, 6, 0)]
    actual, desired = torch.zeros(6, 74, dtype=dtype), torch.zeros(6, 74, dtype=dtype)
    op.apply(actual, x, segments, group, backend="cpu")
    op.apply(desired, x, segments, own, backend="cpu")
    assert torch.equal(actual, desired)
    assert bool(desired.any())
    memory.zero_()  # The packed copies are read in place.
    op.apply(actual.zero_(), x, segments, group, backend="cpu")
    assert not bool(actual.any())
    assert group.slot_bytes([0, 0]) == 0
    assert needed > group.slot_bytes([0, 19]) > 0
    for into in [(memory.data_ptr() + start, needed - 1), (memory.data_ptr() + start + 4, needed)]:
        with pytest.raises(ValueError, match="does not fit into"):
            group.put(0, pairs, into)


def test_a_group_may_change_while_calls_run() -> None:
    group = group_of(256, [192], [16, 32])
    replacements = [group_of(256, [192], [rank]).pairs[0][0] for rank in (8, 24, 64)]
    x = torch.randn(24, 256)
    segments = [Segment(0, 12, 0), Segment(12, 12, 1)]
    zero = torch.zeros(24, 192)
    desired = [expected(zero, x, segments, group)[12:]]
    for pair in replacements:
        group.put(1, [pair])
        desired.append(expected(zero, x, segments, group)[12:])
    first = expected(zero, x, segments, group)[:12]
    over, wrong = threading.Event(), []

    def call() -> None:
        while not over.is_set():
            y = zero.clone()
            op.apply(y, x, segments, group, backend="cpu", threads=1)
            fits = [torch.allclose(y[12:].double(), values, atol=1e-3) for values in desired]
            if not any(fits) or not torch.allclose(y[:12].double(), first, atol=1e-3):
                wrong.append(y)

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    for iteration in range(150):
        group.put(1, [replacements[iteration % 3]])
        group.append([replacements[iteration % 3]])
    over.set()
    for caller in callers:
        caller.join()
    assert not wrong


def test_packing_releases_the_interpreter_lock() -> None:
    """A counting thread continues to count while a large adapter is packed."""
    group = LoraGroup(4096, [4096])
    pair = LoraPair(torch.randn(256, 4096), torch.randn(4096, 256))
    group.append([None])
    counted, over, started = [0], threading.Event(), threading.Event()

    def count() -> None:
        while not over.is_set():
            counted[0] += 1
            started.set()

    other = threading.Thread(target=count)
    other.start()
    started.wait()
    operands = factors(*pair)
    packed = group.native
    during = 0
    for _ in range(50):  # Other processes may keep the second thread from running.
        before = counted[0]
        packed.set_slot(0, [operands])
        during = max(during, counted[0] - before)
        if during > 10:
            break
    over.set()
    other.join()
    # With the lock held, at most one switch of threads could happen between two lines.
    assert during > 10


def test_packed_adapters_share_huge_pages_and_return_them() -> None:
    large_pages = native.kernels().runtime.large_pages
    gc.collect()
    regions, pieces = large_pages()
    group = group_of(256, [256], [16, 8])
    packed = large_pages()[1] - pieces
    assert packed >= 4 * 2 * 256 * (16 + 8)
    other = group_of(256, [256], [16])
    group.clear(0)
    assert large_pages()[1] - pieces >= 4 * 2 * 256 * (16 + 8)
    del group
    gc.collect()
    assert 4 * 2 * 256 * 16 <= large_pages()[1] - pieces < packed
    del other
    gc.collect()
    assert large_pages() == (regions, pieces)


def test_nested_pins_end_in_their_order() -> None:
    group, x = group_of(700, [130], [24], FP32), torch.randn(40, 700)
    names = [config["name"] for config in tiles.configs("apply", "fp32")]

    def row() -> torch.Tensor:
        y = torch.zeros(40, 130)
        op.apply(y, x, [Segment(0, 40, 0)], group, backend="cpu", threads=1)
        alone = torch.zeros(1, 130)
        op.apply(alone, x[:1], [Segment(0, 1, 0)], group, backend="cpu", threads=1)
        assert torch.equal(alone[0], y[0])
        return y

    with pinned(names[-1]):
        outer = row()
        with pinned(names[0]):
            row()
        assert torch.equal(row(), outer)
        with pytest.raises(ValueError, match="none such"), pinned("none such"):
            pass
        assert torch.equal(row(), outer)
    reset_counters()
    op.apply(torch.zeros(40, 130), x, [Segment(0, 40, 0)], group, backend="cpu")
    assert sum(counters().values()) == 1  # The choice is adaptive again.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_an_epilogue_adds_what_apply_adds(dtype: torch.dtype, backend: Backend) -> None:
    pairs = [LoraPair(torch.randn(r, 96).to(dtype), torch.randn(80, r).to(dtype)) for r in (8, 40)]
    group = LoraGroup.of(96, pairs)
    matrix = ops.Matrix(torch.randn(80, 96))
    segments = [Segment(0, 1, 1), Segment(2, 9, 0, sign=-1)]
    x = torch.randn(12, 192)[:, :96]
    desired = matrix(x, backend=backend)
    op.apply(desired, x, segments, group)
    with timed_parts() as spent:
        actual = matrix(x, epilogue=op.bind_epilogue(segments, group, x), backend=backend)
    assert torch.equal(actual, desired)
    assert spent[LORA] > 0
    assert spent[PRODUCTS] > 0
    with pytest.raises(ValueError, match="outside"):
        matrix(x[:5], epilogue=op.bind_epilogue(segments, group, x), backend=backend)


def test_ranks_are_padded_in_the_memory_of_a_gpu() -> None:
    group = LoraGroup(64, [128, 32], torch.float16, "cuda")
    assert group.slot_bytes([3, 9]) == group.slot_bytes([8, 16]) == 2 * (192 * 8 + 96 * 16)
    assert group.slot_bytes([0, 8]) == 2 * 96 * 8


def ones(scale: float) -> LoraPair:
    return LoraPair(torch.ones(1, 16), torch.full((16, 1), scale))


def test_setting_a_slot_takes_as_long_beside_many_slots_as_beside_few() -> None:
    group = LoraGroup(16, [16] * 3)
    assert group.native is not None

    def seconds_of_appends() -> float:
        started = time.thread_time()
        for _ in range(100):
            group.append([ones(1.0), None, ones(2.0)])
        return time.thread_time() - started

    few = min(seconds_of_appends() for _ in range(5))
    while len(group) < 20_000:
        group.append([ones(1.0), None, None])
    assert min(seconds_of_appends() for _ in range(5)) < 4 * few
