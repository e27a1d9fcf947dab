"""The engine's thread, and the one that answers.

Requests come in from any thread, one thread steps the engine, another calls the sinks, so that a
slow client or server never holds up a step.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from vlora import cores
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.pending_cancels import PendingCancels
from vlora.engine.policies.registry import PREDICTING
from vlora.engine.request_state import RequestState
from vlora.errors import Cancelled, Internal, InvalidArgument, Unavailable, VLoraError
from vlora.lora.store import AdapterStore
from vlora.metrics import EngineStats
from vlora.request import MIN_STOPPABLE_ID, Output, OutputSink, Request, gathered

log = logging.getLogger(__name__)

FATAL_EXIT = 70
"""Exit code of a process whose engine cannot go on (EX_SOFTWARE of sysexits.h)."""

STALL_SECONDS = 0.05
"""How often an engine looks for deadlines while all that is live waits for adapters."""

LAST_WORDS_SECONDS = 5.0
"""How long a failed engine waits for its clients to be told, before its process ends."""


@dataclass
class _Client:
    """Who waits for a request. sink: None while the request is being prepared, after `admit` and
    before `submit`. ended: why it is to be refused then, where it was ended meanwhile."""

    id: str
    sink: OutputSink | None = None
    ended: VLoraError | None = None


class EngineLoop:
    """Owns the engine and its two threads, from construction until `shutdown`.

    A request comes in two calls: `admit` before any work on it, `submit` when its images are
    encoded. From the first on it counts toward the queue's bound and can be ended by `abort` and
    `stop_client`; `withdraw` gives its place back where it comes to nothing in between.

    **Invariant:** each submitted request gets exactly one last output, whatever fails. A fault in
    a row ends its request, one in a forward pass ends those of the step. After any other fault
    (scheduling, bookkeeping) nothing here can be relied on: every request is answered INTERNAL,
    and the process ends with FATAL_EXIT, so that whoever watches it can start another.
    """

    def __init__(
        self,
        engine: Engine,
        max_waiting: int,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        """max_waiting: requests admitted and not yet running, at most."""
        self._engine = engine
        self._max_waiting = max_waiting
        self._end_process = end_process
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], list[Output]]] = deque()
        self._clients: dict[str, _Client] = {}
        self._by_client: defaultdict[str, set[str]] = defaultdict(set)
        self._preparing = 0
        self._to_add = 0
        self._early_stops = PendingCancels()
        self._accepting = True
        self._stopping = False
        self._failed = False
        self._outbox: queue.SimpleQueue[list[Output] | None] = queue.SimpleQueue()
        self._responses = threading.Thread(target=self._respond, name="responses", daemon=True)
        self._steps = threading.Thread(target=self._run, name="engine", daemon=True)
        self.after_outputs: Callable[[], None] = lambda: None
        """Called on the response thread after each round of outputs given to their sinks."""
        engine.adapters.on_change = self._on_news
        engine.watch.start(engine.adapters.stamps)
        self._responses.start()
        self._steps.start()

    @classmethod
    def from_options(
        cls, options: Options, adapter_names: Mapping[str, str] | None = None
    ) -> EngineLoop:
        """Loads checkpoint and adapters and starts. adapter_names: as in `multi_lora.json`."""
        torch.set_num_threads(cores.of(options).engine)
        engine = Engine(options, adapter_names)
        if options.policy in PREDICTING:
            engine.calibrate()
        return cls(engine, options.max_num_waiting)

    @property
    def adapters(self) -> AdapterStore:
        return self._engine.adapters

    @property
    def hidden_size(self) -> int:
        return self._engine.config.hidden

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    # -- on the callers' threads -------------------------------------------------------------

    def admit(self, request_id: str, client_id: str = "") -> None:
        """A place in the queue for a request on which no work has been done yet.

        It is held until the request runs, is refused by `submit`, or is withdrawn. Raises
        Unavailable where the queue is full (with its length) or the server is shutting down,
        InvalidArgument for an id that is live, Cancelled where the client has stopped it already.
        """
        with self._wake:
            if not self._accepting:
                raise self._closed()
            waiting = self._preparing + self._to_add + len(self._engine.scheduler.waiting)
            if waiting >= self._max_waiting:
                raise Unavailable(f"the queue is full: {waiting} requests are waiting")
            if request_id in self._clients:
                raise InvalidArgument(f"a request with id '{request_id}' is live already")
            if len(client_id) >= MIN_STOPPABLE_ID:
                if self._by_client.get(client_id):
                    raise InvalidArgument(f"a request with id '{client_id}' is live already")
                if self._early_stops.take(client_id):
                    raise Cancelled(f"the request '{client_id}' was cancelled")
            self._clients[request_id] = _Client(client_id)
            self._by_client[client_id].add(request_id)
            self._preparing += 1

    def withdraw(self, request_id: str) -> None:
        """Gives an admitted request's place back; no error for one that is submitted or unknown."""
        with self._wake:
            client = self._clients.get(request_id)
            if client is not None and client.sink is None:
                self._forget(request_id)

    def submit(self, request: Request, sink: OutputSink) -> None:
        """Checks the request on the caller's thread and queues it; admits it, where it was not.

        Raises a VLoraError where it is refused; then `sink` is never called. Else `sink` gets
        every output, in order, on the response thread, the last with finish_reason or error.
        """
        if request.id not in self._clients:
            self.admit(request.id, request.client_id)
        try:
            self._check_not_ended(request.id)
            state = self._engine.prepare(request)
            with self._wake:
                self._check_not_ended(request.id)
                self._clients[request.id].sink = sink
                self._preparing -= 1
                self._to_add += 1
                self._inbox.append(partial(self._add, state, time.monotonic()))
                self._wake.notify_all()
        except BaseException:
            self.withdraw(request.id)
            raise

    def _check_not_ended(self, request_id: str) -> None:
        if self._stopping:
            raise self._closed()
        client = self._clients.get(request_id)
        if client is None:
            raise Cancelled("the request was withdrawn")
        if client.ended is not None:
            raise client.ended

    def _closed(self) -> Unavailable:
        if self._failed:
            return Unavailable("the engine has failed, and its process ends")
        return Unavailable("the server is shutting down")

    def abort(self, request_id: str) -> None:
        """Ends a live or admitted request with Cancelled; an unknown id is no error."""
        self._abort(request_id, Cancelled("the request was cancelled"))

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
            self._abort(request_id, Cancelled(f"the request '{client_id}' was cancelled"))

    def _abort(self, request_id: str, reason: VLoraError) -> None:
        with self._wake:
            client = self._clients.get(request_id)
            if client is None:
                return
            if client.sink is None:
                client.ended = reason
                return
            self._inbox.append(partial(self._engine.abort, request_id, reason))
            self._wake.notify_all()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def shutdown(self, drain_seconds: float) -> None:
        """Refuses new requests, lets admitted ones finish for so long, cancels the rest."""
        with self._wake:
            self._accepting = False
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._clients, drain_seconds)
            self._stopping = True
            self._wake.notify_all()
        self._steps.join()
        self._responses.join()
        self._engine.watch.close()
        self._engine.adapters.close()

    # -- the engine's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            for request_id in self._engine.live_ids:
                self._outbox.put(self._engine.abort(request_id, self._ending()))
        except Exception:
            self._fail("the engine")
        self._outbox.put(None)
        if self._failed:
            self._responses.join(LAST_WORDS_SECONDS)
            if self._responses.is_alive():
                log.critical("telling the clients takes too long; the process ends")
                self._end_process(FATAL_EXIT)

    def _turn(self) -> None:
        """What has come in, then one step."""
        with self._wake:
            self._wake.wait_for(self._may_go_on)
            if not self._inbox and not self._stopping and self._engine.stalled:
                self._wake.wait(STALL_SECONDS)
            work = list(self._inbox)
            self._inbox.clear()
        for item in work:
            self._outbox.put(item())
        if not self._engine.idle:
            self._outbox.put(self._engine.step())

    def _may_go_on(self) -> bool:
        return bool(self._inbox) or self._stopping or not self._engine.idle

    def _on_news(self) -> None:
        """An adapter has come, or gone."""
        self._engine.on_news()
        with self._wake:
            self._wake.notify_all()

    def _add(self, state: RequestState, arrival: float) -> list[Output]:
        request_id = state.sequence.id
        try:
            return self._engine.add(state, arrival)
        except Exception:
            log.exception("queueing request %s failed; it is ended", request_id)
            return [Output(request_id, error=Internal("the engine failed on this request"))]
        finally:
            with self._wake:
                self._to_add -= 1

    def _fail(self, who: str) -> None:
        """Nothing new from here on; the response thread tells who waits and ends the process."""
        log.critical(
            "%s cannot go on; its process ends with code %d", who, FATAL_EXIT, exc_info=True
        )
        with self._wake:
            self._failed = self._stopping = True
            self._accepting = False
            self._wake.notify_all()

    def _ending(self) -> VLoraError:
        """Why what is left is ended."""
        if self._failed:
            return Internal("the engine failed, and its process ends; see the server's log")
        return Cancelled("the server is shutting down")

    # -- the response thread -----------------------------------------------------------------

    def _respond(self) -> None:
        try:
            going_on = True
            while going_on:
                news, going_on = self._news()
                for output in news:
                    self._answer(output)
                self.after_outputs()
        except Exception:
            self._fail("the thread that answers")
        reason = self._ending()
        for request_id in list(self._clients):
            self._answer(Output(request_id, error=reason))
        if self._failed:
            self._end_process(FATAL_EXIT)

    def _news(self) -> tuple[list[Output], bool]:
        """What nobody has been told yet, once there is some, and whether more will come.

        Where telling takes longer than a step (a response costs a millisecond or so on a busy
        machine) what has gathered goes out as one response a request: otherwise answers would
        fall further and further behind the engine.
        """
        found: list[Output] = []
        steps = self._outbox.get()
        while steps is not None:
            found += steps
            try:
                steps = self._outbox.get_nowait()
            except queue.Empty:
                return gathered(found), True
        return gathered(found), False

    def _answer(self, output: Output) -> None:
        client = self._clients.get(output.request_id)
        if client is None or client.sink is None:
            return
        if output.finished:
            with self._wake:
                self._forget(output.request_id)
        try:
            client.sink(output)
        except Exception:
            log.exception("answering request %s failed; it is ended", output.request_id)
            self.abort(output.request_id)

    def _forget(self, request_id: str) -> None:
        """Holds the lock."""
        client = self._clients.pop(request_id)
        if client.sink is None:
            self._preparing -= 1
        same = self._by_client[client.id]
        same.discard(request_id)
        if not same:
            del self._by_client[client.id]
            if len(client.id) >= MIN_STOPPABLE_ID:
                self._early_stops.ended(client.id)
        if not self._clients:
            self._wake.notify_all()
