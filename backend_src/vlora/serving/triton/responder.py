"""Sending of responses through Triton's response senders."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from vlora.config import Limits
from vlora.errors import InvalidArgument, VLoraError
from vlora.serving.metrics import ErrorCounts
from vlora.serving.responder import Responder, as_vlora_error, to_message
from vlora.serving.tensors import Array, Tensors
from vlora.strict_json import load_object

# Conversion between the requests and responses of Triton and named numpy tensors.


MAX_ID_LENGTH = 1024
"""Maximum length of a request's id. It is limited because ids are stored after requests end."""


def inputs_of(request: Any) -> dict[str, Array]:
    """Return the request's tensors by name. They are views and become invalid with the request."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def parameters_of(request: Any, limits: Limits) -> dict[str, Any]:
    """Return the request's parameters, parsed from JSON. Raises InvalidArgument."""
    text = _read_text(request.parameters, "the request's parameters", limits.max_json_bytes)
    return load_object(text or "{}", "the request's parameters")


def id_of(request: Any) -> str:
    """Return the request's id as the client sent it. Raises InvalidArgument."""
    return _read_text(request.request_id, "the request's id", MAX_ID_LENGTH)


def _read_text(read: Callable[[], str], what: str, limit: int) -> str:
    try:
        text = read()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{what} is not valid UTF-8") from error
    if len(text) > limit:
        raise InvalidArgument(f"{what} has {len(text)} characters; the limit is {limit}")
    return text


def to_triton(tensors: Tensors) -> list[Any]:
    """Return Triton's tensor objects for named arrays."""
    return [pb_utils.Tensor(name, value) for name, value in tensors.items()]


def make_response(tensors: Tensors) -> Any:
    return pb_utils.InferenceResponse(output_tensors=to_triton(tensors))


def make_error_response(error: VLoraError, counts: ErrorCounts) -> Any:
    """Return a Triton response for `error`, with the code in the message and as Triton's code.

    It is the final response of its request, so the error is added to `counts`.
    """
    counts.add(error)
    code = getattr(pb_utils.TritonError, error.code)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(to_message(error), code))


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
