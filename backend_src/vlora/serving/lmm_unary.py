"""The `lmm_unary` model without Triton: one response per request, by a call of `lmm`.

It exists because a decoupled model can neither be asked by unary gRPC nor stand in an ensemble
that answers once. The inner request carries the client's id where that can be cancelled
(16 characters and more), else one of ours, so that a client who goes away ends it.
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
"""Calls `lmm`: inputs and request id in, its responses out; raises VLoraError."""


@dataclass(eq=False)
class _Relayed:
    """One request that has not had its response yet.

    tensors: the inner request's, until `lmm` is asked. cancelled: `lmm` was told that its client
    has gone.
    """

    responder: Responder
    inner_id: str
    tensors: Tensors = field(default_factory=dict)
    cancelled: bool = False


class LmmUnaryService:
    """Answers `lmm_unary` requests; `pool` runs the calls of `ask`, which block.

    most: requests here at once, those that wait for a thread included; more are refused before
    anything of them is copied. running: how many of these the engine runs at once.

    A request is in `_waiting`, then in `_asked`; who takes it out of there gives its response.
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
        """Requests that have not had their response."""
        return len(self._waiting) + len(self._asked)

    def handle(
        self, tensors: Tensors, parameters: Mapping[str, Any], client_id: str, responder: Responder
    ) -> None:
        """Answer one request; never raises. The tensors may be gone once this returns."""
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
        """Refuse what comes from now on and what still waits."""
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
        """End what waits under this id. What `lmm` was asked is its to end."""
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
                return  # ended while it waited
            self._asked[key] = relayed
        tensors, relayed.tensors = relayed.tensors, {}
        try:
            responses = [found for found in self._ask(tensors, relayed.inner_id) if found]
            if len(responses) != 1:
                raise Internal(f"'lmm' gave {len(responses)} responses where one was due")
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
                    self._end_waiting(key, Cancelled("the client has gone"))
                    if key in self._asked:
                        self._ask({"cancel": flag(True)}, relayed.inner_id)
                        relayed.cancelled = True
                except Exception:
                    log.exception("could not cancel a request whose client has gone")


def inner_request(tensors: Tensors, parameters: Mapping[str, Any]) -> Tensors:
    """The request to `lmm` that stands for this one: not streaming, parameters as a tensor."""
    inputs = Inputs(tensors)
    if inputs.flag("stream"):
        raise InvalidArgument("'lmm_unary' gives one response; send 'stream' = true to 'lmm'")
    if "image_layout" in tensors:
        inputs.text("metadata")  # `task_head` will put it into JSON
    inner = {name: np.array(tensor) for name, tensor in tensors.items()}
    inner["stream"] = flag(False)
    if "sampling_parameters" not in inner and (keys := sampling_keys(parameters)):
        inner["sampling_parameters"] = strings([json.dumps(keys, allow_nan=False)])
    return inner


def _fail(responder: Responder, error: Exception) -> None:
    try:
        responder.fail(as_vlora_error(error, "relaying the request"))
    except Exception:
        log.exception("could not send a client its error")
