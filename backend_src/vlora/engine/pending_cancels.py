"""Cancellations that arrive before their request.

A request of an ensemble can be cancelled while its images are still being encoded, before the
engine has seen it. Such a cancellation is stored for a while. Knows ids and a clock; not
thread-safe.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 30.0
"""Seconds that a cancellation waits for its request; encoding takes far less."""

MAX_IDS = 4096
"""Maximum number of stored ids of each kind; the oldest are removed first."""


class PendingCancels:
    """Pending cancellations by client id, and the ids of requests that ended recently.

    The latter identify cancellations that are late: they must not cancel a new request that reuses
    the id.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending: OrderedDict[str, float] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def ended(self, client_id: str) -> None:
        """Note that the request of this id has ended."""
        self._ended[client_id] = None
        self._ended.move_to_end(client_id)
        _evict_oldest(self._ended)

    def add(self, client_id: str) -> None:
        """Store a cancellation of an id that is not in use, unless its request ended recently."""
        if client_id not in self._ended:
            self._pending[client_id] = self._clock()
            _evict_oldest(self._pending)

    def take(self, client_id: str) -> bool:
        """Remove the cancellation of a new request; return whether there was one in time."""
        since = self._pending.pop(client_id, None)
        return since is not None and self._clock() - since <= PATIENCE_SECONDS


def _evict_oldest(entries: OrderedDict[str, Any]) -> None:
    if len(entries) > MAX_IDS:
        entries.popitem(last=False)
