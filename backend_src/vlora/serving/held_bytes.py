"""Bytes that requests hold until they end: encoded images, features, text and metadata."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np

from vlora.errors import InvalidArgument, Unavailable
from vlora.serving.tensors import Array, Tensors, as_bytes

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
