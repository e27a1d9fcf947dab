"""The `lmm_unary` model without Triton: answers a request with one response, by calling `lmm`.

A decoupled model can neither be called by unary gRPC nor be part of an ensemble with one response.
The inner request has the client's id if that is long enough to be cancelled (16 characters), else a
new id, so that it can be ended when the client disconnects.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vlora.errors import Cancelled, Internal, InvalidArgument, Unavailable
from vlora.request import MIN_STOPPABLE_ID
from vlora.serving.codec import is_cancel, sampling_keys
from vlora.serving.responder import Responder, as_vlora_error
from vlora.serving.tensors import Inputs, Tensors, flag, strings

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.2

Ask = Callable[[Tensors, str], list[Tensors]]
"""Calls `lmm`: takes inputs and a request id, returns its responses, raises VLoraError."""


@dataclass(eq=False)
class _Relayed:
    """One request without a response yet.

    tensors: inputs of the inner request, until `lmm` is called.
    cancelled: whether `lmm` has been asked to cancel it because its client disconnected.
    """

    responder: Responder
    inner_id: str
    tensors: Tensors = field(default_factory=dict)
    cancelled: bool = False


class LmmUnaryService:
    """Answers `lmm_unary` requests; `pool` runs the calls of `ask`, which block.

    max_requests: maximum number of requests here, including those that wait for a thread. Further
        requests are rejected before any of their tensors is copied.
    max_running: number of these that the engine runs at the same time.

    A request is first in `_waiting`, then in `_asked`. The thread that removes it sends its
    response.
    """

    def __init__(self, ask: Ask, pool: Executor, max_requests: int, max_running: int) -> None:
        self._ask = ask
        self._pool = pool
        self._max_requests = max_requests
        self._max_running = max_running
        self._waiting: dict[str, _Relayed] = {}
        self._asked: dict[str, _Relayed] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="cancel-watch", daemon=True)
        self._watcher.start()

    @property
    def live(self) -> int:
        """Number of requests without a response yet."""
        return len(self._waiting) + len(self._asked)

    def handle(
        self, tensors: Tensors, parameters: Mapping[str, Any], client_id: str, responder: Responder
    ) -> None:
        """Answer one request; never raises. The tensors may become invalid when this returns."""
        key = uuid.uuid4().hex
        relayed = _Relayed(
            responder, inner_id=client_id if len(client_id) >= MIN_STOPPABLE_ID else key
        )
        try:
            if is_cancel(tensors):
                self._cancel(client_id)
                responder.send({}, final=True)
                return
            self._admit(key, relayed)
        except Exception as error:
            _fail(responder, error)
            return
        try:
            relayed.tensors = inner_request(tensors, parameters)
            self._pool.submit(self._relay, key)
        except Exception as error:
            self._end_waiting(key, error)

    def close(self) -> None:
        """Reject new requests and those that still wait."""
        self._closed.set()
        self._watcher.join()
        for key in list(self._waiting):
            self._end_waiting(key, Unavailable("the server is shutting down"))

    def _admit(self, key: str, relayed: _Relayed) -> None:
        with self._lock:
            if self._closed.is_set():
                raise Unavailable("the server is shutting down")
            if self.live >= self._max_requests:
                waiting = self.live - self._max_running
                raise Unavailable(f"the queue is full: {waiting} requests are waiting")
            self._waiting[key] = relayed

    def _cancel(self, client_id: str) -> None:
        """End the waiting requests with this id; `lmm` ends those that it has received."""
        for key, relayed in list(self._waiting.items()):
            if relayed.inner_id == client_id:
                self._end_waiting(key, Cancelled(f"the request '{client_id}' was cancelled"))

    def _end_waiting(self, key: str, reason: Exception) -> None:
        with self._lock:
            relayed = self._waiting.pop(key, None)
        if relayed is not None:
            _fail(relayed.responder, reason)

    def _relay(self, key: str) -> None:
        with self._lock:
            relayed = self._waiting.pop(key, None)
            if relayed is None:
                return  # The request ended while it waited.
            self._asked[key] = relayed
        tensors, relayed.tensors = relayed.tensors, {}
        try:
            responses = [response for response in self._ask(tensors, relayed.inner_id) if response]
            if len(responses) != 1:
                raise Internal(f"'lmm' sent {len(responses)} responses instead of one")
            self._forget(key)
            (response,) = responses
            relayed.responder.send({**response, "answer": response["text_output"]}, final=True)
        except Exception as error:
            self._forget(key)
            _fail(relayed.responder, error)

    def _forget(self, key: str) -> None:
        with self._lock:
            self._asked.pop(key, None)

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            with self._lock:
                live = [*self._waiting.items(), *self._asked.items()]
            for key, relayed in live:
                try:
                    if relayed.cancelled or not relayed.responder.is_cancelled():
                        continue
                    self._end_waiting(key, Cancelled("the client has disconnected"))
                    if key in self._asked:
                        self._ask({"cancel": flag(True)}, relayed.inner_id)
                        relayed.cancelled = True
                except Exception:
                    log.exception("could not cancel a request whose client has disconnected")


def inner_request(tensors: Tensors, parameters: Mapping[str, Any]) -> Tensors:
    """Return the inputs of the call of `lmm`: without streaming, with parameters as a tensor.

    Raises InvalidArgument.
    """
    inputs = Inputs(tensors)
    if inputs.flag("stream"):
        raise InvalidArgument(
            "'stream' = true is not possible for 'lmm_unary', which sends one response; use 'lmm'"
        )
    if "image_layout" in tensors:
        # `task_head` will put the metadata into JSON, so they must be valid UTF-8.
        inputs.text("metadata")
    inner = {name: np.array(tensor) for name, tensor in tensors.items()}
    inner["stream"] = flag(False)
    if "sampling_parameters" not in inner and (keys := sampling_keys(parameters)):
        inner["sampling_parameters"] = strings([json.dumps(keys, allow_nan=False)])
    return inner


def _fail(responder: Responder, error: Exception) -> None:
    try:
        responder.fail(as_vlora_error(error, "relaying the request"))
    except Exception:
        log.exception("could not send an error to its client")
