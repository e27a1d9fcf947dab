"""Failures that are not about an adapter's content, and how long to wait before another attempt.

A process without free file descriptors or memory, or a disk that answers with an error, says
nothing about the files of an adapter: what failed for such a reason is tried again.
"""

from __future__ import annotations

import errno
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from vlora.errors import InvalidArgument
from vlora.lora.peft_config import ErrorFactory, as_text

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
"""Errors that reading a folder gives until its files change: a missing file, a loop of links."""

FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.25, 30.0
"""Time until the second attempt, which doubles from attempt to attempt, and its maximum."""

MAX_ATTEMPTS = 5
"""Number of attempts to load an adapter, about four seconds, before waiting requests are ended."""

_NUMBER = re.compile(r"\b(?:os error|Error code) (\d+)")
"""Error numbers in messages of Rust and PyTorch, whose exceptions carry none."""


def is_transient_errno(number: int) -> bool:
    return number not in CONTENT_ERRNOS


def is_transient(error: BaseException) -> bool:
    """Return whether an attempt to read, load or pack failed for a reason outside of the files.

    Decided by the first exception in the chain of causes that carries an error number. An OSError
    without one is transient: nothing shows that it will be the same next time.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return True
        if isinstance(cause, OSError):
            return cause.errno is None or is_transient_errno(cause.errno)
        if isinstance(cause, (RuntimeError, SafetensorError)):
            number = _NUMBER.search(str(cause))
            return number is not None and is_transient_errno(int(number[1]))
        cause = cause.__cause__
    return False


def as_adapter_error(name: str, folder: Path, error: Exception) -> InvalidArgument:
    """Return `error` as one that names the adapter; log it with its traceback if it is untyped."""
    if isinstance(error, InvalidArgument):
        return error
    log.error("adapter '%s' failed to load", as_text(name), exc_info=error)
    return ErrorFactory(name, str(folder))(f"failed to load: {error!r}")


@dataclass
class Backoff:
    """Number of failed attempts, and the time before which there is no other attempt."""

    attempts: int = 0
    due: float = 0.0

    def failed(self, now: float) -> None:
        """Count a failed attempt at the time `now`, in seconds."""
        self.due = now + min(FIRST_WAIT_SECONDS * 2**self.attempts, MAX_WAIT_SECONDS)
        self.attempts = min(self.attempts + 1, 32)
