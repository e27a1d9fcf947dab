"""The readable operator against float64, and signed segments against the rule they implement."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlora.atmm import op
from vlora.atmm.types import LoraPair, Segment
from vlora.lora.segments import BASE, signed_segments


@dataclass(frozen=True)
class Shape:
    rows: int
    d_in: int
    d_out: int
    ranks: tuple[int, ...]
    slots: tuple[int, ...]
    lengths: tuple[int, ...]
    live: int
    seed: int


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    ranks = draw(st.lists(st.integers(1, 33), min_size=1, max_size=5))
    lengths = draw(st.lists(st.integers(0, 9), max_size=8))
    slot = st.integers(BASE, len(ranks) - 1)
    return Shape(
        rows=sum(lengths),
        d_in=draw(st.integers(1, 40)),
        d_out=draw(st.integers(1, 40)),
        ranks=tuple(ranks),
        slots=tuple(draw(slot) for _ in lengths),
        lengths=tuple(lengths),
        live=draw(slot),
        seed=draw(st.integers(0, 2**32)),
    )


@settings(deadline=None, max_examples=150)
@given(shape=shapes())
def test_each_row_gets_its_own_adapter_and_loses_the_live_one(shape: Shape) -> None:
    generator = torch.Generator().manual_seed(shape.seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    x, before = random(shape.rows, shape.d_in), random(shape.rows, shape.d_out)
    pairs = [LoraPair(random(rank, shape.d_in), random(shape.d_out, rank)) for rank in shape.ranks]
    segments = signed_segments(zip(shape.slots, shape.lengths, strict=True), shape.live)
    y = before.clone()
    op.apply(y, x, segments, pairs)

    expected = before.double()
    row = 0
    for slot, length in zip(shape.slots, shape.lengths, strict=True):
        for index in range(row, row + length):
            for adapter, sign in ((slot, 1.0), (shape.live, -1.0)):
                if BASE in (adapter,) or slot == shape.live:
                    continue
                a, b = pairs[adapter].a.double(), pairs[adapter].b.double()
                expected[index] += sign * (b @ (a @ x[index].double()))
        row += length
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-3)
    untouched = [i for s, n in zip(shape.slots, shape.lengths, strict=True) for i in [s] * n]
    for index, slot in enumerate(untouched):
        if slot == shape.live or (slot == BASE and shape.live == BASE):
            assert torch.equal(y[index], before[index])


def test_a_slot_without_weights_for_this_matrix_is_skipped() -> None:
    y, x = torch.randn(3, 5), torch.randn(3, 4)
    before = y.clone()
    op.apply(y, x, [Segment(0, 3, 0)], [None])
    assert torch.equal(y, before)


def test_rows_of_a_wider_output_are_written_in_place() -> None:
    wide, x = torch.randn(4, 12), torch.randn(4, 6)
    before = wide.clone()
    pair = LoraPair(torch.randn(2, 6), torch.randn(5, 2))
    op.apply(wide[:, 3:8], x, [Segment(1, 2, 0)], [pair])
    expected = before.clone()
    expected[1:3, 3:8] += x[1:3] @ pair.a.T @ pair.b.T
    torch.testing.assert_close(wide, expected)


def test_nan_of_one_adapter_stays_in_its_own_rows() -> None:
    x = torch.randn(4, 6)
    good = LoraPair(torch.randn(2, 6), torch.randn(5, 2))
    bad = LoraPair(torch.full((2, 6), torch.nan), torch.randn(5, 2))
    y = torch.zeros(4, 5)
    op.apply(y, x, [Segment(0, 2, 0), Segment(2, 2, 1)], [good, bad])
    assert torch.isfinite(y[:2]).all()
    assert torch.isnan(y[2:]).all()


@pytest.mark.parametrize(
    "segment",
    [Segment(0, 1, 1), Segment(0, 1, -1), Segment(2, 2, 0), Segment(-1, 1, 0), Segment(0, -1, 0)],
)
def test_a_segment_that_does_not_fit_is_refused(segment: Segment) -> None:
    pair = LoraPair(torch.randn(2, 6), torch.randn(5, 2))
    with pytest.raises(ValueError, match=r"slot|Segment"):
        op.apply(torch.zeros(3, 5), torch.randn(3, 6), [segment], [pair])


def test_neighbouring_runs_of_one_adapter_become_one_segment() -> None:
    assert signed_segments([(2, 1), (2, 3), (0, 1)]) == (Segment(0, 4, 2), Segment(4, 1, 0))


def test_base_rows_need_no_segment_unless_an_adapter_is_live() -> None:
    assert signed_segments([(BASE, 5)]) == ()
    assert signed_segments([(BASE, 5)], live=1) == (Segment(0, 5, 1, -1),)
