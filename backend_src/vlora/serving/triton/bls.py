"""Calls from one model to another (Triton's business logic scripting)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from vlora.request import ImageFeatures
from vlora.serving.codec import ADAPTER_VERSION
from vlora.serving.responder import from_message, is_coded
from vlora.serving.tensors import Tensors, flag
from vlora.serving.triton.responder import to_triton
from vlora.serving.vision_encoder import features_from

LMM = "lmm"
LMM_UNARY = "lmm_unary"
VISION_ENCODER = "vision_encoder"

ENCODE_TRIES = 3
"""Maximum number of calls of the vision encoder for one request.

Triton 2.51 fails a whole batch if the strings of one of its requests have wrong length prefixes.
Strings from `lmm` are always correct. So if an error has a message of Triton's own, another request
of the batch caused it, and the call is repeated.
"""

ALIVE_SECONDS = 5.0
"""Seconds for which the responses of a call to a decoupled model are kept after their use.

Triton's stub forgets a finished call of a decoupled model on a thread that does not hold the GIL.
If it were the last owner of the responses, it would free their arrays there and corrupt reference
counts (python_backend issue 390, fixed in 24.12).
"""

ANSWER_OUTPUTS = (
    "text_output",
    "details",
    "finish_reason",
    "num_input_tokens",
    "num_output_tokens",
    "logprobs",
    "cumulative_logprob",
    "head_scores",
    "head_labels",
    "metadata",
)
"""Outputs of `lmm` that `lmm_unary` passes on."""

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
        """Return the features of one request from `vision_encoder`.

        tensors: the encoder's inputs without the batch dimension, which is added here.
        request_id: id with which `cancel` ends the request.

        Raises the encoder's error.
        """
        batched = {name: value[None] for name, value in tensors.items()}
        outputs = ("image_features", "image_layout", ADAPTER_VERSION)
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
