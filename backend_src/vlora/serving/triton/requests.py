"""Requests of clients and their responses, and calls from one model to another."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from vlora.config import Limits
from vlora.errors import InvalidArgument, VLoraError, from_message, is_coded
from vlora.request import ImageFeatures
from vlora.serving.codec import ADAPTER_VERSION, RETURNED, VIDEOS
from vlora.serving.metrics import ErrorCounts
from vlora.serving.responder import to_message
from vlora.serving.tensors import Array, EncodedStrings, Tensors, check_strings, flag
from vlora.serving.vision_encoder import features_from
from vlora.strict_json import load_object

log = logging.getLogger(__name__)

MAX_ID_LENGTH = 1024  # Ids are stored after requests end.


def inputs_of(request: Any) -> dict[str, Array]:
    """Return the request's tensors by name. They are views and become invalid with the request.
    Raises InvalidArgument for a STRING tensor that cannot be read.
    """
    tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    check_strings(tensors)
    return tensors


def read_strings_by_request() -> None:
    """Make Triton's stub read STRING tensors with limits, and fail no other request of a batch.

    The stub calls this function and then `reshape`. Its own takes seconds for millions of elements,
    and an error in it fails the whole batch.
    """
    pb_utils.deserialize_bytes_tensor = lambda encoded: EncodedStrings(encoded.view(np.uint8))


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
    return [pb_utils.Tensor(name, value) for name, value in tensors.items()]


def make_error_response(error: VLoraError, counts: ErrorCounts, request_id: str = "") -> Any:
    """Return a Triton response for `error`, with its code in the message, too, and count it."""
    counts.add(error, request_id)
    code = getattr(pb_utils.TritonError, error.code)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(to_message(error), code))


class TritonResponder:
    """Answers one request through its response sender.

    errors: counts the errors that are sent.
    id: the client's id of the request, once it is read.

    **Invariant:** the sender is not used after the final response, because Triton frees what
    `is_cancelled` reads. A lock keeps `send` and `is_cancelled` from running at the same time.

    **Invariant:** only requested outputs are sent, and their tensors live until they are sent.
    Triton's `send` would drop other outputs, and free their arrays without holding the GIL
    (python_backend issue 390).
    """

    id = ""

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
            self._send(make_error_response(error, self._errors, self.id), final=True)
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


# -- calls of other models ---------------------------------------------------------------

LMM = "lmm"
LMM_UNARY = "lmm_unary"
VISION_ENCODER = "vision_encoder"

# Maximum calls of the encoder for one request. Triton 2.51 fails a whole batch for wrong length
# prefixes in one request's strings. So if an error has a message of Triton's own, another request
# caused it, and the call is repeated.
ENCODE_TRIES = 3
# Seconds for which responses of decoupled calls are kept. Triton's stub forgets such a call on a
# thread without the GIL. As the last owner of its arrays, it would corrupt reference counts
# (python_backend issue 390, fixed in 24.12).
ALIVE_SECONDS = 5.0
# Outputs of `lmm` that `lmm_unary` passes on.
ANSWER_OUTPUTS = ("text_output", "details", *RETURNED, "head_scores", "head_labels", "metadata")
CANCEL_OUTPUTS = ("text_output", "details")


class ModelCalls:
    """Calls other models of the same server. All methods block, and any thread may call them."""

    def __init__(self) -> None:
        self._alive: deque[tuple[float, Any]] = deque()
        self._lock = threading.Lock()

    def ask_lmm(self, tensors: Tensors, request_id: str) -> list[Tensors]:
        """Return all responses of `lmm`. If a response is an error, raise it."""
        outputs = CANCEL_OUTPUTS if "cancel" in tensors else ANSWER_OUTPUTS
        responses = list(_request(LMM, tensors, outputs, request_id).exec(decoupled=True))
        self._keep_alive([(response, response.output_tensors()) for response in responses])
        return [unwrap(response) for response in responses]

    def cancel(self, request_id: str) -> None:
        """End the requests with this id that wait in `lmm_unary` or `vision_encoder`."""
        cancel = flag(True)
        unwrap(_request(LMM_UNARY, {"cancel": cancel}, ["text_output"], request_id).exec())
        inputs = {"cancel": cancel[None]}
        unwrap(_request(VISION_ENCODER, inputs, ["image_layout"], request_id).exec())

    def encode_images(self, tensors: Tensors, request_id: str) -> ImageFeatures:
        """Return the features of one request, without batch dimension, from `vision_encoder`."""
        batched = {name: value[None] for name, value in tensors.items()}
        outputs = ("image_features", "image_layout", ADAPTER_VERSION, VIDEOS)
        for _ in range(ENCODE_TRIES):
            response = _request(VISION_ENCODER, batched, outputs, request_id).exec()
            if not response.has_error() or is_coded(response.error().message()):
                break
        return features_from(unwrap(response))

    def clear(self) -> None:
        """Release the responses that are kept for `ALIVE_SECONDS` after their use."""
        with self._lock:
            self._alive.clear()

    def _keep_alive(self, responses: Any) -> None:
        now = time.monotonic()
        with self._lock:
            self._alive.append((now, responses))
            while self._alive[0][0] < now - ALIVE_SECONDS:
                self._alive.popleft()


def _request(model: str, tensors: Tensors, outputs: Sequence[str], request_id: str) -> Any:
    return pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        inputs=to_triton(tensors),
        requested_output_names=list(outputs),
    )


def unwrap(response: Any) -> Tensors:
    """Return copies of a response's tensors, or raise its error.

    An error with a code of `vlora.errors` was already counted by the model that raised it.
    """
    if response.has_error():
        message = response.error().message()
        error = from_message(message)
        error.counted_elsewhere = is_coded(message)
        raise error
    return {tensor.name(): np.array(tensor.as_numpy()) for tensor in response.output_tensors()}
