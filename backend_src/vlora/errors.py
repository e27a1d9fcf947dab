"""The errors that reach a client, and parts of their messages.

Any other exception is a bug, reported as `Internal` without a traceback. `code` is the name of the
corresponding code of `pb_utils.TritonError`.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

from vlora.file_names import decoded, printable

# Maximum number of characters of a message, which may quote what a client sent.
MAX_SHOWN = 64 * 1024


class VLoraError(Exception):
    """Base of the errors that end a request. The message says what was wrong and would be right."""

    code: ClassVar[str] = "INTERNAL"
    counted_elsewhere = False  # True if another model has raised and counted it.

    @property
    def message(self) -> str:
        return str(self)

    def copy(self) -> Self:
        """Return an equal error to store or to raise. Each raise of an error adds to its traceback,
        whose frames keep the values of the functions that it passed through.
        """
        return type(self)(*self.args)

    def __str__(self) -> str:
        text = super().__str__()
        return printable(decoded(text[:MAX_SHOWN])) + ("" if len(text) <= MAX_SHOWN else " …")


class InvalidArgument(VLoraError):
    """Raised for an invalid request, option or adapter."""

    code = "INVALID_ARG"


class AdapterBroken(InvalidArgument):
    """Raised for an adapter that cannot be loaded. A client sees its stable first word."""

    word = "adapter_broken"

    @property
    def message(self) -> str:
        return f"{self.word}: {self}"


class OutOfMemory(InvalidArgument):
    """Raised if a model with the given options, or an adapter, does not fit the device."""


class NotFound(VLoraError):
    """Raised for a request that names an adapter which does not exist."""

    code = "NOT_FOUND"


class Unavailable(VLoraError):
    """Raised for a request that the server cannot accept now, such as when its queue is full."""

    code = "UNAVAILABLE"


class AdapterChanging(Unavailable):
    """Raised if an adapter cannot be read because its files are being changed at the moment."""


class Cancelled(VLoraError):
    """Raised for a request that was cancelled or superseded, or whose deadline has passed."""

    code = "CANCELLED"


class Unsupported(VLoraError):
    """Raised for a valid request that needs a feature which this server does not have."""

    code = "UNSUPPORTED"


class Internal(VLoraError):
    """Raised if the server has a bug, or if a resource such as memory has failed."""

    code = "INTERNAL"


BY_CODE: dict[str, type[VLoraError]] = {
    kind.code: kind
    for kind in (InvalidArgument, NotFound, Unavailable, Cancelled, Unsupported, Internal)
}

_CODED = re.compile(r"(?:^|\W)(" + "|".join(BY_CODE) + r"): (.*)", re.DOTALL)

# Message of Unavailable to a request that has not begun. Another server may answer it.
SHUTTING_DOWN = "the server is shutting down"

# Words in the error of a request whose images were encoded with one version of an adapter when the
# engine had another. Both agree again within 5 s, usually within 2.
ADAPTER_CHANGED = "was changed while the request's images were encoded"
CHANGE_REPEATS, CHANGE_PAUSE_SECONDS = 4, 1.5


def pause_before_repeat(message: str, repeats: int) -> float | None:
    """Return the seconds after which a client sends a request again that failed with this message
    before its first output; None if it does not.

    repeats: number of times that it has been sent again already.
    """
    if SHUTTING_DOWN in message:
        return None if repeats else 0.0
    if ADAPTER_CHANGED in message and repeats < CHANGE_REPEATS:
        return CHANGE_PAUSE_SECONDS
    return None


MAX_NAMES = 20  # Maximum number of adapters that a message lists.


class ServerError(Exception):
    """Raised if the server cannot run. The message says why and how to correct it."""


def is_coded(message: str) -> bool:
    """Return whether a message contains a code of these errors. Triton's own messages do not."""
    return _CODED.search(message) is not None


def from_message(message: str) -> VLoraError:
    """Return the error that a message `CODE: sentence` describes; Internal if it has no code."""
    match = _CODED.search(message)
    if match is None:
        return Internal(message)
    return BY_CODE[match[1]](match[2])


def pause_after(failures: int, first: float, longest: float) -> float:
    """Return the pause after a number of failures in a row: `first`, doubled up to `longest`."""
    return min(first * 2.0 ** min(failures - 1, 64), longest)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: `; did you mean 'x'?`, or "" if none is similar."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def known_names(unknown: str, names: Sequence[str], similar: Sequence[str] | None = None) -> str:
    """Return the end of an error message about an unknown adapter, with some known names.

    similar: names to search for the nearest; None for all, which is slow for thousands.
    """
    if not names:
        return " (no adapter is loaded)"
    more = len(names) - MAX_NAMES
    tail = f" and {more} more" if more > 0 else ""
    hint = nearest(unknown, names if similar is None else similar)
    return f"{hint or '.'} Known: {', '.join(names[:MAX_NAMES])}{tail}"


def prompt_too_long(
    size: int, limit: float, unit: str, context: int, hint: str = ""
) -> InvalidArgument:
    """Return the error for a prompt of `size` units in a context of so many tokens."""
    return InvalidArgument(
        f"the prompt is too long: it has {size} {unit}; the context of {context} tokens holds a"
        f" prompt of at most {limit:.0f} {unit}{hint}"
    )


def in_one_line(error: Exception) -> str:
    """Return the text of another library's error for a message, in one line, or its type."""
    return " ".join(str(error).split()) or type(error).__name__


def shown(value: Any) -> str:
    """Return the `repr` of `value` for a message, shortened if it is long. Never raises."""
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):
        # An integer with thousands of digits, or deep nesting.
        return f"a {type(value).__name__} that is too large to show"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlong = 60
