"""Cancellations that arrive before their request.

A client can cancel a request of an ensemble while its images are still being encoded, before the
engine has seen it. Such a cancellation is stored for a while. This module handles only ids and a
clock. It is not thread-safe.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 30.0
"""Seconds for which a cancellation is stored. The cancelled request arrives once its images are
encoded, which takes far less time.
"""

MAX_IDS = 4096
"""Maximum number of stored cancellations, and of stored ids of ended requests."""


class PendingCancels:
    """Stores cancellations by client id, and the client ids of requests that ended recently.

    A cancellation of a request that ended recently came too late. It is not stored, because it
    would cancel a new request with the same id.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending: OrderedDict[str, float] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def ended(self, client_id: str) -> None:
        """Record that the request with this id has ended."""
        self._ended[client_id] = None
        self._ended.move_to_end(client_id)
        _evict_oldest(self._ended)

    def add(self, client_id: str) -> None:
        """Store a cancellation, unless a request with this id ended recently.

        The caller has checked that no live request has the id.
        """
        if client_id not in self._ended:
            self._pending[client_id] = self._clock()
            _evict_oldest(self._pending)

    def take(self, client_id: str) -> bool:
        """Remove the cancellation of a new request. Return True if there was one and it was at most
        PATIENCE_SECONDS old.
        """
        since = self._pending.pop(client_id, None)
        return since is not None and self._clock() - since <= PATIENCE_SECONDS


def _evict_oldest(entries: OrderedDict[str, Any]) -> None:
    if len(entries) > MAX_IDS:
        entries.popitem(last=False)
