"""How services answer: the one interface between them and Triton.

Errors carry their code in the message as well (`NOT_FOUND: …`): a gRPC stream and a BLS call
lose the code that Triton keeps beside the message, and no refusal may reach a client untyped.
"""

from __future__ import annotations

import logging
import re
from typing import Protocol

from vlora.errors import BY_CODE, Internal, VLoraError
from vlora.serving.tensors import Tensors

log = logging.getLogger(__name__)

_CODED = re.compile(r"(?:^|\W)(" + "|".join(BY_CODE) + r"): (.*)", re.DOTALL)


MAX_MESSAGE_BYTES = 4096
"""Of one message as gRPC counts: its trailers, where errors go, hold 8 KiB by default, and every
byte of a character that is not ASCII takes three there."""


class Responder(Protocol):
    """Answers one request. Owned by the service until it has sent the final response.

    send and fail may be called from any thread, in order; after a final one nothing is sent.
    """

    def send(self, tensors: Tensors, final: bool) -> None: ...

    def fail(self, error: VLoraError) -> None: ...

    def is_cancelled(self) -> bool: ...


def to_message(error: VLoraError) -> str:
    """The message as it goes over the wire: `CODE: sentence`, whatever text the error holds."""
    return f"{error.code}: {as_sendable(error.message)}"


def as_sendable(text: str) -> str:
    """`text` as a message that Triton and gRPC take: printable, valid UTF-8, of bounded length.

    What cannot be printed (half a surrogate pair, control and direction marks) is escaped.
    """
    room = MAX_MESSAGE_BYTES
    pieces: list[str] = []
    for character in text[: MAX_MESSAGE_BYTES + 1]:
        if not (character.isprintable() or character == "\n"):
            character = character.encode("unicode_escape").decode()
        room -= len(character) if character.isascii() else 3 * len(character.encode())
        if room < 0:
            return f"{''.join(pieces)} … ({len(text)} characters in all)"
        pieces.append(character)
    return "".join(pieces)


def is_coded(message: str) -> bool:
    """Whether a wire message is one of ours, and not Triton's own."""
    return _CODED.search(message) is not None


def from_message(message: str) -> VLoraError:
    """The error behind a wire message; one without a code is not ours, hence Internal."""
    match = _CODED.search(message)
    if match is None:
        return Internal(message)
    return BY_CODE[match[1]](match[2])


def as_vlora_error(error: BaseException, what: str) -> VLoraError:
    """`error` if it is typed; else a fault of ours: logged here, told without detail."""
    if isinstance(error, VLoraError):
        return error
    log.error("%s failed", what, exc_info=error)
    return Internal(f"{what} failed; the server's log says more")
