"""A queue of messages on disk, which survives the end of the process."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from vlora.errors import ServerError

SUFFIX = ".queue"
LOCK_SECONDS = 1.0  # Time to wait for another process that has the file open.


class DiskQueue:
    """Messages in their order. At most `max_messages` and `max_bytes`: beyond, the oldest are
    dropped and counted. Its methods may be called by several threads.

    A message that was put survives the process's death. The last ones may be lost if the machine
    itself stops, since a sync of each would take more time than all else.
    """

    def __init__(self, path: Path, max_messages: int, max_bytes: int) -> None:
        """Open or make the file. Raises ServerError, also if another process has it open."""
        self.dropped = 0
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = sqlite3.connect(
                path, LOCK_SECONDS, isolation_level=None, check_same_thread=False
            )
            for setting in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL"):
                self._file.execute(f"PRAGMA {setting}")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS messages"
                " (number INTEGER PRIMARY KEY AUTOINCREMENT, content BLOB NOT NULL)"
            )
            count = "SELECT COUNT(*), COALESCE(SUM(LENGTH(content)), 0) FROM messages"
            self._count, self._bytes = self._file.execute(count).fetchone()
            self._drop_excess()
        except (OSError, sqlite3.Error) as error:
            reason = f"the queue {path} cannot be used: {error}"
            remedy = "another `vlora watch` may use it; if it is damaged, remove it"
            raise ServerError(f"{reason}; {remedy}") from error

    def __len__(self) -> int:
        return int(self._count)

    @property
    def size_bytes(self) -> int:
        """Number of bytes of all messages."""
        return int(self._bytes)

    def put(self, content: bytes) -> None:
        """Append a message. If it is too large, or the disk refuses it, it is dropped."""
        with self._lock:
            if len(content) > self._max_bytes:
                self.dropped += 1
                return
            try:
                self._file.execute("INSERT INTO messages (content) VALUES (?)", (content,))
                self._count += 1
                self._bytes += len(content)
                self._drop_excess()
            except sqlite3.Error:
                self.dropped += 1

    def first(self) -> tuple[int, bytes] | None:
        """Return the number and the content of the oldest message. Raises sqlite3.Error."""
        with self._lock:
            oldest = "SELECT number, content FROM messages ORDER BY number LIMIT 1"
            found = self._file.execute(oldest).fetchone()
        return None if found is None else (found[0], found[1])

    def remove(self, number: int) -> None:
        """Remove a message, if it is still there. Raises sqlite3.Error."""
        with self._lock:
            self._remove(number)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _remove(self, number: int) -> bool:
        removed = self._file.execute(
            "DELETE FROM messages WHERE number = ? RETURNING LENGTH(content)", (number,)
        ).fetchone()
        if removed is None:
            return False
        self._count -= 1
        self._bytes -= removed[0]
        return True

    def _drop_excess(self) -> None:
        while self._count > self._max_messages or self._bytes > self._max_bytes:
            oldest = self._file.execute("SELECT MIN(number) FROM messages").fetchone()[0]
            if not self._remove(oldest):
                return
            self.dropped += 1


def count_messages(path: Path) -> int | None:
    """Return the number of messages in the file of a queue that nobody has open, or None if it
    cannot be read."""
    try:
        with closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", LOCK_SECONDS, uri=True)
        ) as file:
            return int(file.execute("SELECT COUNT(*) FROM messages").fetchone()[0])
    except sqlite3.Error:
        return None
