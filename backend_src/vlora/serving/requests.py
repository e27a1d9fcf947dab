"""Requests that wait in a model. They are ended early when their answers have become useless.

An answer is useless when the request's deadline has passed, or when a newer request of the same
stream has superseded the request. This module does not depend on what the requests wait for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from vlora.errors import InvalidArgument, Unavailable, VLoraError
from vlora.metrics import EngineStats, exported_stats
from vlora.request import MIN_STOPPABLE_ID, Freshness
from vlora.serving.metrics import Exporter, Level, Registry
from vlora.serving.tensors import Array, Tensors, as_bytes

# Bytes that requests hold until they end: encoded images, features, text and metadata.


ELEMENT_BYTES = 48
"""Bytes that an element of a STRING tensor takes in addition to its content."""


class HeldBytes:
    """Bytes of all requests in flight, limited to `limit` in total. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def total(self) -> int:
        """Bytes that all requests hold."""
        return self._total

    def hold(self, request_id: str, size: int) -> None:
        """Set the number of bytes that a request holds, replacing its previous number.

        Raises Unavailable if the total would exceed the limit at present, and InvalidArgument if
        the request alone exceeds it. After an error, the request's previous number is unchanged.
        """
        if size > self._limit:
            raise InvalidArgument(
                f"the request has {size} bytes of images and features; the limit of all requests"
                f" is {self._limit} ('max_in_flight_bytes')"
            )
        with self._lock:
            others = self._total - self._held.get(request_id, 0)
            if others + size > self._limit:
                raise Unavailable(
                    f"the requests in flight hold {others} bytes of images and features, and this"
                    f" one has {size}; the limit is {self._limit} ('max_in_flight_bytes')"
                )
            self._held[request_id] = size
            self._total = others + size

    def release(self, request_id: str) -> None:
        """Release everything that a request holds. An unknown id does nothing."""
        with self._lock:
            self._total -= self._held.pop(request_id, 0)


def bytes_of(tensors: Tensors) -> int:
    """Return the number of bytes that these tensors take in memory."""
    return sum(map(_size, tensors.values()))


def _size(tensor: Array) -> int:
    if tensor.dtype != np.object_:
        return int(tensor.nbytes)
    items: Iterable[bytes | str] = tensor.reshape(-1)
    return sum(ELEMENT_BYTES + len(as_bytes(item)) for item in items)


EndRequest = Callable[[BaseException], None]
"""Function that answers a request with an error. It never raises."""


@dataclass(frozen=True)
class _Waiting:
    """A waiting request.

    freshness: arrival, deadline and stream of the request.
    client_id: id that the client chose; may be empty.
    end: function that answers the request with an error.
    """

    freshness: Freshness
    client_id: str
    end: EndRequest


class WaitingRequests:
    """Requests that wait in one model, by keys that the model chooses. Thread-safe.

    **Invariant:** a request is removed exactly once. Either the caller removes it by `take` and
    continues with it, or this object ends it with an error.

    superseded: number of requests that were ended because a newer one superseded them.
    expired: number of requests that were ended because their deadline passed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Waiting] = {}
        self.superseded = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    @property
    def keys(self) -> list[str]:
        return list(self._entries)

    def add(self, key: str, freshness: Freshness, end: EndRequest, client_id: str = "") -> None:
        """Add a request. If it supersedes older requests of its stream, end those."""
        with self._lock:
            older = [
                one
                for one, entry in self._entries.items()
                if entry.freshness.is_superseded_by(freshness)
            ]
            self._entries[key] = _Waiting(freshness, client_id, end)
        for one in older:
            if self.end(one, freshness.superseded_error()):
                with self._lock:
                    self.superseded += 1

    def take(self, key: str) -> bool:
        """Remove a request, so that the caller can continue with it.

        Returns False if the request has ended before, or if this call ends it because its deadline
        has passed.
        """
        entry = self._remove(key)
        return entry is not None and not self._end_if_late(entry)

    def end(self, key: str, reason: BaseException) -> bool:
        """End a request; return False if it is not waiting here."""
        entry = self._remove(key)
        if entry is not None:
            entry.end(reason)
        return entry is not None

    def end_client(self, client_id: str, reason: VLoraError) -> list[str]:
        """End the requests with a client id; return their keys.

        An id of fewer than MIN_STOPPABLE_ID characters ends nothing: other requests may have the
        same id.
        """
        if len(client_id) < MIN_STOPPABLE_ID:
            return []
        keys = [key for key, entry in list(self._entries.items()) if entry.client_id == client_id]
        return [key for key in keys if self.end(key, reason)]

    def end_all(self, reason: VLoraError) -> None:
        for key in self.keys:
            self.end(key, reason)

    def end_late(self) -> None:
        """End the requests whose deadline has passed. Call this regularly."""
        now = self._clock()
        for key, entry in list(self._entries.items()):
            if entry.freshness.deadline <= now and self._remove(key) is entry:
                self._end_if_late(entry)

    def add_to(self, stats: EngineStats) -> EngineStats:
        """Return a copy of `stats` whose counts include the requests that this object ended."""
        return replace(
            stats,
            superseded=stats.superseded + self.superseded,
            expired=stats.expired + self.expired,
            aborted=stats.aborted + self.superseded + self.expired,
        )

    def _remove(self, key: str) -> _Waiting | None:
        with self._lock:
            return self._entries.pop(key, None)

    def _end_if_late(self, entry: _Waiting) -> bool:
        late = entry.freshness.deadline <= self._clock()
        if late:
            with self._lock:
                self.expired += 1
            entry.end(entry.freshness.late_error())
        return late


class WaitingExporter(Exporter):
    """Exports the number of requests that wait in a model before they reach the engine.

    It also exports the numbers of requests that ended while they waited.
    """

    def __init__(
        self, registry: Registry, labels: Mapping[str, str], waiting: WaitingRequests
    ) -> None:
        super().__init__()
        self._waiting = waiting
        self._length = Level(
            registry.gauge(
                "vlora:requests_before_engine", "Requests that wait in this model.", labels
            )
        )
        exports = exported_stats()
        self._counters = {
            name: Level(registry.counter(exports[name].name, exports[name].help, labels))
            for name in ("superseded", "expired")
        }

    def _write(self) -> None:
        self._length.set(len(self._waiting))
        for name, counter in self._counters.items():
            counter.raise_to(getattr(self._waiting, name))
