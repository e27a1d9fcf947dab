"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float = 60.0, pause: float = 0.01) -> T:
    """Call `condition` every `pause` seconds until its result is true, and return it. Fail the
    test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(pause)
    return result
