"""From the adapters of a step's rows to signed segments, the only thing a forward pass sees."""

from __future__ import annotations

from collections.abc import Iterable

from vlora.atmm.types import Segment, Segments

BASE = -1
"""Slot of rows that use no adapter."""


def signed_segments(rows: Iterable[tuple[int, int]], live: int = BASE) -> Segments:
    """Segments for runs of rows given as (slot, length), in row order.

    A run of adapter a gets +a if a is neither the live adapter nor the base, and −live if an
    adapter is live and it is not a (§4.4.2: own added, merged taken out). Neighbouring runs of
    one slot are joined, so that an operator meets each adapter once where rows are sorted.
    """
    runs: list[tuple[int, int, int]] = []
    start = 0
    for slot, length in rows:
        if runs and runs[-1][0] == slot:
            runs[-1] = (slot, runs[-1][1], runs[-1][2] + length)
        else:
            runs.append((slot, start, length))
        start += length
    segments: list[Segment] = []
    for slot, first, length in runs:
        if slot not in (BASE, live):
            segments.append(Segment(first, length, slot, +1))
        if live not in (BASE, slot):
            segments.append(Segment(first, length, live, -1))
    return Segments(segments)
