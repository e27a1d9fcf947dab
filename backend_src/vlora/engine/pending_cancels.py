"""Stops that come before their request.

A request of an ensemble can be stopped while its images are still being encoded, when the engine
has not seen it yet. Such a stop waits for it a while. Knows ids and a clock; not thread-safe.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

PATIENCE = 30.0
"""Seconds that a stop waits for its request; encoding takes far less."""

REMEMBERED = 4096
"""Ids kept of each kind; the oldest are forgotten first."""


class PendingCancels:
    """Waiting stops by client id, and the ids that ended lately: a stop that is merely late must
    not wait for a new request that reuses its id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: OrderedDict[str, float] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def ended(self, client_id: str) -> None:
        """The request of this id has had its last output."""
        self._ended[client_id] = None
        self._ended.move_to_end(client_id)
        _bound(self._ended)

    def wait(self, client_id: str) -> None:
        """A stop came for an id that is not live."""
        if client_id not in self._ended:
            self._waiting[client_id] = self._clock()
            _bound(self._waiting)

    def take(self, client_id: str) -> bool:
        """Whether a stop waits for this request, which has just come; it waits no longer."""
        since = self._waiting.pop(client_id, None)
        return since is not None and self._clock() - since <= PATIENCE


def _bound(entries: OrderedDict[str, Any]) -> None:
    if len(entries) > REMEMBERED:
        entries.popitem(last=False)
