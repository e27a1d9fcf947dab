"""The engine's thread, and the one that answers.

Requests come in from any thread, one thread steps the engine, another calls the sinks, so that a
slow client or server never holds up a step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from vlora import cores
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.request_state import RequestState
from vlora.engine.stops import EarlyStops
from vlora.errors import Cancelled, Internal, InvalidArgument, Unavailable, VLoraError
from vlora.lora.store import AdapterStore
from vlora.metrics import EngineStats
from vlora.request import MIN_STOPPABLE_ID, Output, OutputSink, Request

log = logging.getLogger(__name__)


class EngineLoop:
    """Owns the engine and its two threads, from construction until `shutdown`."""

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], list[Output]]] = deque()
        self._sinks: dict[str, OutputSink] = {}
        self._by_client: defaultdict[str, set[str]] = defaultdict(set)
        self._client_of: dict[str, str] = {}
        self._early_stops = EarlyStops()
        self._accepting = True
        self._stopping = False
        self._outbox: queue.SimpleQueue[list[Output] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name="engine", daemon=True),
            threading.Thread(target=self._respond, name="responses", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def from_options(
        cls, options: Options, adapter_names: Mapping[str, str] | None = None
    ) -> EngineLoop:
        """Loads checkpoint and adapters and starts. adapter_names: as in `multi_lora.json`."""
        torch.set_num_threads(cores.of(options).engine)
        return cls(Engine(options, adapter_names), options.max_num_waiting)

    @property
    def adapters(self) -> AdapterStore:
        return self._engine.adapters

    @property
    def hidden_size(self) -> int:
        return self._engine.config.hidden

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def submit(self, request: Request, sink: OutputSink) -> None:
        """Checks the request on the caller's thread and queues it.

        Raises a VLoraError where it is refused; then `sink` is never called. Else `sink` gets
        every output, in order, on the response thread, the last with finish_reason or error.
        """
        state = self._engine.prepare(request)
        with self._wake:
            self._admit(request)
            self._sinks[request.id] = sink
            self._by_client[request.client_id].add(request.id)
            self._client_of[request.id] = request.client_id
            arrival = time.monotonic()
            self._inbox.append(partial(self._add, state, arrival))
            self._wake.notify()

    def check_room(self, beside: int = 0) -> None:
        """Raises Unavailable where a request would be refused now whatever it asks. `beside`: how
        many more wait to be submitted."""
        if not self._accepting:
            raise Unavailable("the server is shutting down")
        waiting = len(self._engine.scheduler.waiting) + len(self._inbox) + beside
        if waiting >= self._max_waiting:
            raise Unavailable(f"the queue is full: {waiting} requests are waiting")

    def _admit(self, request: Request) -> None:
        """Whether this loop takes another request now; holds the lock."""
        self.check_room()
        if request.id in self._sinks:
            raise InvalidArgument(f"a request with id '{request.id}' is live already")
        client_id = request.client_id
        if len(client_id) >= MIN_STOPPABLE_ID:
            if self._by_client.get(client_id):
                raise InvalidArgument(f"a request with id '{client_id}' is live already")
            if self._early_stops.take(client_id):
                raise Cancelled(f"the request '{client_id}' was cancelled")

    def abort(self, request_id: str) -> None:
        """Ends a live request with Cancelled; an unknown id is no error."""
        self._post(partial(self._engine.abort, request_id))

    def stop_client(self, client_id: str) -> None:
        """Ends the live request of this client id with Cancelled, or the one that comes soon, if
        its images are still being encoded; an unknown id is no error.

        Raises InvalidArgument for an id that is too short to be anyone's own.
        """
        if len(client_id) < MIN_STOPPABLE_ID:
            raise InvalidArgument(
                f"'cancel' needs the id of the request to end, of at least {MIN_STOPPABLE_ID}"
                f" characters, not '{client_id}': load tools reuse shorter ones"
            )
        with self._wake:
            request_ids = sorted(self._by_client.get(client_id, ()))
            if not request_ids:
                self._early_stops.wait(client_id)
        for request_id in request_ids:
            reason = Cancelled(f"the request '{client_id}' was cancelled")
            self._post(partial(self._engine.abort, request_id, reason))

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def shutdown(self, drain_seconds: float) -> None:
        """Refuses new requests, lets live ones finish for so long, cancels the rest."""
        with self._wake:
            self._accepting = False
        deadline = time.monotonic() + drain_seconds
        while self._sinks and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        for thread in self._threads:
            thread.join()

    # -- the engine's thread -----------------------------------------------------------------

    def _post(self, work: Callable[[], list[Output]]) -> None:
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    def _add(self, state: RequestState, arrival: float) -> list[Output]:
        self._engine.add(state, arrival)
        return []

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or self._stopping or not self._engine.idle)
                work = list(self._inbox)
                self._inbox.clear()
                stopping = self._stopping
            for item in work:
                self._outbox.put(item())
            if stopping:
                self._end(self._engine.live_ids, Cancelled("the server is shutting down"))
                self._outbox.put(None)
                return
            self._step()

    def _step(self) -> None:
        """One step; a fault of ours ends the requests it may have touched, not the loop."""
        try:
            self._outbox.put(self._engine.step())
        except Exception:
            log.exception("a step failed; the running requests are ended")
            reason = Internal("the engine failed on this batch; see the server's log")
            self._end(self._engine.running_ids, reason)

    def _end(self, request_ids: Iterable[str], reason: VLoraError) -> None:
        for request_id in request_ids:
            self._outbox.put(self._engine.abort(request_id, reason))

    # -- the response thread -----------------------------------------------------------------

    def _respond(self) -> None:
        while (outputs := self._outbox.get()) is not None:
            for output in outputs:
                self._answer(output)

    def _answer(self, output: Output) -> None:
        request_id = output.request_id
        sink = self._sinks.get(request_id)
        if output.finished:
            with self._wake:
                del self._sinks[request_id]
                client_id = self._client_of.pop(request_id)
                self._by_client[client_id].discard(request_id)
                if not self._by_client[client_id]:
                    del self._by_client[client_id]
                    if len(client_id) >= MIN_STOPPABLE_ID:
                        self._early_stops.ended(client_id)
        if sink is None:
            return
        try:
            sink(output)
        except Exception:
            log.exception("answering request %s failed; it is ended", request_id)
            self.abort(request_id)
