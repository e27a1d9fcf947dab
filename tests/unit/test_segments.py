"""Signed segments say of every row what the rule says: its own adapter in, the live one out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vlora.atmm.types import Segment
from vlora.lora.segments import BASE, signed_segments

slots = st.integers(BASE, 4)


@given(rows=st.lists(st.tuples(slots, st.integers(0, 9))), live=slots)
def test_each_row_gets_its_own_adapter_and_loses_the_live_one(
    rows: list[tuple[int, int]], live: int
) -> None:
    owners = [slot for slot, length in rows for _ in range(length)]
    found: list[dict[int, int]] = [{} for _ in owners]
    for segment in signed_segments(rows, live):
        for row in range(segment.start, segment.start + segment.length):
            assert segment.slot not in found[row], "an adapter counts once"
            found[row][segment.slot] = segment.sign
    for owner, signs in zip(owners, found, strict=True):
        own = {owner: 1} if owner not in (BASE, live) else {}
        out = {live: -1} if live not in (BASE, owner) else {}
        assert signs == own | out


def test_neighbouring_runs_of_one_adapter_become_one_segment() -> None:
    assert signed_segments([(2, 1), (2, 3), (0, 1)]) == (Segment(0, 4, 2), Segment(4, 1, 0))


def test_base_rows_need_no_segment_unless_an_adapter_is_live() -> None:
    assert signed_segments([(BASE, 5)]) == ()
    assert signed_segments([(BASE, 5)], live=1) == (Segment(0, 5, 1, -1),)
