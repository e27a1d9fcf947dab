"""The table of a model's live requests: each from its arrival until its last response.

It also handles deadlines, newer requests of the same stream, and the limit of bytes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

from vlora.errors import Cancelled, InvalidArgument, Unavailable, VLoraError
from vlora.request import MIN_STOPPABLE_ID, Freshness, OutputSink

# Seconds for which a cancellation is stored. Encoding the images of its request takes less.
PATIENCE_SECONDS = 30.0
MAX_IDS = 4096  # Maximum number of stored cancellations, and of ids of ended requests.


class State(IntEnum):
    """State of a live request, which decides who may end it."""

    READING = 0  # The thread that received the request ends it.
    WAITING = 1  # The first thread that ends the request, or takes it, owns it.
    TAKEN = 2  # The thread that took the request ends it.
    SUBMITTED = 3  # The request is on its way to the engine's thread, which ends it.
    IN_ENGINE = 4
    ENDED = 5


class LiveRequest:
    """A request that has no last response yet. Its table changes its state.

    id, client_id: the server's unique id, and the client's, by which `cancel` finds it, or empty.
    freshness: arrival, deadline and stream; set when the request begins to wait.
    size: bytes of the request's images, features and text.
    moved_on: whether it does not wait here, because another part of the server works on it.
    pinned: whether it stays in its table until `remove`, because its bytes are still in use.
    cancelled: reason for which its owner must end the request, or None.
    sink: function that receives the engine's outputs; None until the request is submitted.
    tenant: the tenant of the request, if its client names one.
    """

    def __init__(self, id: str, client_id: str = "") -> None:
        self.id = id
        self.client_id = client_id
        self.state = State.READING
        self.freshness = Freshness(-math.inf)
        self.size = 0
        self.moved_on = False
        self.pinned = False
        self.cancelled: VLoraError | None = None
        self.sink: OutputSink | None = None
        self.tenant: str | None = None

    @property
    def has_own_id(self) -> bool:
        """True if the client's id is long enough to be unique."""
        return len(self.client_id) >= MIN_STOPPABLE_ID

    def fail(self, error: BaseException) -> None:
        """Answer the request with an error; never raises."""


class RequestTable:
    """Live requests by id. Thread-safe.

    **Invariant:** a request ends once. A thread that takes it, or that received it, ends it by
    `end`. All others use `cancel`, which ends only a waiting request at once.

    changed: lock of the table and of the states in it, notified when the table becomes empty.
    bytes: number of bytes that all requests have.
    superseded, expired: numbers of requests that ended for these reasons while they waited.
    """

    def __init__(
        self, max_bytes: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.changed = threading.Condition()
        self.bytes = 0
        self.superseded = 0
        self.expired = 0
        self._max_bytes = max_bytes
        self._clock = clock
        self._requests: dict[str, LiveRequest] = {}
        self._by_client_id: defaultdict[str, set[LiveRequest]] = defaultdict(set)
        self._early_cancels = EarlyCancels(clock)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        with self.changed:
            return iter(list(self._requests.values()))

    def get(self, request_id: str) -> LiveRequest | None:
        return self._requests.get(request_id)

    @property
    def waiting(self) -> int:
        """Number of requests that wait here for the next part of the server."""
        return sum(
            State.WAITING <= one.state <= State.SUBMITTED and not one.moved_on for one in self
        )

    def add(self, request: LiveRequest, size: int = 0) -> None:
        """Add a request with `size` bytes. Raises the errors of `resize`, and keeps it even then.

        Its owner must end it after an error.
        """
        with self.changed:
            self._requests[request.id] = request
            self._by_client_id[request.client_id].add(request)
        self.resize(request, size)

    def admit(self, request: LiveRequest, size: int = 0) -> None:
        """Add a request whose ids must be unique and which must not be cancelled already.

        Raises InvalidArgument if the id is in use, or the client's id is in use and long enough to
        be unique; Cancelled if the client has cancelled the request; and the errors of `add`.
        """
        with self.changed:
            if request.id in self._requests:
                raise InvalidArgument(f"the id '{request.id}' is in use by another request")
            if request.has_own_id:
                if self._by_client_id.get(request.client_id):
                    raise InvalidArgument(
                        f"the id '{request.client_id}' is in use by another request"
                    )
                if self._early_cancels.take(request.client_id):
                    raise Cancelled(f"the request '{request.client_id}' was cancelled")
            self.add(request, size)

    def remove(self, request: LiveRequest) -> None:
        """Remove a request that has ended or whose end its owner sends. Remove it only once."""
        with self.changed:
            request.state = State.ENDED
            if self._requests.get(request.id) is not request:
                return
            del self._requests[request.id]
            self.bytes -= request.size
            same_client = self._by_client_id[request.client_id]
            same_client.remove(request)
            if not same_client:
                del self._by_client_id[request.client_id]
                if request.has_own_id:
                    self._early_cancels.ended(request.client_id)
            if not self._requests:
                self.changed.notify_all()

    def resize(self, request: LiveRequest, size: int) -> None:
        """Set the number of bytes that a request has.

        Raises Unavailable if the total would exceed the limit at present, and InvalidArgument if
        the request alone exceeds it. After an error, the request's previous number is unchanged.
        """
        if size > self._max_bytes:
            raise InvalidArgument(
                f"the request has {size} bytes of images and features; the limit of all requests"
                f" is {self._max_bytes} ('max_in_flight_bytes')"
            )
        with self.changed:
            others = self.bytes - request.size
            if others + size > self._max_bytes:
                raise Unavailable(
                    f"the requests in flight hold {others} bytes of images and features, and this"
                    f" one has {size}; the limit is {self._max_bytes} ('max_in_flight_bytes')"
                )
            self.bytes = others + size
            request.size = size

    def share(
        self, request: LiveRequest, tenant: str | None, free: int, in_engine: int = 0
    ) -> None:
        """Note the tenant of a new request. Raises Unavailable if it takes too much of the queue.

        A tenant may have at most as many waiting requests as are left for all others, so that none
        can fill the queue. free: number of free places, the one of this request included.
        in_engine: number of the tenant's requests that wait in the engine.
        """
        if tenant is None:
            return
        with self.changed:
            request.tenant = tenant
            own = in_engine + sum(
                one.tenant == tenant and one.state is not State.IN_ENGINE
                for one in self._requests.values()
            )
        if own > free:
            raise Unavailable(f"the tenant's share of the queue is full: {own} requests")

    # -- waiting -----------------------------------------------------------------------------

    def wait(self, request: LiveRequest, freshness: Freshness, *, pinned: bool = False) -> None:
        """Let a request wait. If it supersedes waiting requests of its stream, end those.

        Raises the reason if the request was cancelled while it was read.
        """
        with self.changed:
            if request.cancelled is not None:
                raise request.cancelled
            older = [
                one
                for one in (self if freshness.supersede else ())
                if one.state is State.WAITING and one.freshness.is_superseded_by(freshness)
            ]
            request.freshness, request.pinned = freshness, pinned
            request.state = State.WAITING
        for one in older:
            if self.end_waiting(one, freshness.superseded_error()):
                with self.changed:
                    self.superseded += 1

    def take(self, request: LiveRequest) -> bool:
        """Take a waiting request; return whether the caller owns it now.

        It may have ended before, or this call ends it because its deadline has passed.
        """
        with self.changed:
            if request.state is not State.WAITING:
                return False
            request.state = State.TAKEN
            is_late = request.freshness.deadline <= self._clock()
            self.expired += is_late
        if is_late:
            self.end(request, request.freshness.late_error())
        return not is_late

    def end_late(self) -> None:
        """End the waiting requests whose deadline has passed. Call this regularly."""
        now = self._clock()
        for request in self:
            if request.state is State.WAITING and request.freshness.deadline <= now:
                self.take(request)

    def end_waiting(self, request: LiveRequest, reason: BaseException) -> bool:
        """End a request if it waits; return whether this call has ended it."""
        with self.changed:
            if request.state is not State.WAITING:
                return False
            request.state = State.TAKEN
        self.end(request, reason)
        return True

    # -- the end -----------------------------------------------------------------------------

    def end(self, request: LiveRequest, error: BaseException) -> None:
        """Answer a request with an error, unless it has ended. Remove it unless it is pinned."""
        with self.changed:
            has_ended = request.state is State.ENDED
            request.state = State.ENDED
            if not request.pinned:
                self.remove(request)
        if not has_ended:
            request.fail(error)

    def cancel(self, request: LiveRequest, reason: VLoraError) -> bool:
        """End a waiting request and return True. Note the reason for the owner of any other."""
        request.cancelled = reason
        return self.end_waiting(request, reason)

    def cancel_client(self, client_id: str, reason: VLoraError) -> None:
        """Cancel the requests with a client's id, unless it is too short to be unique."""
        if len(client_id) >= MIN_STOPPABLE_ID:
            for request in self.requests_to_cancel(client_id):
                self.cancel(request, reason)

    def requests_to_cancel(self, client_id: str) -> list[LiveRequest]:
        """Return the requests with this client's id.

        If there are none, and none ended recently, remember the id: a request that arrives with it
        within PATIENCE_SECONDS is cancelled at once.
        """
        with self.changed:
            found = list(self._by_client_id.get(client_id, ()))
            if not found:
                self._early_cancels.add(client_id)
            return found


class EarlyCancels:
    """Cancellations that arrive before their requests, by the client's id. Not thread-safe.

    A client can cancel a request of an ensemble while its images are encoded (decision 18). A
    cancellation that comes after the end of its request is not stored, because it would cancel a
    new request with the same id.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending: OrderedDict[str, float] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def ended(self, client_id: str) -> None:
        self._ended[client_id] = None
        self._ended.move_to_end(client_id)
        _evict_oldest(self._ended)

    def add(self, client_id: str) -> None:
        """Store a cancellation for which there is no request, unless one ended recently."""
        if client_id not in self._ended:
            self._pending[client_id] = self._clock()
            _evict_oldest(self._pending)

    def take(self, client_id: str) -> bool:
        """Remove a new request's cancellation; return whether there was one that is not too old."""
        since = self._pending.pop(client_id, None)
        return since is not None and self._clock() - since <= PATIENCE_SECONDS


def _evict_oldest(entries: OrderedDict[str, Any]) -> None:
    if len(entries) > MAX_IDS:
        entries.popitem(last=False)
