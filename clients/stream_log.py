"""Results of `video_analytics.py`: counts and latencies of each stream, and their text."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any


@dataclass
class StreamLog:
    """Counts of one stream's chunks, and latencies in seconds from sending to the answer.

    known, right: number of answers whose right text is known, and of the right ones of them.
    """

    latencies: list[float] = field(default_factory=list)
    errors: int = 0
    dropped: int = 0
    known: int = 0
    right: int = 0
    in_flight: int = 0


def describe(record: dict[str, Any]) -> str:
    """Return a line with the time, stream, chunk, answer and latency of a record."""
    clock = time.strftime("%H:%M:%S", time.localtime(record["time"]))
    head = f"{clock}  stream {record['stream']:<3} second {record['chunk']:<4}"
    if "error" in record:
        return f"{head} error: {record['error']}"
    result = record["result"]
    text = shorten(result["text"].strip(), 36, placeholder="…") or "(nothing)"
    if result["scores"]:
        text += f" ({max(result['scores'].values()):.2f})"
    if "truth" in record:
        text += " ✓" if record["truth"] == result["text"].strip() else f" ✗ ({record['truth']})"
    return f"{head} {text:<36} {record['latency_ms']:7.0f} ms"


def summarise(logs: Sequence[StreamLog]) -> str:
    """Return a table of answers, errors, drops and latencies, with one line per stream."""
    lines = ["", "stream  answers  errors  dropped   p50 ms   p95 ms   max ms   right"]
    for stream, log in enumerate(logs):
        ordered = sorted(log.latencies)
        p50, p95, maximum = (
            f"{quantile(ordered, q) * 1e3:.0f}" if ordered else "-" for q in (0.5, 0.95, 1.0)
        )
        right = f"{log.right}/{log.known}" if log.known else "-"
        lines.append(
            f"{stream:<6}  {len(ordered):7d}  {log.errors:6d}  {log.dropped:7d}"
            f"  {p50:>7}  {p95:>7}  {maximum:>7}  {right:>6}"
        )
    return "\n".join(lines)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of ordered values by nearest rank, or 0 if there are none."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
