"""Tests of the LoRA operator against float64, in every implementation and on new random data."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.atmm_problems import (
    BF16,
    FORMS,
    FP32,
    Form,
    check,
    compiled,
    each_form,
    expected,
    group_of,
    tolerance_of,
)
from tests.support.drawing import drawn
from vlora.atmm import op, tiles
from vlora.atmm.groups import LoraGroup
from vlora.atmm.types import LoraPair, Segment
from vlora.backends import Backend

OUTSIDE = "outside the 4 rows|beyond the 64-bit range|start|length"


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, list[int], list[int | None], list[Segment], int, int]:
    """Draw (d_in, d_outs, ranks, segments, rows, padding of the rows)."""
    d_in = draw(st.sampled_from([1, 2, 7, 16, 33, 100, 257, 513, 1024]))
    widths = st.sampled_from([1, 5, 15, 16, 17, 48, 63, 64, 130, 512])
    d_outs = draw(st.lists(widths, min_size=1, max_size=3))
    rank = st.one_of(st.none(), st.integers(1, 40), st.sampled_from([64, 65, 127, 128, 255, 256]))
    ranks = draw(st.lists(rank, min_size=1, max_size=5))
    slot = st.integers(0, len(ranks) - 1)
    segments, row = [], draw(st.integers(0, 3))
    length = st.one_of(st.integers(0, 9), st.sampled_from([16, 25, 31, 64, 97, 130]))
    for _ in range(draw(st.integers(0, 6))):
        rows = draw(length)
        segments.append(Segment(row, rows, draw(slot), draw(st.sampled_from([1, -1]))))
        if draw(st.booleans()):  # own and −live segments
            segments.append(Segment(row, rows, draw(slot), -1))
        row += rows + draw(st.sampled_from([0, 0, 1]))
    return d_in, d_outs, ranks, segments, row, draw(st.sampled_from([0, 1, 3, 16]))


@settings(
    max_examples=90, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(problem=problems(), threads=st.sampled_from([1, 2, 3]), form=st.sampled_from(FORMS))
def test_any_problem_equals_float64(
    problem: tuple[int, list[int], list[int | None], list[Segment], int, int],
    threads: int,
    form: Form,
    backend: Backend,
) -> None:
    d_in, d_outs, ranks, segments, rows, padding = problem
    group = group_of(d_in, d_outs, ranks, form.dtype)
    x = form.randn(rows, d_in + padding)[:, padding:]
    y = form.randn(rows, sum(d_outs) + padding)[:, padding:]
    check(y, x, segments, group, backend, threads=threads)


@each_form
def test_long_and_short_steps_and_ranks_beyond_a_row_of_scratch_equal_float64(
    backend: Backend, form: Form
) -> None:
    for rows, ranks in (
        *((rows, (16, 33)) for rows in (0, 1, 3, 8192)),
        *((rows, (300, 512)) for rows in (2, 40)),
    ):
        group, middle = group_of(96, [64, 32], ranks, form.dtype), rows // 2
        segments = [Segment(0, middle, 0), Segment(middle, rows - middle, 1)]
        segments.append(Segment(0, rows, 0, -1))
        check(form.randn(rows, 96), form.randn(rows, 96), segments, group, backend, threads=2)


@drawn(d_in=[62, 1030, 1063], ranks=[(8, 3), (24, 8), (72, 260)], form=FORMS, threads=[1, 2])
def test_ranks_that_end_in_half_a_panel_equal_float64(
    d_in: int, ranks: tuple[int, int], form: Form, threads: int, backend: Backend
) -> None:
    group = group_of(d_in, [48, 17], ranks, form.dtype)
    segments = [Segment(0, 6, 0), Segment(6, 9, 1), Segment(15, 16, 0, -1), Segment(31, 41, 1)]
    check(form.randn(72, 65), form.randn(72, d_in), segments, group, backend, threads=threads)


@compiled
@each_form
def test_every_configuration_equals_float64(form: Form) -> None:
    group = group_of(300, [130, 40], [9, 64, None], form.dtype)
    name = "fp32" if form.dtype == FP32 else "bf16"
    for isa, rows in product(tiles.isas(), (1, 5, 12, 50)):
        segments = [Segment(1, rows, 0), Segment(rows + 1, rows, 1, -1), Segment(0, rows, 2)]
        x, y = form.randn(2 * rows + 2, 300), form.randn(2 * rows + 2, 170)
        with tiles.isa(isa):
            every = 1 if isa.startswith("avx512") else 5
            for index in range(0, len(tiles.configs("apply", name)), every):
                check(y, x, segments, group, "cpu", config=index)


@each_form
def test_nan_in_an_adapter_does_not_affect_other_rows(backend: Backend, form: Form) -> None:
    group = group_of(64, [48], [20, 8, 33], form.dtype)
    first, pair, last = group.pairs[0]
    assert first is not None
    assert pair is not None
    assert last is not None
    bad = LoraPair(torch.full_like(pair.a, torch.nan), pair.b * torch.inf)
    broken = LoraGroup.of(64, [first, bad, last])
    segments = [Segment(0, 5, 0), Segment(5, 1, 1), Segment(6, 30, 2), Segment(36, 9, 1)]
    x, y = form.randn(45, 64), form.randn(45, 48)
    x[40] = torch.nan
    actual = y.clone()
    op.apply(actual, x, segments, broken, backend=backend)
    assert actual[5].isnan().all()
    assert actual[36:].isnan().all()
    desired = expected(y, x, [segments[0], segments[2]], group)
    rows = [*range(5), *range(6, 36)]
    tolerance = tolerance_of(backend, *form)
    torch.testing.assert_close(actual[rows].double(), desired[rows], rtol=tolerance, atol=tolerance)


@each_form
def test_unaligned_addresses_are_served(backend: Backend, form: Form) -> None:
    group = group_of(130, [66], [12, 40], form.dtype)
    x = form.randn(40 * 130 + 1)[1:].view(40, 130)
    y = form.randn(40 * 66 + 1)[1:].view(40, 66)
    check(y, x, [Segment(0, 7, 0), Segment(7, 33, 1)], group, backend)


@pytest.mark.parametrize(
    ("segment", "reason"),
    [
        (Segment(0, 1, 2), "slot 2 is not one of the 2 adapters"),
        (Segment(0, 1, -1), "slot"),
        (Segment(3, 2, 0), OUTSIDE),
        (Segment(-1, 2, 0), OUTSIDE),
        (Segment(0, -1, 0), OUTSIDE),
        (Segment(0, 1, 0, 2), "sign"),
        (Segment(2**63 - 8, 16, 0), OUTSIDE),
        (Segment(2**63 - 1, 2**63 - 1, 0), OUTSIDE),
        (Segment(1, 2**63 - 1, 0), OUTSIDE),
    ],
)
def test_a_wrong_segment_is_rejected(segment: Segment, reason: str, backend: Backend) -> None:
    group = group_of(16, [8], [4, 4])
    y = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=reason):
        op.apply(y, torch.randn(4, 16), [Segment(0, 4, 0), segment], group, backend=backend)
    assert not y.any()


def test_a_wrong_shape_is_rejected(backend: Backend) -> None:
    group, x, y = group_of(16, [8], [4]), torch.zeros(4, 16), torch.zeros(4, 8)
    for wrong_x, wrong_y, reason in (
        (x[:, 1:], y, "do not fit"),
        (x, torch.zeros(4, 9), "do not fit"),
        (x[1:], y, "do not fit"),
        (x.double(), y, "float64"),
        (x, y.bfloat16(), "bfloat16"),
    ):
        with pytest.raises(ValueError, match=reason):
            op.apply(wrong_y, wrong_x, [Segment(0, 1, 0)], group, backend=backend)


@pytest.mark.parametrize("chosen", [pytest.param("cpu", marks=compiled), "cuda"])
def test_columns_that_are_not_contiguous_are_rejected(chosen: Backend) -> None:
    group = group_of(16, [8], [4])
    for y, x in (
        (torch.zeros(8, 4).T, torch.zeros(4, 16)),
        (torch.zeros(4, 8), torch.zeros(16, 4).T),
    ):
        with pytest.raises(ValueError, match="must be contiguous"):
            op.apply(y, x, [], group, backend=chosen)


def test_a_tile_of_the_cpu_is_rejected_on_cuda() -> None:
    group = group_of(16, [8], [4])
    with pytest.raises(
        ValueError, match="config must be None on CUDA; it is an index of the CPU's tiles"
    ):
        op.apply(torch.zeros(4, 8), torch.zeros(4, 16), [], group, config=0, backend="cuda")


def test_a_pair_that_does_not_fit_its_group_is_rejected() -> None:
    group = LoraGroup(16, [8])
    with pytest.raises(ValueError, match="do not fit a projection"):
        group.append([LoraPair(torch.zeros(4, 16), torch.zeros(8, 5))])
    with pytest.raises(ValueError, match="the group is"):
        group.append([LoraPair(torch.zeros(4, 16).bfloat16(), torch.zeros(8, 4).bfloat16())])
    with pytest.raises(ValueError, match=r"torch\.float16 is not supported"):
        LoraGroup(16, [8], torch.float16)


def test_fp32_rows_keep_values_below_bf16_precision(backend: Backend) -> None:
    group = group_of(64, [48], [16], BF16)
    x, y = torch.randn(6, 64) * 2**-13, torch.ones(6, 48)
    segments = [Segment(1, 3, 0), Segment(4, 1, 0, -1)]
    desired = expected(y, x, segments, group) - 1
    op.apply(y, x, segments, group, backend=backend)
    assert desired[1:5].abs().max() < 2**-8
    torch.testing.assert_close(y.double() - 1, desired, rtol=4e-2, atol=2**-16)
    with pytest.raises(ValueError, match="the group is"):
        op.apply(y.to(BF16), x, [Segment(1, 3, 0)], group, backend=backend)
