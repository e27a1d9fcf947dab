"""Tests that signed segments add each row's own adapter and subtract the live one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vlora.atmm.segments import signed_segments
from vlora.atmm.types import Segment, Segments
from vlora.ids import BASE, order_of

slots = st.integers(BASE, 4)


@settings(deadline=None)
@given(rows=st.lists(st.tuples(slots, st.integers(0, 9))), live=slots)
def test_each_row_adds_its_own_adapter_and_subtracts_the_live_one(
    rows: list[tuple[int, int]], live: int
) -> None:
    owners = [slot for slot, length in rows for _ in range(length)]
    signs_by_row: list[dict[int, int]] = [{} for _ in owners]
    for segment in signed_segments(rows, live):
        for row in range(segment.start, segment.start + segment.length):
            assert segment.slot not in signs_by_row[row], "an adapter counts once"
            signs_by_row[row][segment.slot] = segment.sign
    for owner, signs in zip(owners, signs_by_row, strict=True):
        own = {owner: 1} if owner not in (BASE, live) else {}
        out = {live: -1} if live not in (BASE, owner) else {}
        assert signs == own | out


@settings(deadline=None)
@given(rows=st.lists(st.tuples(slots, st.integers(1, 9))), live=slots)
def test_in_order_each_adapter_is_one_segment_and_the_live_one_is_subtracted_once(
    rows: list[tuple[int, int]], live: int
) -> None:
    rows.sort(key=lambda row: order_of(row[0], live))
    segments = signed_segments(rows, live)
    pairs = [(segment.slot, segment.sign) for segment in segments]
    assert len(pairs) == len(set(pairs))
    others = {slot for slot, _ in rows} - {live}
    out = [(live, -1)] if live != BASE and others else []
    assert pairs == [*((slot, 1) for slot in sorted(others - {BASE})), *out]


def test_one_segment_subtracts_the_live_adapter_from_contiguous_rows_of_any_adapter() -> None:
    assert signed_segments([(0, 2), (1, 3), (BASE, 1), (2, 4), (0, 5), (1, 1)], live=0) == (
        Segment(2, 3, 1),
        Segment(6, 4, 2),
        Segment(15, 1, 1),
        Segment(2, 8, 0, -1),
        Segment(15, 1, 0, -1),
    )


def test_segments_are_a_tuple_that_is_converted_once() -> None:
    segments = Segments([Segment(0, 1, 0)])
    assert segments == (Segment(0, 1, 0),)
    assert Segments.of(segments) is segments
    assert Segments.of([Segment(0, 1, 0)]) == segments
