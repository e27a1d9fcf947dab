"""Search for contiguous pages between the runs of adapters. All functions are pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def gaps(total: int, runs: Iterable[range]) -> Iterator[range]:
    """Yield the ranges within 0 … total-1 that no run overlaps, in order."""
    start = 0
    for run in sorted(runs, key=lambda run: run.start):
        if start < run.start:
            yield range(start, run.start)
        start = run.stop
    if start < total:
        yield range(start, total)


def runs_to_evict(
    total: int, busy: Sequence[range], idle: Sequence[range], count: int
) -> list[range] | None:
    """Return the idle runs to evict so that the pool has `count` contiguous pages without a run.

    The runs to evict are those in one window of `count` pages. The window is the one whose most
    recently used run was used longest ago. Of equal windows, the one with the fewest pages to evict
    is chosen. The list is empty if some window already contains no run.

    total: number of pages of the pool.
    busy: runs that stay.
    idle: runs that may be evicted, the least recently used first.

    Returns None if evicting all idle runs would not suffice.
    """

    def window_exists(evicted: int) -> bool:
        return any(len(gap) >= count for gap in gaps(total, [*busy, *idle[evicted:]]))

    if not window_exists(len(idle)):
        return None
    evicted = bisect_left(range(len(idle)), True, key=window_exists)
    if not evicted:
        return []
    last = idle[evicted - 1].start
    gap = next(gap for gap in gaps(total, [*busy, *idle[evicted:]]) if last in gap)
    inside = [run for run in idle[:evicted] if run.start in gap]
    starts = [gap.start, gap.stop - count]
    starts += [run.stop for run in inside] + [run.start - count for run in inside]
    victims = (
        [run for run in inside if run.start < start + count and start < run.stop]
        for start in starts
        if gap.start <= start <= gap.stop - count
    )
    return min(victims, key=lambda runs: sum(map(len, runs)))


def cheapest_window(owners: bytearray, free: int, adapter: int, count: int) -> int:
    """Return the first page of the best window of `count` pages without an adapter.

    The best window has the most free pages, so that the fewest pages must be moved. There must be a
    window without an adapter.

    owners: owner of each page.
    free, adapter: values in `owners` of free pages and of pages of adapters.
    """
    pages = np.frombuffer(owners, np.uint8)
    used = _sums(pages != free, count)
    used[_sums(pages == adapter, count) > 0] = count + 1
    return int(used.argmin())


def _sums(values: Array, count: int) -> Array:
    """Return the sum of each window of `count` values."""
    sums: Array = np.concatenate([[0], np.cumsum(values)])
    windows: Array = sums[count:] - sums[:-count]
    return windows
