"""Adapter folders: where they are, and whether their files have changed.

Symbolic links are followed, because hub caches consist of them. A link that points to another file
counts as a change.
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
"""Minimum seconds between two scans of the folders, and maximum share of a core that scanning
takes. If scans take so long that MAX_LOOK_SECONDS limits the pause between them, the share is
larger.
"""

MAX_LOOK_SECONDS = 1.5
"""Maximum seconds between two scans.

A change takes effect after two scans and a load. The documentation promises five seconds for this.
"""


def find_folders(
    root: Path | None, names: Mapping[str, str], *, quiet: bool = False
) -> dict[str, Path]:
    """Return name → folder of all adapters.

    root: folder whose subfolders are adapters under their own names; None for no such folder.
    names: name → folder of further adapters, which take precedence over subfolders with the same
        name. The folders are relative to the root, as in the vLLM backend's `multi_lora.json`, or
        absolute if there is no root.
    quiet: whether to omit the log message about names that are defined twice.
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
            log.warning("adapter '%s' is defined twice: %s is used, and %s is not", *texts)
        folders[name] = path
    return folders


class FolderFinder:
    """Callable that returns the result of `find_folders`: the same object until the result
    changes.
    """

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
    """Return the names of all entries of the root that may be adapters, sorted.

    Raises InvalidArgument if the root cannot be read.
    """
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
    """Return what `folders_in` returns, without the compiled core."""
    entries = sorted(root.iterdir(), key=os.fsencode)
    return [e.name for e in entries if not e.name.startswith(".") and _may_be_adapter(e)]


def _may_be_adapter(entry: Path) -> bool:
    """Return whether an entry may be an adapter: it is a folder, or a broken link.

    A broken link is reported as an adapter that cannot be loaded.
    """
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
    """Return the stamp of a folder, which changes whenever one of its files changes. Never raises.

    The stamp of an unreadable folder contains the error (see `error_of`).
    """
    return stamps_of([os.fsencode(folder)])[0]


def error_of(stamp: Stamp) -> OSError | None:
    """Return the error in the stamp of an unreadable folder; None for a readable one."""
    if not stamp.startswith(b"!") or b"\0" in stamp:
        return None
    number = int(stamp[1:])
    return OSError(number, os.strerror(number))


def stamps_of(folders: Sequence[bytes]) -> list[Stamp]:
    """Return the stamps (see `stamp_of`) of these folders."""
    core = _native()
    if core is None:
        return list(map(_stamp_of, folders))
    stamps: list[Stamp] = core.folder_stamps(folders)
    return stamps


def _stamp_of(folder: bytes) -> Stamp:
    """Return what `stamp_of` returns, without the compiled core.

    The stamp contains the name of each entry and, after following links, its device, inode, size
    and time of modification. If the folder cannot be read, the stamp contains the number of the
    error.
    """
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
    """Return the compiled functions, or None if they are not compiled.

    One call scans thousands of folders without holding the GIL.
    """
    try:
        return native.kernels().folder_scan
    except ImportError:
        return None


def _failed_transiently(stamp: Stamp) -> bool:
    """Return whether this is the stamp of a folder whose reading failed transiently.

    The cause of such a failure lies outside the folder's files.
    """
    error = error_of(stamp)
    return error is not None and is_transient(error)


class FolderWatch:
    """Thread that scans the adapters' folders repeatedly until it is closed.

    It reports a change once the files have been unchanged for SETTLED_SECONDS.
    """

    def __init__(
        self,
        find: Callable[[], Mapping[str, Path]],
        changed: Callable[[Mapping[str, tuple[Path, Stamp]]], None],
        clock: Callable[[], float] = time.monotonic,
        retry: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the watch; `start` starts its thread.

        find: returns the present folders by name.
        changed: called when a folder was added or removed, or has changed and then settled. Its
            argument has the folder and the stamp of every present name. A folder that is still
            changing keeps the stamp that was last reported, and is missing if there is none.
        retry: called after each scan, to retry folders that could not be read.
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
        """True if no folder was still changing at the last scan."""
        self._closed = threading.Event()
        self._pause = LOOK_SECONDS
        self._thread: threading.Thread | None = None

    def start(self, known: Mapping[str, tuple[Path, Stamp]]) -> None:
        """Start the thread.

        known: folder and stamp of each name that has been read already.
        """
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
        """Wait until the next scan is due or the watch is closed; return whether it is closed.

        If the watch is closed during the wait and started again, the next call waits for the rest
        of the time.
        """
        began = self._clock()
        closed = self._closed.wait(self._pause)
        self._pause = max(0.0, self._pause - (self._clock() - began))
        return closed

    def look(self, now: float) -> None:
        """Scan the folders once, and call `changed` if a folder has changed and then settled.

        now: seconds on the watch's clock.
        """
        try:
            folders = self._find()
        except InvalidArgument:
            return  # The root cannot be read. Known adapters stay available.
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
            if name in self._reported and _failed_transiently(stamp):
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
                settled[name] = self._reported[name]  # The old version serves until then.
        self._seen = seen
        if settled != self._reported:
            self._reported = settled
            self._changed(settled)
