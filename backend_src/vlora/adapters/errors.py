"""Errors of adapters: their text, the files that cause them, and failures that are tried again.

A failure is *transient* if the adapter's files did not cause it: for example, the process had no
free file descriptor or memory, or a disk reported an error.
"""

from __future__ import annotations

import errno
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from vlora.errors import AdapterBroken, InvalidArgument, OutOfMemory, pause_after, shown
from vlora.file_names import decoded
from vlora.strict_json import load_object
from vlora.tasks import TASKS
from vlora.weights.safetensors import open_regular

log = logging.getLogger(__name__)

MAX_JSON_BYTES = 1024 * 1024
MAX_REASON_CHARACTERS = 500

# One half of a UTF-16 surrogate pair, which JSON can contain but UTF-8 cannot.
_SURROGATE = re.compile("[\ud800-\udfff]")


def as_text(name: str) -> str:
    """Return `name`, which may contain any bytes or surrogates, as valid UTF-8 with escapes."""
    if name.isascii() and "\\" not in name:
        return name  # There may be 100,000 names.
    return decoded(name).encode(errors="backslashreplace").decode()


class ErrorFactory:
    """Makes errors that name the adapter and the file. Their text is always valid UTF-8."""

    def __init__(self, name: str, file: str = "") -> None:
        self.name = name
        self._file = file

    def in_file(self, file: str) -> ErrorFactory:
        """Return a factory of errors in another file of the same adapter."""
        return ErrorFactory(self.name, file)

    def unreadable(self, error: Exception) -> AdapterBroken:
        """Return the error for a file that the system does not let this process read."""
        if isinstance(error, PermissionError):
            need = "the server's user may need `chmod -R a+rX` of the folder"
            advice = f"PEFT saves weights with mode 0600, so {need}"
            return self(f"cannot be read: permission denied; {advice}")
        return self(f"cannot be read: {error}")

    def __call__(self, reason: str) -> AdapterBroken:
        if len(reason) > MAX_REASON_CHARACTERS:
            reason = reason[: MAX_REASON_CHARACTERS - 1] + "…"
        return AdapterBroken(as_text(f"adapter '{self.name}': {self._file} {reason}"))


def is_names(value: Any) -> bool:
    """Return whether `value` is a list of non-empty names that are valid UTF-8."""
    return isinstance(value, list) and all(
        isinstance(name, str) and name and not _SURROGATE.search(name) for name in value
    )


def check_tasks(key: str, value: Any, invalid: ErrorFactory) -> None:
    """Raise InvalidArgument unless `value`, that of `key`, is a list of different tasks."""
    if not is_names(value) or len(set(value)) != len(value):
        raise invalid(f"must give {key} as a list of different names")
    if unknown := set(value) - set(TASKS):
        task = shown(min(unknown))
        raise invalid(f"has the unknown task {task} in {key}; known tasks are {', '.join(TASKS)}")


def read_json(path: Path, invalid: ErrorFactory) -> dict[str, Any]:
    """Return the JSON object in a file of the adapter's folder. Raises InvalidArgument."""
    invalid = invalid.in_file(path.name)
    try:
        with open_file(path, invalid) as opened:
            content = opened.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise invalid(f"has more than {MAX_JSON_BYTES} bytes")
        return load_object(content.decode("utf-8-sig"), "")
    except UnicodeDecodeError as error:
        raise invalid(f"is not valid UTF-8 at byte {error.start}") from error
    except AdapterBroken:
        raise
    except InvalidArgument as error:
        raise invalid(error.message.lstrip()) from error
    except OSError as error:
        raise invalid.unreadable(error) from error


def open_file(path: Path, invalid: ErrorFactory) -> BinaryIO:
    """Open a regular file of the adapter's folder. Raises InvalidArgument."""
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise invalid("is missing") from None
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise invalid("is not a regular file") from None
        raise invalid.unreadable(error) from error


# Error numbers whose cause lies in the files, such as a missing file or a loop of links.
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

# Wait before the second attempt, and its maximum. The wait doubles with each attempt.
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.25, 30.0

# Number of attempts to load an adapter before its requests fail. The waits between the attempts
# take about four seconds in total.
MAX_ATTEMPTS = 5

# Error numbers in messages of Rust and PyTorch, whose exceptions have no attribute for them.
_NUMBER = re.compile(r"\b(?:os error|Error code) (\d+)")


def is_transient(error: BaseException) -> bool:
    """Return whether a failure has its cause outside the adapter's files: lack of memory, or an OS
    error whose number is missing or not in `CONTENT_ERRNOS`. The first cause of these decides.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (MemoryError, OutOfMemory)):
            return True
        if isinstance(cause, OSError):
            return cause.errno is None or cause.errno not in CONTENT_ERRNOS
        if isinstance(cause, (RuntimeError, SafetensorError)):
            number = _NUMBER.search(str(cause))
            return number is not None and int(number[1]) not in CONTENT_ERRNOS
        cause = cause.__cause__
    return False


def as_adapter_error(name: str, folder: Path, error: BaseException) -> InvalidArgument:
    """Return `error` as an InvalidArgument that names the adapter. Others are logged."""
    if isinstance(error, InvalidArgument) and not isinstance(error, OutOfMemory):
        return error
    log.error("adapter '%s' failed to load", as_text(name), exc_info=error)
    return ErrorFactory(name, str(folder))(f"failed to load: {error!r}")


@dataclass
class Backoff:
    """Number of failed attempts, and the earliest time of the next one in seconds."""

    attempts: int = 0
    due: float = 0.0

    def failed(self, now: float) -> None:
        """Count a failed attempt at the time `now`, in seconds."""
        self.attempts += 1
        self.due = now + pause_after(self.attempts, FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS)
