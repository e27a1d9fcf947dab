"""Tests of the segments of a step."""

from __future__ import annotations

from vlora.atmm.types import Segment, Segments


def test_segments_are_a_tuple_that_is_converted_once() -> None:
    segments = Segments([Segment(0, 1, 0)])
    assert segments == (Segment(0, 1, 0),)
    assert Segments.of(segments) is segments
    assert Segments.of([Segment(0, 1, 0)]) == segments
