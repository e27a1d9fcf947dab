"""The clock by which cameras and alerts are timed."""

from __future__ import annotations

import time

_OFFSET = time.time() - time.monotonic()


def unix_time() -> float:
    """Return the Unix time of a clock that was set when the process started.

    Steps of the system's clock would stop a live camera for as long as they go back.
    """
    return _OFFSET + time.monotonic()
