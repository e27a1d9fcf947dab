"""Counts of Python function calls, to bound the work of a function without a clock."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType


def calls_of(function: Callable[[], object]) -> Counter[str]:
    """Run `function` and return the number of calls of each Python function on this thread, by
    qualified name."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls
