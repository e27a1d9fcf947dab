"""Which cameras yield while the server is full."""

from __future__ import annotations

import math

MIN_SECONDS, MAX_SECONDS = 2.0, 30.0


class Admission:
    """Lets the camera with the lowest priority yield each time that the server refuses a request.

    One that yields asks nothing for a time, which doubles each time that it has to yield again
    soon after. The camera with the highest priority never yields. Times are of any clock.
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._pauses: dict[str, float] = {}

    def is_yielding(self, camera: str, now: float) -> bool:
        return self._until.get(camera, -math.inf) > now

    def refused(self, priorities: dict[str, int], now: float) -> str | None:
        """Return the camera that yields from now on, of those with these priorities, where lower
        numbers are served first; None if only one is left. Of equals, the last one yields."""
        left = [name for name in priorities if not self.is_yielding(name, now)]
        if len(left) < 2:
            return None
        worst = max(priorities[name] for name in left)
        name = next(name for name in reversed(left) if priorities[name] == worst)
        was_recent = now - self._until.get(name, -math.inf) < MAX_SECONDS
        pause = min(2 * self._pauses[name], MAX_SECONDS) if was_recent else MIN_SECONDS
        self._pauses[name], self._until[name] = pause, now + pause
        return name

    def forget(self, camera: str) -> None:
        """Drop what is known of a camera that is no longer watched."""
        self._until.pop(camera, None)
        self._pauses.pop(camera, None)
