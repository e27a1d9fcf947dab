"""Triton's log: its file, and the errors and the adapters in it."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import IO

from vlora.errors import ServerError

# Maximum number of bytes of a log that are read, because a server may log for months.
MAX_BYTES = 4 * 1024 * 1024
MAX_LINES = 12  # Lines of a log that explain a failure.
LEAST_FREE_BYTES = 64 * 1024  # Room on the disk for the log: four times what a start writes.
STACK = "\\n\\nAt:"  # Text that precedes a Python stack in a line of Triton's log.
TABLE = ("+", "|")  # First characters of the lines that belong to a table of options or models.

# Parts of lines that a healthy server without a GPU also logs. They do not explain a failure.
NOISE = (
    *("CudaDriverHelper", "unable to create stream", "Failed to initialize NVML"),
    *("pinned", "DCGM"),
)

# Messages of Triton about its own arguments, which stand before or after the list of options.
_USAGE = re.compile("unrecognized option|Unexpected argument|option .* requires an argument")
_INFORMATION = re.compile(r"I\d{4} \d\d:\d\d:")
_FAILED = re.compile(r".*?failed to load '.*?'( version \d+)?")
_BROKEN = re.compile(r"^W\d{4} .*?\] \"\[lmm\] (adapter '(.*?)': .*)\"$")
_MENDED = re.compile(r"^I\d{4} .*?\] \"\[lmm\] (adapter '(.*?)' can be loaded now)\"$")
_REMOVED = re.compile(r"^I\d{4} .*?\] \"\[lmm\] adapter '(.*?)' was removed\"$")
# The log names only the first of many adapters (`MAX_LOGGED` in adapters/catalog.py).
_MORE_BROKEN = re.compile(r"^W\d{4} .*?\] \"\[lmm\] (\d+) more adapters cannot be loaded")


def create(path: Path) -> IO[bytes]:
    """Create the log's folder and file, and return the file, open for writing and empty.

    Raises ServerError with the path and the reason, also for a full disk: models that cannot log
    fail to load, and the empty log would not say why.
    """
    # A symbolic link is refused, because in a shared folder another user may have created it.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o666)
        disk = os.fstatvfs(descriptor)
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < LEAST_FREE_BYTES:
            os.close(descriptor)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.fdopen(descriptor, "wb")
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ServerError(
            f"cannot write the log {path}: {reason}; name another file with --log FILE,"
            " or - for standard output"
        ) from None


def read_end(path: Path, start: int = 0, limit: int = MAX_BYTES) -> str:
    """Return the text of the log from byte `start` on, at most its last `limit` bytes.

    Returns "" if the log is not a file.
    """
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        skipped = max(start, file.seek(0, 2) - limit)
        file.seek(skipped)
        content = file.read(limit)
    if skipped > start:
        # The first line may be incomplete.
        content = content.partition(b"\n")[2]
    return content.decode(errors="replace")


def lower_noise(path: Path) -> None:
    """Make information of the errors that Triton logs on each start without a GPU."""
    if not path.is_file():
        return
    # Triton goes on writing at the file's end, so nothing but single bytes is replaced.
    with path.open("r+b") as file:
        start = 0
        for line in file.read(MAX_BYTES).splitlines(keepends=True):
            if re.match(rb"E\d{4} ", line) and any(noise.encode() in line for noise in NOISE):
                os.pwrite(file.fileno(), b"I", start)
            start += len(line)


def why_it_did_not_start(log: str) -> str:
    """Return the messages of models that failed to load, or else the errors, or else the end.

    Of models that failed for the same reason, the first one is named.
    """
    text = log.splitlines()
    unloaded: dict[str, str] = {}  # By reason.
    for line in text:
        if _FAILED.match(line) and not _INFORMATION.match(line):
            message = line.split(STACK)[0]
            unloaded.setdefault(_FAILED.sub("", message), message)
    usage = [line for line in text if _USAGE.search(line)]
    errors = usage or [line for line in text if line.startswith("E") or "error:" in line.lower()]
    rest = [line for line in text if not line.startswith(TABLE)]
    return "\n".join(([*unloaded.values()] or _without_noise(errors) or rest)[-MAX_LINES:])


def why_it_failed(log_since_ready: str) -> str:
    """Return the last warnings and errors since the server was ready; "" if there are none."""
    problems = [line for line in log_since_ready.splitlines() if not _INFORMATION.match(line)]
    return "\n".join(_without_noise(problems)[-MAX_LINES:])


def broken_adapters(log: str) -> tuple[list[str], int]:
    """Return name and last reason of each named adapter that could not be loaded, and the number of
    others.
    """
    lines = log.splitlines()
    matches = filter(None, map(_BROKEN.match, lines))
    # Triton puts messages into quotes, and a backslash before a quote in them.
    reasons = {match[2]: match[1].replace('\\"', '"') for match in matches}
    return [*reasons.values()], sum(int(m[1]) for m in map(_MORE_BROKEN.match, lines) if m)


class AdapterNews:
    """The adapters that break and are mended, by a log that grows, from byte `start` on."""

    def __init__(self, path: Path, start: int) -> None:
        self._path, self._start = path, start
        self._reasons: dict[str, str] = {}  # Of the broken adapters, by name.

    def read(self) -> list[str]:
        """Return a sentence about each since the last call.

        A reason is told once, though the log repeats it while a folder is copied.
        """
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._start:
                    self._start = 0  # The log was emptied.
                file.seek(self._start)
                # What follows the last end of a line is read with the next call.
                lines, end, _ = file.read(MAX_BYTES).rpartition(b"\n")
        except OSError:
            return []  # It is the standard output, or was removed: the server goes on without it.
        self._start += len(lines + end)
        news = []
        for line in lines.decode(errors="replace").splitlines():
            if mended := _MENDED.match(line):
                self._reasons.pop(mended[2], None)
                news.append(mended[1])
            elif removed := _REMOVED.match(line):
                self._reasons.pop(removed[1], None)
            elif (broken := _BROKEN.match(line)) and self._reasons.get(broken[2]) != broken[1]:
                self._reasons[broken[2]] = broken[1]
                news.append("warning: " + broken[1].replace('\\"', '"'))
        return news


def _without_noise(lines: list[str]) -> list[str]:
    return [line for line in lines if line.strip() and not any(noise in line for noise in NOISE)]
