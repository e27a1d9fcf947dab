"""Sending of responses through Triton's response senders."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from vlora.config import Limits
from vlora.errors import VLoraError
from vlora.serving.error_counts import ErrorCounts
from vlora.serving.responder import Responder, as_vlora_error
from vlora.serving.tensors import Tensors
from vlora.serving.triton.tensors import (
    id_of,
    inputs_of,
    make_error_response,
    parameters_of,
    to_triton,
)

log = logging.getLogger(__name__)


class TritonResponder:
    """Answers one request through its response sender.

    errors: counts the errors that are sent.

    **Invariant:** the sender is not used after the final response, because Triton frees what
    `is_cancelled` reads. A lock keeps `send` and `is_cancelled` from running at the same time.

    **Invariant:** only requested outputs are sent, and their tensors live until they are sent.
    Triton's `send` would drop other outputs, and free their arrays without holding the GIL
    (python_backend issue 390).
    """

    def __init__(self, request: Any, errors: ErrorCounts) -> None:
        self._sender = request.get_response_sender()
        self._requested = frozenset(request.requested_output_names())
        self._errors = errors
        self._lock = threading.Lock()
        self._closed = False

    def send(self, tensors: Tensors, final: bool) -> None:
        """Send the tensors that the client requested. The others are dropped."""
        requested = {name: value for name, value in tensors.items() if name in self._requested}
        alive_until_sent = to_triton(requested)
        self._send(pb_utils.InferenceResponse(output_tensors=alive_until_sent), final)

    def fail(self, error: VLoraError) -> None:
        """Send `error` as the final response. The request ends even if sending fails."""
        try:
            self._send(make_error_response(error, self._errors), final=True)
        except Exception:
            log.exception("could not send an error; the request ends without a response")
            self._end()

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled or disconnected."""
        with self._lock:
            return not self._closed and bool(self._sender.is_cancelled())

    def _send(self, message: Any, final: bool) -> None:
        with self._lock:
            if self._closed:
                return
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
            self._sender.send(message, flags=flags)
            self._closed = final

    def _end(self) -> None:
        """Send the final flag without a response, so that the client does not wait forever."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class Service(Protocol):
    """Answers requests of a decoupled model, each through its responder."""

    def handle(
        self, tensors: Tensors, parameters: Mapping[str, Any], client_id: str, responder: Responder
    ) -> None: ...


def hand_over(
    requests: Sequence[Any], service: Service, errors: ErrorCounts, limits: Limits
) -> None:
    """Pass the requests to the service, which may answer them at any later time.

    `execute` of a decoupled model only calls this function. If a request cannot be read, this
    function answers it with the error.
    """
    for request in requests:
        responder = TritonResponder(request, errors)
        try:
            arguments = inputs_of(request), parameters_of(request, limits), id_of(request)
        except Exception as error:
            responder.fail(as_vlora_error(error, "reading the request"))
        else:
            service.handle(*arguments, responder)
