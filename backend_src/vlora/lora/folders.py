"""Where adapters lie, and whether their files have changed.

Links are followed: hub caches are made of them, and a link that leads elsewhere is a change.
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

log = logging.getLogger(__name__)

SETTLED_SECONDS = 1.0
"""A folder is read once its files have been unchanged for so long."""

LOOK_SECONDS, SHARE = 0.5, 0.02
"""From look to look at least; and so long that looking takes no more than this share of a core."""

LONGEST_LOOK_SECONDS = 1.5
"""A change takes effect within two looks and a load: five seconds are promised."""


def find_folders(
    root: Path | None, names: Mapping[str, str], *, quiet: bool = False
) -> dict[str, Path]:
    """Name → folder: every folder under `root` under its own name, and those of `names`.

    names: as in the vLLM backend's `multi_lora.json`, name → folder relative to the root. The
    file wins over a folder of the same name; a clash is logged, but not where
    `quiet`. Relative folders need a root.
    """
    found = () if root is None else folders_in(root)
    return _named(root, found, names, quiet=quiet)


def _named(
    root: Path | None, found: Sequence[str], names: Mapping[str, str], *, quiet: bool
) -> dict[str, Path]:
    folders = {} if root is None else {name: root / name for name in found}
    for name, folder in names.items():
        path = Path(folder) if root is None else root / folder
        if not quiet and name in folders and not _same(folders[name], path):
            told = map(as_text, (name, str(path), str(folders[name])))
            log.warning("adapter '%s' is %s by the file, not %s", *told)
        folders[name] = path
    return folders


class Finder:
    """`find_folders`, again and again: the same object as long as the answer is the same."""

    def __init__(self, root: Path | None, names: Mapping[str, str]) -> None:
        self._root = root
        self._names = names
        self._found: Sequence[str] | None = None
        self._folders: dict[str, Path] = {}

    def __call__(self) -> Mapping[str, Path]:
        """Raises InvalidArgument where the root cannot be read."""
        found = () if self._root is None else folders_in(self._root)
        if found != self._found:
            self._folders = _named(self._root, found, self._names, quiet=True)
            self._found = found
        return self._folders


def folders_in(root: Path) -> Sequence[str]:
    """Names of what may be adapters under the root, in order."""
    if not root.is_dir():
        raise InvalidArgument(f"the adapter root {root} is not a folder")
    look = _native()
    try:
        if look is not None:
            return list(map(os.fsdecode, look.adapter_names(os.fsencode(root))))
        return _folders_in(root)
    except OSError as error:
        raise InvalidArgument(f"the adapter root {root} cannot be read: {error}") from error


def _folders_in(root: Path) -> list[str]:
    """The same without the core."""
    entries = sorted(root.iterdir(), key=os.fsencode)
    return [e.name for e in entries if not e.name.startswith(".") and _may_be_adapter(e)]


def _may_be_adapter(entry: Path) -> bool:
    """A folder, or a link that leads nowhere: that is an adapter that does not load."""
    try:
        return entry.is_dir() or (entry.is_symlink() and not entry.exists())
    except OSError:
        return True


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False


def stamp_of(folder: Path) -> Stamp:
    """Alike for two looks between which no file of the folder has changed. Never raises: what
    cannot be looked at is a stamp of its own."""
    return stamps_of([os.fsencode(folder)])[0]


def stamps_of(folders: Sequence[bytes]) -> list[Stamp]:
    """`stamp_of` each of these paths."""
    look = _native()
    if look is None:
        return list(map(_stamp_of, folders))
    found: list[Stamp] = look.folder_stamps(folders)
    return found


def _stamp_of(folder: bytes) -> Stamp:
    """The same without the core: each entry's name and, links followed, its device, inode, size and
    time; or the number of the error."""
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
        found = entry.stat()
        values = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    except OSError:
        pass
    return entry.name + b"\0" + struct.pack("<QQQq", *values)


@cache
def _native() -> Any:
    """Thousands of folders in one call without the interpreter's lock; None: not compiled."""
    try:
        return native.kernels().folder_scan
    except ImportError:
        return None


class FolderWatch:
    """Looks at the folders on a thread of its own, until closed, and tells what has settled."""

    def __init__(
        self,
        find: Callable[[], Mapping[str, Path]],
        changed: Callable[[Mapping[str, tuple[Path, Stamp]]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """find: the folders by name, now. changed: called with those that are new or have changed
        and been still for SETTLED_SECONDS, and with all known names' present state otherwise
        unchanged: what is missing there is gone."""
        self._find = find
        self._changed = changed
        self._clock = clock
        self._seen: dict[str, tuple[Path, Stamp, float]] = {}
        self._told: dict[str, tuple[Path, Stamp]] = {}
        self._folders: Mapping[str, Path] = {}
        self._paths: list[bytes] = []
        self._stamps: list[Stamp] = []
        self._settled = False
        """Whether all of the last look was still."""
        self._closed = threading.Event()
        self._pause = LOOK_SECONDS
        self._thread: threading.Thread | None = None

    def start(self, known: Mapping[str, tuple[Path, Stamp]]) -> None:
        """known: what has been read already."""
        self._told = dict(known)
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
            except Exception:
                log.exception("looking at the adapters' folders failed; it goes on")
            took = self._clock() - began
            self._pause = min(max(LOOK_SECONDS, took / SHARE), LONGEST_LOOK_SECONDS)

    def _closed_before_next(self) -> bool:
        """Waits until a look is due or the watch is closed; started again, for the rest."""
        began = self._clock()
        closed = self._closed.wait(self._pause)
        self._pause = max(0.0, self._pause - (self._clock() - began))
        return closed

    def look(self, now: float) -> None:
        """One look; tells of what is new and still, or gone."""
        try:
            folders = self._find()
        except InvalidArgument:
            return  # the root cannot be read: what is known goes on serving
        if folders is not self._folders:
            self._folders = folders
            self._paths = [os.fsencode(folder) for folder in folders.values()]
            self._stamps = []
        stamps = stamps_of(self._paths)
        if self._settled and stamps == self._stamps:
            return
        self._stamps = stamps
        settled: dict[str, tuple[Path, Stamp]] = {}
        seen: dict[str, tuple[Path, Stamp, float]] = {}
        self._settled = True
        for (name, folder), stamp in zip(folders.items(), stamps, strict=True):
            before = self._seen.get(name)
            same = before is not None and before[:2] == (folder, stamp)
            seen[name] = before if before is not None and same else (folder, stamp, now)
            if self._told.get(name) == (folder, stamp) or now - seen[name][2] >= SETTLED_SECONDS:
                settled[name] = (folder, stamp)
                continue
            self._settled = False
            if name in self._told:
                settled[name] = self._told[name]  # until then the old version serves
        self._seen = seen
        if settled != self._told:
            self._told = settled
            self._changed(settled)
