"""Adapter folders: where they are, and whether their files have changed.

Links are followed, since hub caches consist of them; a link with a new target is a change.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from vlora import native
from vlora.errors import InvalidArgument
from vlora.lora.handle import Stamp
from vlora.lora.peft_config import as_text
from vlora.lora.transient import is_transient

log = logging.getLogger(__name__)

SETTLED_SECONDS = 1.0
"""Time without changes after which a folder is read."""

LOOK_SECONDS, MAX_CORE_SHARE = 0.5, 0.02
"""Minimum time between two looks, and maximum share of a core that looking may take."""

MAX_LOOK_SECONDS = 1.5
"""Maximum time between two looks. A change takes effect within two looks and a load; five
seconds are promised."""


def find_folders(
    root: Path | None, names: Mapping[str, str], *, quiet: bool = False
) -> dict[str, Path]:
    """Return name → folder: every folder under `root` by its own name, and those of `names`.

    A name in `names` wins over a folder of the same name. Relative folders need a root.

    names: as in the vLLM backend's `multi_lora.json`, name → folder relative to the root.
    quiet: do not log a name that is defined twice.
    """
    present = () if root is None else folders_in(root)
    return _named(root, present, names, quiet=quiet)


def _named(
    root: Path | None, present: Sequence[str], names: Mapping[str, str], *, quiet: bool
) -> dict[str, Path]:
    folders = {} if root is None else {name: root / name for name in present}
    for name, folder in names.items():
        path = Path(folder) if root is None else root / folder
        if not quiet and name in folders and not _same_file(folders[name], path):
            texts = map(as_text, (name, str(path), str(folders[name])))
            log.warning("adapter '%s' is %s by the configuration, not %s", *texts)
        folders[name] = path
    return folders


class FolderFinder:
    """Repeated `find_folders`, which returns the same object as long as the result is equal."""

    def __init__(self, root: Path | None, names: Mapping[str, str]) -> None:
        self._root = root
        self._names = names
        self._present: Sequence[str] | None = None
        self._folders: dict[str, Path] = {}

    def __call__(self) -> Mapping[str, Path]:
        """Return name → folder. Raise InvalidArgument if the root cannot be read."""
        present = () if self._root is None else folders_in(self._root)
        if present != self._present:
            self._folders = _named(self._root, present, self._names, quiet=True)
            self._present = present
        return self._folders


def folders_in(root: Path) -> Sequence[str]:
    """Return the names of possible adapters under the root, in order."""
    if not root.is_dir():
        raise InvalidArgument(f"the adapter root {root} is not a folder")
    core = _native()
    try:
        if core is not None:
            return list(map(os.fsdecode, core.adapter_names(os.fsencode(root))))
        return _folders_in(root)
    except OSError as error:
        raise InvalidArgument(f"the adapter root {root} cannot be read: {error}") from error


def _folders_in(root: Path) -> list[str]:
    """Return what `folders_in` does, without the compiled core."""
    entries = sorted(root.iterdir(), key=os.fsencode)
    return [e.name for e in entries if not e.name.startswith(".") and _may_be_adapter(e)]


def _may_be_adapter(entry: Path) -> bool:
    """Return whether the entry is a folder, or a broken link, which is an adapter that does not
    load."""
    try:
        return entry.is_dir() or (entry.is_symlink() and not entry.exists())
    except OSError:
        return True


def _same_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except (OSError, ValueError):
        return False


def stamp_of(folder: Path) -> Stamp:
    """Return a stamp that differs if a file of the folder has changed. Never raise: an
    unreadable folder has a stamp of its own."""
    return stamps_of([os.fsencode(folder)])[0]


def error_of(stamp: Stamp) -> OSError | None:
    """Return the error that the stamp of an unreadable folder stands for, or None."""
    if not stamp.startswith(b"!") or b"\0" in stamp:
        return None
    number = int(stamp[1:])
    return OSError(number, os.strerror(number))


def stamps_of(folders: Sequence[bytes]) -> list[Stamp]:
    """Return `stamp_of` each of these paths."""
    core = _native()
    if core is None:
        return list(map(_stamp_of, folders))
    stamps: list[Stamp] = core.folder_stamps(folders)
    return stamps


def _stamp_of(folder: bytes) -> Stamp:
    """Return what `stamp_of` does, without the compiled core: each entry's name and, with links
    followed, its device, inode, size and time; or the error's number."""
    try:
        with os.scandir(folder) as entries:
            return b"".join(_entry_stamp(e) for e in sorted(entries, key=lambda e: e.name))
    except ValueError:
        return b"!%d" % errno.EINVAL
    except OSError as error:
        return b"!%d" % (error.errno or 0)


def _entry_stamp(entry: os.DirEntry[bytes]) -> bytes:
    values = (0, 0, 0, 0)
    try:
        status = entry.stat()
        values = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError:
        pass
    return entry.name + b"\0" + struct.pack("<QQQq", *values)


@cache
def _native() -> Any:
    """Return the compiled functions, which look at thousands of folders in one call without the
    interpreter's lock; None if they are not compiled."""
    try:
        return native.kernels().folder_scan
    except ImportError:
        return None


def _is_unknown(stamp: Stamp) -> bool:
    """Return whether a look failed for a reason that says nothing about the folder."""
    error = error_of(stamp)
    return error is not None and is_transient(error)


class FolderWatch:
    """Thread that looks at the folders until closed and reports settled changes."""

    def __init__(
        self,
        find: Callable[[], Mapping[str, Path]],
        changed: Callable[[Mapping[str, tuple[Path, Stamp]]], None],
        clock: Callable[[], float] = time.monotonic,
        retry: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the watch; `start` starts its thread.

        find: returns the present folders by name.
        changed: called with all names' folders and stamps if any of them changed: new state for
            those unchanged for SETTLED_SECONDS, the last reported state for others; missing names
            were removed.
        retry: called after each look, to read what could not be read before.
        """
        self._find = find
        self._changed = changed
        self._clock = clock
        self._retry = retry
        self._seen: dict[str, tuple[Path, Stamp, float]] = {}
        self._reported: dict[str, tuple[Path, Stamp]] = {}
        self._folders: Mapping[str, Path] = {}
        self._paths: list[bytes] = []
        self._stamps: list[Stamp] = []
        self._settled = False
        """True if the last look found all folders settled."""
        self._closed = threading.Event()
        self._pause = LOOK_SECONDS
        self._thread: threading.Thread | None = None

    def start(self, known: Mapping[str, tuple[Path, Stamp]]) -> None:
        """Start the thread. known: folders and stamps that have been read already."""
        self._reported = dict(known)
        self._closed.clear()
        self._thread = threading.Thread(target=self._run, name="adapter-folders", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed_before_next():
            began = self._clock()
            try:
                self.look(began)
                self._retry()
            except Exception:
                log.exception("looking at the adapters' folders failed; trying again")
            took = self._clock() - began
            self._pause = min(max(LOOK_SECONDS, took / MAX_CORE_SHARE), MAX_LOOK_SECONDS)

    def _closed_before_next(self) -> bool:
        """Wait until the next look is due or the watch is closed, and return whether it is
        closed. A watch that is started again waits for the rest of the time."""
        began = self._clock()
        closed = self._closed.wait(self._pause)
        self._pause = max(0.0, self._pause - (self._clock() - began))
        return closed

    def look(self, now: float) -> None:
        """Look at the folders once and report those that are new and settled, or removed."""
        try:
            folders = self._find()
        except InvalidArgument:
            return  # The root cannot be read: known adapters stay available.
        if folders is not self._folders:
            self._folders = folders
            self._paths = [os.fsencode(folder) for folder in folders.values()]
            self._settled = False
        stamps = stamps_of(self._paths)
        if self._settled and stamps == self._stamps:
            return
        self._stamps = stamps
        settled: dict[str, tuple[Path, Stamp]] = {}
        seen: dict[str, tuple[Path, Stamp, float]] = {}
        self._settled = True
        for (name, folder), stamp in zip(folders.items(), stamps, strict=True):
            before = self._seen.get(name)
            if name in self._reported and _is_unknown(stamp):
                stamp = self._reported[name][1]
                self._settled = False
            unchanged = before is not None and before[:2] == (folder, stamp)
            seen[name] = before if before is not None and unchanged else (folder, stamp, now)
            if (
                self._reported.get(name) == (folder, stamp)
                or now - seen[name][2] >= SETTLED_SECONDS
            ):
                settled[name] = (folder, stamp)
                continue
            self._settled = False
            if name in self._reported:
                settled[name] = self._reported[name]  # Until then the old version serves.
        self._seen = seen
        if settled != self._reported:
            self._reported = settled
            self._changed(settled)
