"""The base of the models' services: live requests, their cancellation and their end.

A watcher ends waiting requests after their deadline, and notices clients that disconnected.
"""

from __future__ import annotations

import logging
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from vlora.config import Limits
from vlora.errors import SHUTTING_DOWN, Cancelled, Unavailable
from vlora.live_requests import LiveRequest, RequestTable
from vlora.metrics import BEFORE_ENGINE, WAITING, EngineStats, exported_stats
from vlora.request import Freshness
from vlora.serving.arrivals import ArrivalStamps
from vlora.serving.codec import is_cancel
from vlora.serving.metrics import Exporter, Levels, Registry, level
from vlora.serving.responder import Responder, as_vlora_error
from vlora.serving.tenant_pool import TenantPool
from vlora.serving.tensors import Tensors

log = logging.getLogger(__name__)


class ServedRequest(LiveRequest):
    """A live request with its responder.

    action: what the service does with the request, for the message of an unexpected error.
    work: the rest of the work, for a pool thread; None if there is none or the request has ended.
    is_passed_on: whether another model was asked to cancel the request.
    """

    def __init__(self, client_id: str, responder: Responder, action: str) -> None:
        super().__init__(uuid.uuid4().hex, client_id)
        self.responder = responder
        self.action = action
        self.work: Callable[[], None] | None = None
        self.is_passed_on = False

    def fail(self, error: BaseException) -> None:
        self.work = None
        try:
            self.responder.fail(as_vlora_error(error, self.action))
        except Exception:
            log.exception("could not send an error to its client")

    def answer(self, tensors: Tensors) -> None:
        """Send the only response, or an error if it cannot be sent; never raises."""
        try:
            self.responder.send(tensors, final=True)
        except Exception as error:
            self.fail(error)


class Service(ABC):
    """Answers the requests of one model. It owns the watcher thread."""

    action = "answering the request"
    watch_seconds = 0.1  # Interval of checking deadlines and asking responders about their clients.
    asks_clients = True  # Each question is a call of the server.

    def __init__(self, table: RequestTable, limits: Limits, stamps: ArrivalStamps) -> None:
        self.table = table
        self._limits = limits
        self._stamps = stamps
        self._refuses = False
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="request-watch", daemon=True)
        self._watcher.start()

    def handle(
        self, tensors: Tensors, parameters: Mapping[str, Any], client_id: str, responder: Responder
    ) -> None:
        """Answer one request; never raises. The tensors may become invalid after this returns.

        The input `cancel` cancels the requests with this client id, with an empty answer.
        """
        request = ServedRequest(client_id, responder, self.action)
        try:
            if is_cancel(tensors):
                self._cancel(client_id)
                responder.send({}, final=True)
            else:
                self._start(request, tensors, parameters)
        except BaseException as error:  # A panic of a Rust library is not an Exception.
            self.table.end(request, error)

    def refuse(self) -> None:
        self._refuses = True

    def close(self) -> None:
        self.refuse()
        self._closed.set()
        self._watcher.join()
        self.hand_over()

    def hand_over(self) -> None:
        """Refuse new requests and those that wait, which another server may answer."""
        self.refuse()
        for request in self.table:
            self.table.end_waiting(request, Unavailable(SHUTTING_DOWN))

    @abstractmethod
    def _start(
        self, request: ServedRequest, tensors: Tensors, parameters: Mapping[str, Any]
    ) -> None:
        """Answer a request at once, or let it wait for another thread. Raise to refuse it."""

    def retry(self) -> None:
        """Try postponed requests again. Called every `watch_seconds`; must not raise."""
        return

    def _check_open(self) -> None:
        if self._refuses:
            raise Unavailable(SHUTTING_DOWN)

    def _cancel(self, client_id: str) -> None:
        self.table.cancel_client(client_id, Cancelled(f"the request '{client_id}' was cancelled"))

    def _disconnected(self, request: ServedRequest) -> None:
        self.table.end_waiting(request, Cancelled("the client has disconnected"))

    def _wait_for(
        self,
        pool: TenantPool,
        request: ServedRequest,
        freshness: Freshness,
        work: Callable[[], None],
    ) -> None:
        """Let a request wait for a pool thread to do `work`, which must take it from the table."""
        request.work = work
        self.table.wait(request, freshness)
        pool.submit(request.tenant, partial(self._work_on, request))

    def _work_on(self, request: ServedRequest) -> None:
        work, request.work = request.work, None
        if work is None:
            return  # The request ended while it waited for this thread.
        try:
            work()
        except BaseException as error:
            self.table.end(request, error)

    def _watch(self) -> None:
        while not self._closed.wait(self.watch_seconds):
            self.table.end_late()
            self.retry()
            for request in self.table if self.asks_clients else ():
                try:
                    if isinstance(request, ServedRequest) and request.responder.is_cancelled():
                        self._disconnected(request)
                except Exception:
                    log.exception("could not check a request for cancellation")


def with_waiting(stats: EngineStats, table: RequestTable) -> EngineStats:
    """Return a copy of `stats` whose counts include the requests that the engine does not have."""
    return replace(
        stats,
        waiting=stats.waiting + table.waiting,
        before_engine=table.waiting,
        superseded=stats.superseded + table.superseded,
        expired=stats.expired + table.expired,
        aborted=stats.aborted + table.superseded + table.expired,
    )


class WaitingExporter(Exporter):
    """Exports how many requests wait in a model before the engine, and how many ended there."""

    def __init__(self, registry: Registry, labels: Mapping[str, str], table: RequestTable) -> None:
        super().__init__()
        self._table = table
        # Readers of this metric expect one series, that of the engine's model.
        self._share = level(registry, {**labels, "model": "lmm"}, WAITING)
        exports = exported_stats()
        own = {name: exports[name] for name in ("superseded", "expired")}
        self._levels = Levels(registry, labels, {"waiting": BEFORE_ENGINE, **own})

    def _write(self) -> None:
        self._share(self._table.waiting)
        self._levels.write(self._table)
