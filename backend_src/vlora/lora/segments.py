"""Conversion of the rows' adapters to signed segments, the only input about adapters of a
forward pass."""

from __future__ import annotations

from collections.abc import Iterable

from vlora.atmm.types import Segment, Segments
from vlora.ids import BASE


def signed_segments(rows: Iterable[tuple[int, int]], live: int = BASE) -> Segments:
    """Return the segments of runs of rows, each (slot, length), in row order.

    A row of adapter a gets +a if a is neither the live adapter nor the base, and −live if an
    adapter is live and it is not a (§4.4.2: the own adapter is added, the merged one subtracted).
    Contiguous rows of one slot form one segment, and one −live segment covers contiguous rows that
    need it, whatever their own adapters. The operator therefore meets each adapter once if rows are
    sorted by `order_of`. All positive segments come first.
    """
    added: list[Segment] = []
    subtracted: list[Segment] = []
    start = 0
    for slot, length in rows:
        if slot not in (BASE, live):
            _extend(added, Segment(start, length, slot, +1))
        if live not in (BASE, slot):
            _extend(subtracted, Segment(start, length, live, -1))
        start += length
    return Segments([*added, *subtracted])


def _extend(segments: list[Segment], more: Segment) -> None:
    """Append a segment, or merge it into the last one if that has the same slot and ends in the
    row before."""
    last = segments[-1] if segments else None
    if last and last.slot == more.slot and last.start + last.length == more.start:
        segments[-1] = Segment(last.start, last.length + more.length, last.slot, last.sign)
    else:
        segments.append(more)
