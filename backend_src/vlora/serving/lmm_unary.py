"""The `lmm_unary` model without Triton: answers a request with one response, by calling `lmm`.

It exists because `lmm` is a decoupled model, which can send any number of responses. Unary gRPC and
ensembles with one response cannot call such a model.

Each call of `lmm` has an id, by which the call is cancelled when the client disconnects. If the
client's id has at least 16 characters, as a cancellation requires, the call has this id, otherwise
a new one.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from vlora.config import Limits
from vlora.errors import Cancelled, Internal, InvalidArgument, Unavailable
from vlora.request import MIN_STOPPABLE_ID
from vlora.serving.arrivals import ARRIVAL_INPUT, ArrivalStamps
from vlora.serving.codec import freshness_of, is_cancel, read_sampling
from vlora.serving.requests import HeldBytes, WaitingRequests, bytes_of
from vlora.serving.responder import Responder, as_vlora_error, fail
from vlora.serving.tensors import Array, Inputs, Tensors, flag, strings

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.2

Ask = Callable[[Tensors, str], list[Tensors]]
"""Function that calls `lmm` with inputs and a request id, and returns its responses.

It raises a VLoraError if `lmm` answers with an error.
"""


@dataclass(eq=False)
class _Relayed:
    """A request that has no response yet.

    inner_id: id of the call of `lmm`.
    inner: inputs of that call, kept until the call is made.
    arrival: arrival of the request, in seconds of CLOCK_MONOTONIC.
    cancelled: whether `lmm` was asked to cancel the call because the client has disconnected.
    """

    responder: Responder
    inner_id: str
    inner: dict[str, Array] = field(default_factory=dict)
    arrival: float = 0.0
    cancelled: bool = False


class LmmUnaryService:
    """Answers `lmm_unary` requests.

    A request is in `_live` until its response. The response is sent by the thread that takes the
    request from `waiting` or ends it there.

    ask: calls `lmm`.
    pool: threads that call `ask`, which blocks.
    limits: limits of requests; `max_in_flight_bytes` bounds the copied tensors of waiting requests.
    stamps: reads the arrival time of a request, and makes arrival stamps for `lmm`.
    waiting: requests that wait for a thread.
    max_requests: maximum number of requests in this model, including those that wait for a thread.
        Further requests are rejected before their tensors are copied.
    max_running: number of requests that the engine runs at the same time.
    """

    def __init__(
        self,
        ask: Ask,
        pool: Executor,
        limits: Limits,
        stamps: ArrivalStamps,
        waiting: WaitingRequests,
        max_requests: int,
        max_running: int,
    ) -> None:
        self._ask = ask
        self._pool = pool
        self._limits = limits
        self._stamps = stamps
        self._waiting = waiting
        self._max_requests = max_requests
        self._max_running = max_running
        self._held = HeldBytes(limits.max_in_flight_bytes)
        self._live: dict[str, _Relayed] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="cancel-watch", daemon=True)
        self._watcher.start()

    @property
    def live(self) -> int:
        """Number of requests without a response."""
        return len(self._live)

    def handle(
        self, tensors: Tensors, parameters: Mapping[str, Any], client_id: str, responder: Responder
    ) -> None:
        """Answer one request; never raises. The tensors may become invalid after this returns."""
        key = uuid.uuid4().hex
        relayed = _Relayed(
            responder, inner_id=client_id if len(client_id) >= MIN_STOPPABLE_ID else key
        )
        try:
            if is_cancel(tensors):
                # `lmm` itself ends the requests that were already passed to it.
                reason = Cancelled(f"the request '{client_id}' was cancelled")
                self._waiting.end_client(client_id, reason)
                responder.send({}, final=True)
                return
            self._admit(key, relayed)
            self._held.hold(key, bytes_of(tensors))
            relayed.arrival = self._stamps.read(tensors)
            sampling = read_sampling(Inputs(tensors), parameters, self._limits)
            freshness = freshness_of(sampling, relayed.arrival)
            relayed.inner = inner_request(tensors, sampling)
            self._waiting.add(key, freshness, partial(self._fail, key, responder), client_id)
            self._pool.submit(self._relay, key)
        except Exception as error:
            if not self._waiting.end(key, error):
                self._fail(key, responder, error)

    def close(self) -> None:
        """Reject new requests and those that still wait for a thread."""
        self._closed.set()
        self._watcher.join()
        self._waiting.end_all(Unavailable("the server is shutting down"))

    def _admit(self, key: str, relayed: _Relayed) -> None:
        with self._lock:
            if self._closed.is_set():
                raise Unavailable("the server is shutting down")
            if self.live >= self._max_requests:
                waiting = self.live - self._max_running
                raise Unavailable(f"the queue is full: {waiting} requests are waiting")
            self._live[key] = relayed

    def _relay(self, key: str) -> None:
        relayed = self._live.get(key)
        if relayed is None or not self._waiting.take(key):
            return  # The request ended while it waited for this thread.
        responder = relayed.responder
        inner, relayed.inner = relayed.inner, {}
        try:
            inner[ARRIVAL_INPUT] = self._stamps.make(relayed.arrival)
            responses = [response for response in self._ask(inner, relayed.inner_id) if response]
            if len(responses) != 1:
                raise Internal(f"'lmm' sent {len(responses)} responses instead of one")
            self._forget(key)
            (response,) = responses
            responder.send({**response, "answer": response["text_output"]}, final=True)
        except Exception as error:
            self._fail(key, responder, error)

    def _fail(self, key: str, responder: Responder, error: BaseException) -> None:
        self._forget(key)
        fail(responder, as_vlora_error(error, "relaying the request"))

    def _forget(self, key: str) -> None:
        self._held.release(key)
        with self._lock:
            self._live.pop(key, None)

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            self._waiting.end_late()
            with self._lock:
                live = list(self._live.items())
            for key, relayed in live:
                try:
                    if relayed.cancelled or not relayed.responder.is_cancelled():
                        continue
                    if self._waiting.end(key, Cancelled("the client has disconnected")):
                        continue
                    if key in self._live:
                        self._ask({"cancel": flag(True)}, relayed.inner_id)
                        relayed.cancelled = True
                except Exception:
                    log.exception("could not cancel a request whose client has disconnected")


def inner_request(tensors: Tensors, sampling: Mapping[str, Any]) -> dict[str, Array]:
    """Return the inputs for the call of `lmm`: without streaming, and with parameters as a tensor.

    sampling: sampling parameters of the request. The client may have sent them as a tensor or as
        request parameters.

    Raises InvalidArgument.
    """
    inputs = Inputs(tensors)
    if inputs.flag("stream"):
        raise InvalidArgument(
            "'stream' = true is not possible for 'lmm_unary', which sends one response; use 'lmm'"
        )
    if "image_layout" in tensors:
        # `task_head` puts the metadata into JSON, so they must be valid UTF-8.
        inputs.text("metadata")
    inner = {name: np.array(tensor) for name, tensor in tensors.items()}
    inner["stream"] = flag(False)
    if "sampling_parameters" not in inner and sampling:
        inner["sampling_parameters"] = strings([json.dumps(sampling, allow_nan=False)])
    return inner
