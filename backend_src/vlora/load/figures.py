"""Figures of a load, and their picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlora.load.run import Record

# Lag of sending above which the client, not the server, has shaped the load.
MAX_LAG_SECONDS = 0.05


def summarize(records: Sequence[Record], deadline: float | None = None) -> dict[str, Any]:
    """Return the figures of requests; times are in seconds from the scheduled times.

    deadline: seconds within which an answer is in time; None if any is.
    """
    sent = [one for one in records if one.lag is not None]
    ended = [one for one in sent if one.error is not None]
    answered = [one for one in ended if not one.error]
    ends = [one.end or 0.0 for one in answered]
    in_time = sum(deadline is None or end <= deadline for end in ends)
    span = max((one.at + (one.end or 0.0) for one in ended), default=0.0)
    tokens = sum(one.output_tokens for one in answered)
    prompts = sum(one.prompt_tokens for one in answered)
    return {
        "requests": len(records),
        "sent": len(sent),
        "answered": len(answered),
        "errors": dict(Counter(one.error for one in ended if one.error).most_common()),
        "unfinished": len(sent) - len(ended),
        "seconds": span,
        "token_latency_s": sum(ends) / tokens if tokens else None,
        "first_token_s": _spread([one.first or 0.0 for one in answered]),
        "end_to_end_s": _spread(ends),
        "requests_per_s": len(answered) / span if span else 0.0,
        "tokens_per_s": tokens / span if span else 0.0,
        "prompt_tokens": prompts / len(answered) if answered else None,
        "output_tokens": tokens / len(answered) if answered else None,
        "deadlines_met": None if deadline is None or not ended else in_time / len(ended),
        "goodput_per_s": in_time / span if span else 0.0,
        "lag_s": _spread([one.lag or 0.0 for one in sent]),
    }


def by_adapter(
    records: Sequence[Record], deadline: float | None = None
) -> dict[str, dict[str, Any]]:
    """Return the figures of each adapter's requests, the most frequent first; "" is the base."""
    names = Counter(one.adapter for one in records)
    return {
        name: summarize([one for one in records if one.adapter == name], deadline)
        for name, _ in names.most_common()
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    marks = np.quantile(values, (0.5, 0.95, 0.99, 1.0))
    found = zip(("p50", "p95", "p99", "max"), marks.tolist(), strict=True)
    return {"mean": float(np.mean(values)), **dict(found)}


def kept_schedule(summary: Mapping[str, Any]) -> bool:
    """Return whether the client sent nearly all requests at their times."""
    lag = summary["lag_s"]
    return lag is None or bool(lag["p99"] <= MAX_LAG_SECONDS)


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw the distribution of the latencies, and the latency of each request by its time."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(10, 3.5), layout="constrained")
    spread, course = made.subplots(1, 2)
    answered = [one for one in records if one.error == ""]
    failed = [one for one in records if one.error]
    for attribute, name in (("first", "first token"), ("end", "end to end")):
        values = sorted(getattr(one, attribute) for one in answered)
        spread.plot(values, np.arange(1, len(values) + 1) / max(1, len(values)), label=name)
        times = [one.at for one in answered]
        course.plot(times, [getattr(one, attribute) for one in answered], ".", ms=3, label=name)
    if failed:
        times, ends = [one.at for one in failed], [one.end for one in failed]
        course.plot(times, ends, "x", color="red", label="errors")
    spread.set(xlabel="seconds from the scheduled time", ylabel="share of answered requests")
    course.set(xlabel="scheduled time, seconds", ylabel="seconds")
    for axes in (spread, course):
        axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=120)
