"""From the adapters of a step's rows to signed segments, the only thing a forward pass sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vlora.atmm.types import Segment, Segments
from vlora.ids import BASE


def signed_segments(rows: Iterable[tuple[int, int]], live: int = BASE) -> Segments:
    """Segments for runs of rows given as (slot, length), in row order.

    A row of adapter a gets +a if a is neither the live adapter nor the base, and −live if an
    adapter is live and it is not a (§4.4.2: own added, merged taken out). Neighbouring rows of one
    slot are one segment, and one −live covers neighbours that need it, whatever their own: an
    operator meets each adapter once where rows are in `order_of`. All own ones come first.
    """
    own: list[Segment] = []
    out: list[Segment] = []
    start = 0
    for slot, length in rows:
        if slot not in (BASE, live):
            _extend(own, Segment(start, length, slot, +1))
        if live not in (BASE, slot):
            _extend(out, Segment(start, length, live, -1))
        start += length
    return Segments([*own, *out])


def _extend(segments: list[Segment], more: Segment) -> None:
    """Adds a segment; to the last one, where that ends in the row before and is alike."""
    last = segments[-1] if segments else None
    if last and last.slot == more.slot and last.start + last.length == more.start:
        segments[-1] = replace(last, length=last.length + more.length)
    else:
        segments.append(more)
