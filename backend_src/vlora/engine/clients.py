"""Requests that were admitted and have not ended, by request id and by the client's id."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from vlora.engine.pending_cancels import PendingCancels
from vlora.errors import Cancelled, InvalidArgument, VLoraError
from vlora.request import MIN_STOPPABLE_ID, OutputSink


@dataclass
class Client:
    """A request that was admitted and has not ended.

    id: id that the client gave; may be empty.
    sink: function that receives the outputs; None until the request is submitted.
    ended: error that `submit` must raise because the request was cancelled before `submit` was
        called; else None.
    """

    id: str
    sink: OutputSink | None = None
    ended: VLoraError | None = None


class Clients:
    """Admitted requests by request id and by client id. Not thread-safe: the callers hold the lock
    of `EngineLoop`.

    preparing: number of requests that were admitted and not yet submitted.
    """

    def __init__(self) -> None:
        self.preparing = 0
        self._clients: dict[str, Client] = {}
        self._by_client_id: defaultdict[str, set[str]] = defaultdict(set)
        self._pending_cancels = PendingCancels()

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._clients

    def get(self, request_id: str) -> Client | None:
        return self._clients.get(request_id)

    @property
    def request_ids(self) -> list[str]:
        return list(self._clients)

    def admit(self, request_id: str, client_id: str) -> None:
        """Add a request that is being prepared.

        Raises InvalidArgument if the request id is in use, or if the client id is in use and has at
        least MIN_STOPPABLE_ID characters. Raises Cancelled if the client has cancelled the request
        already.
        """
        if request_id in self._clients:
            raise InvalidArgument(f"the id '{request_id}' is in use by another request")
        if len(client_id) >= MIN_STOPPABLE_ID:
            if self._by_client_id.get(client_id):
                raise InvalidArgument(f"the id '{client_id}' is in use by another request")
            if self._pending_cancels.take(client_id):
                raise Cancelled(f"the request '{client_id}' was cancelled")
        self._clients[request_id] = Client(client_id)
        self._by_client_id[client_id].add(request_id)
        self.preparing += 1

    def submit(self, request_id: str, sink: OutputSink) -> None:
        """Set the sink of an admitted request."""
        self._clients[request_id].sink = sink
        self.preparing -= 1

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended or that will never be submitted."""
        client = self._clients.pop(request_id)
        if client.sink is None:
            self.preparing -= 1
        request_ids = self._by_client_id[client.id]
        request_ids.discard(request_id)
        if not request_ids:
            del self._by_client_id[client.id]
            if len(client.id) >= MIN_STOPPABLE_ID:
                self._pending_cancels.ended(client.id)

    def requests_to_cancel(self, client_id: str) -> list[str]:
        """Return the ids of the requests with this client id.

        If there are none, and none has ended recently, the cancellation is stored for a while (see
        `PendingCancels`). A request that arrives with this client id meanwhile is cancelled.
        """
        request_ids = sorted(self._by_client_id.get(client_id, ()))
        if not request_ids:
            self._pending_cancels.add(client_id)
        return request_ids
