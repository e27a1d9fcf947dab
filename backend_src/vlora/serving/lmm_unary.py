"""The `lmm_unary` model without Triton: one response per request, by a call of `lmm`.

It exists because a decoupled model can neither be asked by unary gRPC nor stand in an ensemble
that answers once. The inner request carries the client's id where that can be stopped
(16 characters and more), else one of ours, so that a client who goes away ends it.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

import numpy as np

from vlora.errors import Internal, InvalidArgument
from vlora.request import MIN_STOPPABLE_ID
from vlora.serving.codec import sampling_keys
from vlora.serving.responder import Responder, as_vlora_error
from vlora.serving.tensors import Inputs, Tensors, flag, strings

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.2

Ask = Callable[[Tensors, str], list[Tensors]]
"""Calls `lmm`: inputs and request id in, its responses out; raises VLoraError."""


class LmmUnaryService:
    """Answers `lmm_unary` requests; `pool` runs the calls of `ask`, which block."""

    def __init__(self, ask: Ask, pool: Executor) -> None:
        self._ask = ask
        self._pool = pool
        self._live: dict[str, tuple[str, Responder]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="cancel-watch", daemon=True)
        self._watcher.start()

    def handle(
        self, tensors: Tensors, parameters: Mapping[str, Any], client_id: str, responder: Responder
    ) -> None:
        """Answer one request; never raises. The tensors may be gone once this returns."""
        try:
            inner = inner_request(tensors, parameters)
            self._pool.submit(self._relay, inner, client_id, responder)
        except Exception as error:
            responder.fail(as_vlora_error(error, "relaying the request"))

    def close(self) -> None:
        self._closed.set()
        self._watcher.join()

    def _relay(self, inner: Tensors, client_id: str, responder: Responder) -> None:
        key = uuid.uuid4().hex
        inner_id = client_id if len(client_id) >= MIN_STOPPABLE_ID else key
        with self._lock:
            self._live[key] = (inner_id, responder)
        try:
            responses = [tensors for tensors in self._ask(inner, inner_id) if tensors]
            if len(responses) != 1:
                raise Internal(f"'lmm' gave {len(responses)} responses where one was due")
            self._forget(key)
            responder.send(responses[0], final=True)
        except Exception as error:
            self._forget(key)
            try:
                responder.fail(as_vlora_error(error, "relaying the request"))
            except Exception:
                log.exception("could not send a client its error")

    def _forget(self, key: str) -> None:
        with self._lock:
            self._live.pop(key, None)

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            with self._lock:
                live = list(self._live.values())
            for inner_id, responder in live:
                try:
                    if responder.is_cancelled():
                        self._ask({"stop": flag(True)}, inner_id)
                except Exception:
                    log.exception("could not stop a cancelled request")


def inner_request(tensors: Tensors, parameters: Mapping[str, Any]) -> Tensors:
    """The request to `lmm` that stands for this one: not streaming, parameters as a tensor."""
    if Inputs(tensors).flag("stream"):
        raise InvalidArgument("'lmm_unary' gives one response; send 'stream' = true to 'lmm'")
    inner = {name: np.array(tensor) for name, tensor in tensors.items()}
    inner["stream"] = flag(False)
    keys = sampling_keys(parameters)
    if "sampling_parameters" not in inner and keys:
        inner["sampling_parameters"] = strings([json.dumps(keys)])
    return inner
