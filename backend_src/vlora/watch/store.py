"""Pictures, clips and records of events in a folder, with a retention by days and bytes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
from bisect import insort
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from vlora.atomic_file import replace_text
from vlora.errors import ServerError
from vlora.strict_yaml import Float, StrictModel
from vlora.watch.events import Event

# Names of the store's files: the id of an event, and what the file holds. Other files in the folder
# are neither served nor removed. The names begin with the time, so their order is that of time.
NAME = re.compile(r"[0-9]{8}T[0-9]{6}\.[0-9]{3}Z-[A-Za-z0-9._-]{1,60}\.(?:jpg|mp4|json)")
PART = ".part"  # Suffix of a file that is being written.
OPEN = "open.events"  # Records of the events that have begun and not ended.


class Retention(StrictModel):
    """How long pictures and clips are kept, at most. folder: also for the queues of the sinks."""

    folder: Path = Path("vlora-watch")
    days: Annotated[Float, Field(gt=0, le=36500)] = 7.0
    megabytes: Annotated[Float, Field(gt=0)] = 1000.0


class Store:
    """The files of events. Its methods may be called by several threads.

    errors: number of files that could not be written, such as on a full disk; error: the last one.
    """

    def __init__(self, retention: Retention) -> None:
        self.errors = 0
        self.error = ""
        self._folder = retention.folder / "events"
        self._age = timedelta(days=retention.days)
        self._max_bytes = retention.megabytes * 1e6
        self._lock = threading.Lock()
        try:
            # Others of this machine must not see the pictures of the cameras.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files = [(path.name, path.stat().st_size) for path in self._folder.iterdir()]
            for name, _ in files:
                if name.endswith(PART) and NAME.fullmatch(name.removesuffix(PART)):
                    (self._folder / name).unlink()
        except OSError as error:
            reason = f"the folder {self._folder} cannot be used: {error.strerror}"
            raise ServerError(f"{reason}; name another as retention.folder") from error
        self._sizes = {name: size for name, size in files if NAME.fullmatch(name)}
        self._names = sorted(self._sizes)
        self.trim()

    def lock(self) -> None:
        """Keep the folder from other processes until `unlock`. Raises ServerError."""
        self._handle = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._handle)
            reason = f"another `vlora watch` uses the folder {self._folder}"
            raise ServerError(f"{reason}; name another as retention.folder") from None
        except OSError:  # The file system has no locks.
            pass

    def unlock(self) -> None:
        os.close(self._handle)

    @property
    def size_bytes(self) -> int:
        """Number of bytes of all files."""
        return sum(self._sizes.values())

    def save(self, name: str, content: bytes) -> bool:
        """Write or replace a file. Return False, and count it, if the system refuses."""
        assert NAME.fullmatch(name), name
        path = self._folder / name
        part = path.with_name(name + PART)
        try:
            part.write_bytes(content)
            part.replace(path)
        except OSError as error:
            self._note(error)
            self._remove(part)
            return False
        with self._lock:
            if name not in self._sizes:
                insort(self._names, name)
            self._sizes[name] = len(content)
        self.trim()
        return True

    def trim(self) -> None:
        """Remove the oldest files beyond the retention."""
        oldest = (datetime.now(UTC) - self._age).strftime("%Y%m%dT%H%M%S")
        with self._lock:
            excess = self.size_bytes - self._max_bytes
            count = 0
            for name in self._names:
                if name >= oldest and excess <= 0:
                    break
                excess -= self._sizes.pop(name)
                self._remove(self._folder / name)
                count += 1
            del self._names[:count]

    def path(self, name: str) -> Path | None:
        """Return the path of a file that the store holds; None for any other name."""
        return self._folder / name if name in self._sizes else None

    def media_of(self, event: Event) -> dict[str, str | None]:
        """Return the names of the files with the picture and the clip of an event, or None for a
        missing one. Without a clip of the end, that of the begin is named."""
        names = {
            "picture": (f"{event.id}.jpg",),
            "clip": (f"{event.id}-end.mp4", f"{event.id}-begin.mp4"),
        }
        return {key: next(filter(self.path, some), None) for key, some in names.items()}

    def newest(self, count: int) -> list[dict[str, Any]]:
        """Return the records of the last events, the newest first."""
        with self._lock:
            names = [name for name in reversed(self._names) if name.endswith(".json")][:count]
        records = []
        for name in names:
            try:
                record = json.loads((self._folder / name).read_bytes())
            except (OSError, ValueError) as error:  # Changed by somebody else.
                self._note(error)
                continue
            records.append(record)
        return records

    def save_open(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Keep the records of the events that last, for `left_open` of the next process."""
        path = self._folder / OPEN
        try:
            if records:
                replace_text(path, json.dumps(records))
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            self._note(error)

    def left_open(self) -> list[dict[str, Any]]:
        """Return the records of the events that lasted when the last process was killed."""
        try:
            records = json.loads((self._folder / OPEN).read_bytes())
            return [one for one in records if NAME.fullmatch(f"{one['id']}.json")]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, LookupError) as error:  # Changed by somebody else.
            self._note(error)
            return []

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        self.errors += 1
        self.error = getattr(error, "strerror", None) or str(error)


def file_name(event: Event, kind: str) -> str:
    """Return the name of a file of an event. kind: "jpg" for the picture, "json" for the record;
    "mp4" for the clip that is made at the begin, or at the end of an event that has ended."""
    edge = ("-begin" if event.end is None else "-end") if kind == "mp4" else ""
    return f"{event.id}{edge}.{kind}"
