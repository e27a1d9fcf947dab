"""The engine's thread and the response thread.

Any thread may submit requests. One thread runs the steps of the engine. Another calls the sinks, so
that sending outputs slowly never delays a step.
"""

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
from vlora.engine.requests import Clients, RequestState
from vlora.errors import Cancelled, Internal, InvalidArgument, Unavailable, VLoraError
from vlora.metrics import EngineStats
from vlora.request import MIN_STOPPABLE_ID, Output, OutputSink, Request, coalesce

log = logging.getLogger(__name__)

FATAL_EXIT = 70
"""Exit code of a process whose engine cannot continue (EX_SOFTWARE in sysexits.h)."""

STALL_SECONDS = 0.05
"""Interval at which deadlines are checked while all requests wait for adapters."""

LAST_OUTPUTS_SECONDS = 5.0
"""Maximum time for sending the last outputs of a failed engine before its process ends."""


class EngineLoop:
    """Owner of the engine and its two threads, from construction until `shutdown`.

    A request takes two calls: `admit` before any work is done on it, and `submit` when its images
    are encoded. From `admit` on, it counts toward the limit of the queue and can be ended by
    `abort` and `stop_client`. If it is never submitted, `withdraw` frees its position in the
    queue.

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
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        """Start the threads. `max_waiting` is the maximum number of admitted requests that do not
        run yet.
        """
        self._engine = engine
        self._max_waiting = max_waiting
        self._end_process = end_process
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], list[Output]]] = deque()
        self._clients = Clients()
        self._to_add = 0
        """Number of submitted requests that are still in the inbox."""
        self._accepting = True
        self._stopping = False
        self._failed = False
        self._outbox: queue.SimpleQueue[list[Output] | None] = queue.SimpleQueue()
        self._responses = threading.Thread(target=self._respond, name="responses", daemon=True)
        self._steps = threading.Thread(target=self._run, name="engine", daemon=True)
        self.after_outputs: Callable[[], None] = lambda: None
        """Called on the response thread after each round of outputs."""
        engine.adapters.workers.on_post = self._on_adapters_changed
        engine.watch.start(engine.adapters.folders.stamps)
        self._responses.start()
        self._steps.start()

    @classmethod
    def from_options(
        cls, options: Options, adapter_names: Mapping[str, str] | None = None
    ) -> EngineLoop:
        """Load the checkpoint and the adapters (name → folder, as in `multi_lora.json`), and return
        the started loop.
        """
        torch.set_num_threads(cores.split_threads(options).engine)
        engine = Engine(options, adapter_names)
        if engine.scheduler.policy.uses_costs:
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
        """Reserve a position in the queue for a request before any work is done on it.

        The request holds the position until it runs, is refused by `submit`, or is withdrawn.

        Raises Unavailable if the queue is full or the server is shutting down, InvalidArgument if
        an id is in use, and Cancelled if the client has cancelled the request already.
        """
        with self._wake:
            if not self._accepting:
                raise self._closed()
            waiting = self._clients.preparing + self._to_add + len(self._engine.scheduler.waiting)
            if waiting >= self._max_waiting:
                raise Unavailable(f"the queue is full: {waiting} requests are waiting")
            self._clients.admit(request_id, client_id)

    def withdraw(self, request_id: str) -> None:
        """Free the queue position of an admitted request not submitted yet; ignore other ids."""
        with self._wake:
            client = self._clients.get(request_id)
            if client is not None and client.sink is None:
                self._remove(request_id)

    def submit(self, request: Request, sink: OutputSink) -> None:
        """Check a request on the caller's thread and queue it; admit it first if necessary.

        Raises a VLoraError if the request is refused, and then never calls `sink`. Otherwise `sink`
        receives every output in order, on the response thread. The last output has a
        `finish_reason` or an `error`.
        """
        if request.id not in self._clients:
            self.admit(request.id, request.client_id)
        state = None
        try:
            self._check_not_ended(request.id)
            state = self._engine.prepare(request)
            with self._wake:
                self._check_not_ended(request.id)
                self._clients.submit(request.id, sink)
                self._to_add += 1
                self._inbox.append(partial(self._add, state, request.arrival))
                self._wake.notify_all()
        except BaseException:
            if state is not None:
                self._engine.discard(state)
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
        """End a request with Cancelled. An unknown id is ignored."""
        self._abort(request_id, Cancelled("the request was cancelled"))

    def stop_client(self, client_id: str) -> None:
        """End the requests with this client id with Cancelled.

        If there are none, the cancellation is stored for a while, because the images of the request
        may still be in the encoder. Raises InvalidArgument for an id that is too short to be
        unique.
        """
        if len(client_id) < MIN_STOPPABLE_ID:
            raise InvalidArgument(
                f"'cancel' = '{client_id}' is too short; the id must have at least"
                f" {MIN_STOPPABLE_ID} characters, because load tools reuse shorter ids"
            )
        with self._wake:
            request_ids = self._clients.requests_to_cancel(client_id)
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
        """Refuse new requests, wait up to `drain_seconds` for the admitted ones, then cancel the
        rest.
        """
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
        """Wait for work, apply what has arrived, and compute one step."""
        with self._wake:
            self._wake.wait_for(self._has_work)
            if not self._inbox and not self._stopping and self._engine.stalled:
                self._wake.wait(STALL_SECONDS)
            work = list(self._inbox)
            self._inbox.clear()
        for item in work:
            self._outbox.put(item())
        if self._engine.idle:
            self._engine.adapters.apply()
        else:
            self._outbox.put(self._engine.step())

    def _has_work(self) -> bool:
        busy = self._stopping or not self._engine.idle
        return busy or bool(self._inbox) or self._engine.adapters.workers.pending

    def _on_adapters_changed(self) -> None:
        """Wake the engine's thread to apply results of adapter loading. Called from any thread."""
        with self._wake:
            self._wake.notify_all()

    def _add(self, state: RequestState, arrival: float) -> list[Output]:
        request_id = state.sequence.id
        try:
            return self._engine.add(state, arrival)
        except Exception:
            log.exception("queueing request %s failed; it is ended", request_id)
            self._engine.discard(state)
            return [Output(request_id, error=Internal("the engine failed on this request"))]
        finally:
            with self._wake:
                self._to_add -= 1

    def _fail(self, thread: str) -> None:
        """Stop accepting requests. The response thread then answers all requests that have not yet
        ended, and ends the process.
        """
        log.critical("%s failed; the process ends with code %d", thread, FATAL_EXIT, exc_info=True)
        with self._wake:
            self._failed = self._stopping = True
            self._accepting = False
            self._wake.notify_all()

    def _shutdown_reason(self) -> VLoraError:
        """Return the error that ends the remaining requests."""
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
        for request_id in self._clients.request_ids:
            self._answer(Output(request_id, error=reason))
        if self._failed:
            self._end_process(FATAL_EXIT)

    def _next_outputs(self) -> tuple[list[Output], bool]:
        """Wait for outputs; return all that are queued, and whether more will come.

        If sending takes longer than a step, the outputs of several steps are merged into one
        response per request (decision 55). Separate responses would be delayed more with each step.
        """
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
        client = self._clients.get(output.request_id)
        if client is None or client.sink is None:
            return
        if output.finished:
            with self._wake:
                self._remove(output.request_id)
        try:
            client.sink(output)
        except Exception:
            log.exception("answering request %s failed; it is ended", output.request_id)
            self.abort(output.request_id)

    def _remove(self, request_id: str) -> None:
        """Remove a request, and wake `shutdown` if it was the last. The caller holds the lock."""
        self._clients.remove(request_id)
        if not self._clients:
            self._wake.notify_all()
