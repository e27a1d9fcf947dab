"""The typed errors that reach a client.

Every refusal is one of these; anything else that escapes is a fault of ours and is reported as
`Internal`, without a traceback. `code` is the name of the matching `pb_utils.TritonError` code.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar


class VLoraError(Exception):
    """A request was not answered. The message says what was wrong and what would be right."""

    code: ClassVar[str] = "INTERNAL"
    counted_elsewhere = False
    """Of an error that another model found, counted and told us."""

    @property
    def message(self) -> str:
        return str(self)


class InvalidArgument(VLoraError):
    """The request is wrong."""

    code = "INVALID_ARG"


class NotFound(VLoraError):
    """The request names an adapter that does not exist."""

    code = "NOT_FOUND"


class Unavailable(VLoraError):
    """The queue is full, or the server is shutting down."""

    code = "UNAVAILABLE"


class Cancelled(VLoraError):
    """Cancelled by the client."""

    code = "CANCELLED"


class Unsupported(VLoraError):
    """The request is well formed, but asks for what this server does not do."""

    code = "UNSUPPORTED"


class Internal(VLoraError):
    """A fault of ours."""

    code = "INTERNAL"


BY_CODE: dict[str, type[VLoraError]] = {
    kind.code: kind
    for kind in (InvalidArgument, NotFound, Unavailable, Cancelled, Unsupported, Internal)
}


MAX_NAMES = 20
"""Adapters that an error lists."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: `; did you mean 'x'?` where something is near, else empty."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def known_names(unknown: str, names: Sequence[str]) -> str:
    """The end of a sentence about an unknown adapter: the nearest, and all known."""
    if not names:
        return " (no adapter is loaded)"
    more = len(names) - MAX_NAMES
    tail = f" and {more} more" if more > 0 else ""
    return f"{nearest(unknown, names) or '.'} Known: {', '.join(names[:MAX_NAMES])}{tail}"


def shown(value: Any) -> str:
    """`value` for a message: as Python writes it, cut where it is long; never fails, and whatever
    text it holds, UTF-8 can."""
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):  # of integers with thousands of digits, of deep nesting
        return f"a {type(value).__name__} that is too large to show"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlong = 60
