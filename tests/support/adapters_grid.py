"""A small grid of the adapters benchmark for tests of its parts."""

from __future__ import annotations

from typing import Any

SMALL_GRID: dict[str, Any] = {
    "rank": 2,
    "prompt": 8,
    "output": 3,
    "sequences": 2,
    "registered": [2, 8],
    "resident": [2, 4],
    "burst": {"adapters": 6, "room": 2, "host": 2, "requests": 12},
    "split": {"registered": 4},
    "repeats": 1,
    "rounds": 2,
}
