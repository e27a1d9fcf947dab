"""The engine's thread, which runs its steps, and the response thread, which sends their outputs."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import torch

from vlora import cores
from vlora.adapters.store import AdapterStore
from vlora.config import Options
from vlora.engine.engine import Engine
from vlora.engine.requests import RequestState
from vlora.errors import (
    SHUTTING_DOWN,
    Cancelled,
    Internal,
    InvalidArgument,
    Unavailable,
    VLoraError,
)
from vlora.live_requests import LiveRequest, RequestTable, State
from vlora.metrics import EngineStats
from vlora.request import MIN_STOPPABLE_ID, Output, OutputSink, Request, coalesce

log = logging.getLogger(__name__)

FATAL_EXIT = 70  # Exit code of a process whose engine cannot continue (EX_SOFTWARE in sysexits.h).
STALL_SECONDS = 0.05  # Interval of checking deadlines while all requests wait for adapters.
LAST_OUTPUTS_SECONDS = 5.0  # Maximum time for sending the last outputs of a failed engine.


class EngineLoop:
    """Owner of the engine and its two threads, from construction until `shutdown`.

    A request takes two calls: `admit` before any work is done on it, and `submit` when its images
    are encoded. From `admit` on, it is in the table, counts toward the limit of the queue
    until it runs, and can be ended by `abort` and `stop_client`. If it is never submitted, its
    owner removes it from the table.

    **Invariant:** each submitted request gets exactly one last output, whatever fails. A fault in a
    row ends its request. A fault in a forward pass ends the requests of the step. After any other
    fault (in scheduling or bookkeeping) the engine's state cannot be trusted. Every request is then
    answered with INTERNAL, and the process ends with FATAL_EXIT, so that its supervisor can start
    another.
    """

    def __init__(
        self,
        engine: Engine,
        max_waiting: int,
        table: RequestTable | None = None,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._end_process = end_process
        self.table = RequestTable() if table is None else table
        self._wake = self.table.changed
        self._inbox: deque[Callable[[], list[Output]]] = deque()
        self._in_engine = 0  # Requests of the table that were added to the engine.
        self._accepting = True
        self._hands_over = False
        self._stopping = False
        self._failed = False
        self._outbox: queue.SimpleQueue[list[Output] | None] = queue.SimpleQueue()
        self._responses = threading.Thread(target=self._respond, name="responses", daemon=True)
        self._steps = threading.Thread(target=self._run, name="engine", daemon=True)
        # Called on the response thread after each round of outputs.
        self.after_outputs: Callable[[], None] = lambda: None
        engine.adapters.workers.on_post = self._on_adapters_changed
        engine.watch.start(engine.adapters.folders.stamps)
        self._responses.start()
        self._steps.start()

    @classmethod
    def from_options(
        cls, options: Options, adapter_names: Mapping[str, str] | None = None
    ) -> EngineLoop:
        """Load the checkpoint and the adapters (name → folder), and return the started loop."""
        torch.set_num_threads(cores.split_threads(options).engine)
        engine = Engine(options, adapter_names)
        engine.check_first_step(options.model)
        if engine.scheduler.policy.uses_costs:
            engine.calibrate()
        table = RequestTable(options.limits.max_in_flight_bytes)
        return cls(engine, options.max_num_waiting, table)

    @property
    def adapters(self) -> AdapterStore:
        return self._engine.adapters

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    # -- on the callers' threads -------------------------------------------------------------

    def admit(self, entry: LiveRequest, size: int = 0) -> None:
        """Add a request with `size` bytes to the table before any work is done on it.

        Raises Unavailable if the queue is full or the server is shutting down, and the errors of
        `RequestTable.admit`.
        """
        with self._wake:
            if not self._accepting:
                raise self._closed()
            waiting = self._waiting
            if waiting >= self._max_waiting:
                raise Unavailable(f"the queue is full: {waiting} requests are waiting")
            self.table.admit(entry, size)

    @property
    def _waiting(self) -> int:
        """Number of requests that are not running, with those that the engine does not have."""
        return len(self.table) - self._in_engine + len(self._engine.scheduler.waiting)

    def share(self, entry: LiveRequest, tenant: str | None) -> None:
        """Note the tenant of an admitted request. Raises Unavailable beyond its share."""
        if tenant is not None:
            with self._wake:
                queued = [one.request.sampling.cache_salt for one in self._engine.scheduler.waiting]
                free = self._max_waiting - self._waiting + 1
                self.table.share(entry, tenant, free, queued.count(tenant))

    def submit(self, request: Request, sink: OutputSink) -> None:
        """Check a request on the caller's thread and queue it; admit it first if necessary.

        Raises a VLoraError if the request is refused, and then never calls `sink`. Otherwise `sink`
        receives every output in order, on the response thread. The last output has a
        `finish_reason` or an `error`.
        """
        entry = self.table.get(request.id)
        if entry is None:
            entry = LiveRequest(request.id, request.client_id)
            self.admit(entry)
        state = None
        try:
            self._check_not_ended(entry)
            state = self._engine.prepare(request)
            with self._wake:
                self._check_not_ended(entry)
                entry.sink, entry.state = sink, State.SUBMITTED
                self._inbox.append(partial(self._add, entry, state, request.arrival))
                self._wake.notify_all()
        except BaseException as error:
            if state is not None:
                self._engine.discard(state)
            self.table.end(entry, error)
            raise

    def _check_not_ended(self, entry: LiveRequest) -> None:
        if self._stopping or self._hands_over:
            raise self._closed()
        if entry.cancelled is not None:
            raise entry.cancelled

    def _closed(self) -> Unavailable:
        if self._failed:
            return Unavailable("the engine has failed, and its process ends")
        return Unavailable(SHUTTING_DOWN)

    def abort(self, request_id: str, reason: VLoraError | None = None) -> bool:
        """End a request with `reason`, by default Cancelled. An unknown id is ignored.

        Returns True if the request waited for a thread of its service, and has ended.
        """
        entry = self.table.get(request_id)
        if entry is None:
            return False
        reason = reason or Cancelled("the request was cancelled")
        if self.table.cancel(entry, reason):
            return True
        with self._wake:
            if entry.state in (State.SUBMITTED, State.IN_ENGINE):
                self._inbox.append(partial(self._engine.abort, request_id, reason))
                self._wake.notify_all()
        return False

    def stop_client(self, client_id: str) -> list[str]:
        """End the requests with this client id with Cancelled; return the ids of those that waited
        for a thread of their service.

        If there are none, the cancellation is stored for a while, because the images of the request
        may still be in the encoder. Raises InvalidArgument for an id that is too short to be
        unique.
        """
        if len(client_id) < MIN_STOPPABLE_ID:
            raise InvalidArgument(
                f"'cancel' = '{client_id}' is too short; the id must have at least"
                f" {MIN_STOPPABLE_ID} characters, because load tools reuse shorter ids"
            )
        reason = Cancelled(f"the request '{client_id}' was cancelled")
        found = self.table.requests_to_cancel(client_id)
        return [entry.id for entry in found if self.abort(entry.id, reason)]

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def shutdown(self, drain_seconds: float, hand_over: bool = False) -> None:
        """Refuse new requests, let admitted ones finish for `drain_seconds`, cancel the rest.

        hand_over: whether to refuse admitted ones that have not begun, for another server.
        """
        with self._wake:
            self._accepting = False
            self._hands_over = hand_over
            if hand_over:
                self._inbox.append(self._refuse_unstarted)
            self._wake.notify_all()
        if hand_over:
            for entry in self.table:
                self.table.end_waiting(entry, self._closed())
        with self._wake:
            self._wake.wait_for(lambda: not self.table, drain_seconds)
            self._stopping = True
            self._wake.notify_all()
        self._steps.join()
        self._responses.join()
        self._engine.watch.close()
        self._engine.adapters.close()
        self._engine.close()

    # -- the engine's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._engine.slab.device.make_current()
            while not self._stopping:
                self._run_once()
            for request_id in self._engine.request_ids:
                self._outbox.put(self._engine.abort(request_id, self._shutdown_reason()))
        except BaseException:  # A panic of a Rust library is not an Exception.
            self._fail("the engine's thread")
        self._outbox.put(None)
        if self._failed:
            self._responses.join(LAST_OUTPUTS_SECONDS)
            if self._responses.is_alive():
                log.critical(
                    "sending the last outputs takes over %g s; the process ends",
                    LAST_OUTPUTS_SECONDS,
                )
                self._end_process(FATAL_EXIT)

    def _run_once(self) -> None:
        with self._wake:
            self._wake.wait_for(self._has_work)
            if not self._inbox and not self._stopping and self._engine.stalled:
                self._wake.wait(STALL_SECONDS)
            work = list(self._inbox)
            self._inbox.clear()
        for item in work:
            self._outbox.put(item())
        if not self._engine.idle:
            self._outbox.put(self._engine.step())
        if self._engine.idle:
            # Pinned adapters may have waited for the pages of the last request.
            self._engine.adapters.apply()

    def _has_work(self) -> bool:
        busy = self._stopping or not self._engine.idle
        return busy or bool(self._inbox) or self._engine.adapters.workers.pending

    def _on_adapters_changed(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _add(self, entry: LiveRequest, state: RequestState, arrival: float) -> list[Output]:
        try:
            return self._engine.add(state, arrival)
        except Exception:
            log.exception("queueing request %s failed; it is ended", entry.id)
            self._engine.discard(state)
            return [Output(entry.id, error=Internal("the engine failed on this request"))]
        finally:
            with self._wake:
                entry.state = State.IN_ENGINE
                self._in_engine += 1

    def _refuse_unstarted(self) -> list[Output]:
        unstarted = [one.id for one in self._engine.scheduler.waiting if not one.started]
        return [one for id in unstarted for one in self._engine.abort(id, self._closed())]

    def _fail(self, thread: str) -> None:
        """Refuse requests. The response thread answers all that have not ended, and then exits."""
        log.critical("%s failed; the process ends with code %d", thread, FATAL_EXIT, exc_info=True)
        with self._wake:
            self._failed = self._stopping = True
            self._accepting = False
            self._wake.notify_all()

    def _shutdown_reason(self) -> VLoraError:
        if self._failed:
            return Internal("the engine failed, and its process ends; see the server's log")
        return Cancelled("the server is shutting down")

    # -- the response thread -----------------------------------------------------------------

    def _respond(self) -> None:
        try:
            more = True
            while more:
                outputs, more = self._next_outputs()
                for output in outputs:
                    self._answer(output)
                self.after_outputs()
        except BaseException:
            self._fail("the response thread")
        reason = self._shutdown_reason()
        for entry in self.table:
            if self._failed:  # Nobody else ends a request that waits for a thread of its service.
                self.table.end_waiting(entry, reason)
            self._answer(Output(entry.id, error=reason))
        if self._failed:
            self._end_process(FATAL_EXIT)

    def _next_outputs(self) -> tuple[list[Output], bool]:
        """Wait for outputs; return all that are queued, and whether more will come."""
        # If sending takes longer than a step, separate responses would be delayed more with each
        # step, so the outputs of several steps are joined (decision 55).
        outputs: list[Output] = []
        of_step = self._outbox.get()
        while of_step is not None:
            outputs += of_step
            try:
                of_step = self._outbox.get_nowait()
            except queue.Empty:
                return coalesce(outputs), True
        return coalesce(outputs), False

    def _answer(self, output: Output) -> None:
        entry = self.table.get(output.request_id)
        if entry is None or entry.sink is None:
            return
        if output.finished:
            with self._wake:
                self._in_engine -= entry.state is State.IN_ENGINE
                self.table.remove(entry)
        try:
            entry.sink(output)
        except Exception:
            log.exception("answering request %s failed; it is ended", output.request_id)
            self.abort(output.request_id)
