"""Errors in the form of the OpenAI API: a status and `{"error": {message, type, param, code}}`.

`code` is a code of the server's own errors (`INVALID_ARG`, …) or one of the others in `STATUSES`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from typing import Any

import grpc
from starlette.responses import Response

from vlora import strict_json
from vlora.errors import AdapterBroken, VLoraError, from_message
from vlora.net import port_hint

# HTTP status of each code. OpenAI's clients retry after 408, 409, 429 and 5xx.
STATUSES = {
    "INVALID_ARG": 400,
    "UNSUPPORTED": 400,
    AdapterBroken.word: 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "METHOD_NOT_ALLOWED": 405,
    "TIMEOUT": 408,
    "TOO_LARGE": 413,
    "RATE_LIMITED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
}

# OpenAI's error type by status. Other types are `server_error` from 500 on, else
# `invalid_request_error`.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

# Maximum number of characters of a message, whatever it quotes, and of the name of a field.
MAX_MESSAGE, MAX_PARAM = 4096, 256

_QUOTED = re.compile(r"'(\w+)'")


class ApiError(Exception):
    """Raised for a request that is answered with an error.

    code: key of STATUSES.
    param: field of the request that caused the error, or None.
    retry_after: seconds after which the client may retry, or None.
    """

    def __init__(
        self, code: str, message: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def status(self) -> int:
        return STATUSES[self.code]

    def as_json(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message[:MAX_MESSAGE],
            "type": TYPES.get(self.status, kind),
            "param": self.param and self.param[:MAX_PARAM],
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()


def error_response(error: ApiError) -> Response:
    """Return the HTTP response that reports an error."""
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after + 0.5)))
    return Response(error.as_json(), error.status, headers, "application/json")


def invalid(param: str | None, message: str) -> ApiError:
    """Return the error for an invalid request."""
    return ApiError("INVALID_ARG", message, param)


def wrong_value(param: str, value: Any, expected: str) -> ApiError:
    """Return the error for a field whose value is not what `expected` describes."""
    return invalid(param, strict_json.wrong_value(param, value, expected).message)


def unsupported(param: str, message: str) -> ApiError:
    """Return the error for a valid field, or value, that this server does not support."""
    return ApiError("UNSUPPORTED", message, param)


def from_server(error: VLoraError, fields: Container[str]) -> ApiError:
    """Return an error of the V-LoRA server in the form of the API. The first of the request's
    `fields` that the message quotes becomes `param`.
    """
    quoted = (name for name in _QUOTED.findall(error.message) if name in fields)
    broken = error.message.startswith(f"{AdapterBroken.word}: ")
    param = "model" if broken or error.code == "NOT_FOUND" else next(quoted, None)
    return ApiError(AdapterBroken.word if broken else error.code, error.message, param)


def from_grpc(error: Any) -> ApiError:
    """Return the error of the API for an `AioRpcError`."""
    details = error.details() or "no details"
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        reason = f"{details}{port_hint(details)}"
        return ApiError("UNAVAILABLE", f"the V-LoRA server cannot be reached: {reason}")
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return ApiError("UNAVAILABLE", "the V-LoRA server did not answer in time")
    found = from_message(details)
    return ApiError(found.code, found.message)
