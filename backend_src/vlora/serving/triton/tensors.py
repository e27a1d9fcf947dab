"""Conversion between the requests and responses of Triton and named numpy tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils

from vlora.config import Limits
from vlora.errors import InvalidArgument, VLoraError
from vlora.serving.error_counts import ErrorCounts
from vlora.serving.responder import to_message
from vlora.serving.tensors import Array, Tensors
from vlora.strict_json import load_object

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
