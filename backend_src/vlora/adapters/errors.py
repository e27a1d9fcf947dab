"""Transient failures, which an adapter's files did not cause, and the wait before the next attempt.

For example, the process had no free file descriptor or memory, or a disk reported an error. An
operation with such a failure is tried again.
"""

from __future__ import annotations

import errno
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from vlora.adapters.peft import ErrorFactory, as_text
from vlora.errors import InvalidArgument, OutOfMemory

log = logging.getLogger(__name__)

CONTENT_ERRNOS = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.ENXIO,
        errno.ENODEV,
    }
)
"""Error numbers whose cause lies in the files, such as a missing file or a loop of links."""

FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.25, 30.0
"""Wait before the second attempt, and its maximum. The wait doubles with each attempt."""

MAX_ATTEMPTS = 5
"""Number of attempts to load an adapter before its requests fail. The waits between the attempts
take about four seconds in total.
"""

_NUMBER = re.compile(r"\b(?:os error|Error code) (\d+)")
"""Error numbers in messages of Rust and PyTorch, whose exceptions have no attribute for them."""


def is_transient_errno(number: int) -> bool:
    return number not in CONTENT_ERRNOS


def is_transient(error: BaseException) -> bool:
    """Return whether the cause of a failure lies outside the adapter's files.

    The first error number in the chain of causes decides. A lack of memory is transient. So is an
    OSError without a number, because nothing shows that it will happen again.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (MemoryError, OutOfMemory)):
            return True
        if isinstance(cause, OSError):
            return cause.errno is None or is_transient_errno(cause.errno)
        if isinstance(cause, (RuntimeError, SafetensorError)):
            number = _NUMBER.search(str(cause))
            return number is not None and is_transient_errno(int(number[1]))
        cause = cause.__cause__
    return False


def as_adapter_error(name: str, folder: Path, error: BaseException) -> InvalidArgument:
    """Return `error` as an InvalidArgument that names the adapter.

    An OutOfMemory, and any error that is not an InvalidArgument, is logged with its traceback.
    """
    if isinstance(error, InvalidArgument) and not isinstance(error, OutOfMemory):
        return error
    log.error("adapter '%s' failed to load", as_text(name), exc_info=error)
    return ErrorFactory(name, str(folder))(f"failed to load: {error!r}")


@dataclass
class Backoff:
    """Record of failed attempts, which says when the next one may begin.

    attempts: number of failed attempts.
    due: earliest time of the next attempt in seconds.
    """

    attempts: int = 0
    due: float = 0.0

    def failed(self, now: float) -> None:
        """Count a failed attempt at the time `now`, in seconds."""
        self.due = now + min(FIRST_WAIT_SECONDS * 2**self.attempts, MAX_WAIT_SECONDS)
        self.attempts = min(self.attempts + 1, 32)
