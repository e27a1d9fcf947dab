"""What `vlora watch` shows: rows of the live table and of the summary, and lines without it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

import numpy as np

from vlora.watch.counts import OVERLOAD, RECENT_SECONDS
from vlora.watch.run import Watched

COUNTS = ("chunks", "answers", "skipped", "drops", "errors", "new conn.", "gaps")
LIVE_HEADS = ("camera", "state", "answer", "lag s", *COUNTS)
SUMMARY_HEADS = ("camera", *COUNTS, "p50 s", "p95 s", "max s")
# Columns of the live table that it lacks while they are zero for all cameras.
FAULTS = ("skipped", "errors", "new conn.", "gaps")
RIGHT = (*COUNTS, "lag s", "p50 s", "p95 s", "max s")
ANSWER_WIDTH = 36


def live_row(watched: Watched) -> tuple[str, ...]:
    view, last = watched.view(), watched.last
    # The URL is left out, because it is long and the reason behind it is what counts.
    reason = view["detail"].removeprefix(f"{watched.camera.shown_url}: ")
    state = "overloaded" if view["overloaded"] else view["state"]
    state += f": {reason}" if reason else ""
    text = ""
    if last is not None:
        best = f" ({max(last.scores.values()):.2f})" if last.scores else ""
        text = (shorten(last.text.strip(), ANSWER_WIDTH, placeholder="…") or "(nothing)") + best
    lag = "-" if view["lag"] is None else f"{view['lag']:.2f}"
    return (view["name"], shorten(state, 48, placeholder="…"), text, lag, *_counts(watched))


def summary_row(watched: Watched) -> tuple[str, ...]:
    lags = watched.counts.lags
    spread = np.quantile(lags, (0.5, 0.95, 1.0), method="inverted_cdf") if lags else ()
    figures = [f"{value:.3f}" for value in spread] or ["-"] * 3
    return (watched.name, *_counts(watched), *figures)


def shown_heads(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the heads of the live table: those of faults only if a row has one."""
    columns = zip(LIVE_HEADS, zip(*rows, strict=True), strict=True) if rows else ()
    zero = {head for head, column in columns if set(column) <= {"0", "0%"}}
    return [head for head in LIVE_HEADS if head not in FAULTS or head not in zero]


def overload(watched: Sequence[Watched]) -> str:
    """Return a sentence about the cameras that dropped many chunks; "" if there are none."""
    late = [one.name for one in watched if one.counts.drops > OVERLOAD * one.counts.chunks]
    return _overload(late, len(watched), "")


def overload_now(watched: Sequence[Watched]) -> str:
    """Return the same about the last minutes."""
    late = [one.name for one in watched if one.is_overloaded]
    return _overload(late, len(watched), f" of the last {RECENT_SECONDS / 60:.0f} minutes")


def _overload(late: Sequence[str], count: int, when: str) -> str:
    if not late:
        return ""
    return (
        f"{len(late)} of {count} cameras dropped more than {OVERLOAD:.0%} of their chunks{when}"
        f" ({shorten(', '.join(late), 60, placeholder='…')}): the server, or this machine, does not"
        " keep up; raise their interval, use gates, or add replicas"
    )


def line(watched: Sequence[Watched], desk: Mapping[str, Any]) -> str:
    """Return one line with the time, totals of all cameras, and the sinks that are away.

    desk: see `AlertDesk.counts`.
    """
    counts = [one.counts for one in watched]
    running = sum(one.reader.state == "running" for one in watched)
    lags = [one.lags[-1] for one in counts if one.lags]
    parts = [
        f"{running} of {len(watched)} cameras running",
        f"{sum(one.answered for one in counts)} answers",
        f"{sum(one.skipped for one in counts)} skipped",
        f"{sum(one.drops for one in counts)} dropped",
        f"{sum(one.errors for one in counts)} errors",
        f"{sum(desk['events'].values())} events",
    ]
    if lags:
        parts.append(f"lag up to {max(lags):.2f} s")
    away = [
        f"; sink {name}: {sink['away']} ({sink['queued']} waiting)"
        for name, sink in desk["sinks"].items()
        if sink["away"]
    ]
    return f"{time.strftime('%H:%M:%S')}  {', '.join(parts)}{''.join(away)}"


def _counts(watched: Watched) -> tuple[str, ...]:
    counts, stream = watched.counts, watched.reader.counts
    numbers = (counts.chunks, counts.answered, counts.drops, counts.errors)
    chunks, answered, drops, errors = map(str, numbers)
    skipped = f"{counts.share_skipped:.0%}"
    return (chunks, answered, skipped, drops, errors, str(stream.reconnections), str(stream.gaps))
