"""Interface through which services answer requests, and the form in which errors are sent.

An error's message begins with its code (`NOT_FOUND: …`), because gRPC streams and calls between
models lose the separate one.
"""

from __future__ import annotations

import logging
from typing import Protocol

from vlora.errors import Internal, VLoraError
from vlora.serving.tensors import Tensors

log = logging.getLogger(__name__)

# Maximum size of an error message as gRPC encodes it, with three bytes for each byte of a character
# that is not ASCII. Its trailers may have 8 KiB by default.
MAX_MESSAGE_BYTES = 4096


class Responder(Protocol):
    """Answers one request. Thread-safe. After a final response, nothing more is sent."""

    def send(self, tensors: Tensors, final: bool) -> None: ...

    def fail(self, error: VLoraError) -> None: ...

    def is_cancelled(self) -> bool: ...


def to_message(error: VLoraError) -> str:
    """Return the error's message in the form in which it is sent: `CODE: sentence`."""
    return f"{error.code}: {as_sendable(error.message)}"


def as_sendable(text: str) -> str:
    """Return printable text shortened to MAX_MESSAGE_BYTES."""
    available = MAX_MESSAGE_BYTES
    pieces: list[str] = []
    for character in text[: MAX_MESSAGE_BYTES + 1]:
        available -= len(character) if character.isascii() else 3 * len(character.encode())
        if available < 0:
            return f"{''.join(pieces)} …"
        pieces.append(character)
    return "".join(pieces)


def as_vlora_error(error: BaseException, what: str) -> VLoraError:
    """Return a VLoraError itself; log any other, which is a bug, and return Internal for it."""
    if isinstance(error, VLoraError):
        return error
    log.error("%s failed", what, exc_info=error)
    return Internal(f"{what} failed; see the server's log for details")
