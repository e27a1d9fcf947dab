"""Signed segments: the adapters that a forward pass adds to rows or subtracts from them."""

from __future__ import annotations

from collections.abc import Iterable

from vlora.atmm.types import Segment, Segments
from vlora.ids import BASE


def signed_segments(rows: Iterable[tuple[int, int]], live: int = BASE) -> Segments:
    """Return the segments of a step, all positive ones first.

    rows: (slot, number of rows) of consecutive rows, in row order.
    live: slot of the adapter in the active weights, or BASE.

    A row of adapter a is in a segment +a, unless a is the live adapter or the base. If another
    adapter is live, the row is also in a segment −live, since the merged adapter must be subtracted
    (§4.4.2). Contiguous rows that add the same slot, or that need the subtraction, form one
    segment. So if rows are sorted by `order_of`, each adapter has one segment.
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
    """Append a segment, or extend the last one if `more` continues it."""
    last = segments[-1] if segments else None
    if last and last.slot == more.slot and last.start + last.length == more.start:
        segments[-1] = Segment(last.start, last.length + more.length, last.slot, last.sign)
    else:
        segments.append(more)
