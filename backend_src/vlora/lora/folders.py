"""Where adapters lie, and whether their files have changed.

Links are followed: hub caches are made of them, and a link that leads elsewhere is a change.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

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
    folders: dict[str, Path] = {}
    if root is not None:
        if not root.is_dir():
            raise InvalidArgument(f"the adapter root {root} is not a folder")
        try:
            entries = sorted(root.iterdir())
        except OSError as error:
            raise InvalidArgument(f"the adapter root {root} cannot be read: {error}") from error
        folders = {
            entry.name: entry
            for entry in entries
            if _may_be_adapter(entry) and not entry.name.startswith(".")
        }
    for name, folder in names.items():
        path = Path(folder) if root is None else root / folder
        if not quiet and name in folders and not _same(folders[name], path):
            told = map(as_text, (name, str(path), str(folders[name])))
            log.warning("adapter '%s' is %s by the file, not %s", *told)
        folders[name] = path
    return folders


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
    try:
        with os.scandir(folder) as entries:
            return tuple(sorted(_stamp(entry) for entry in entries))
    except (OSError, ValueError) as error:
        return (type(error).__name__, str(error))


def _stamp(entry: os.DirEntry[str]) -> tuple[str, int, int, int, int]:
    try:
        found = entry.stat()
    except OSError:
        return (entry.name, 0, 0, 0, 0)
    return (entry.name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


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
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, known: Mapping[str, tuple[Path, Stamp]]) -> None:
        """known: what has been read already."""
        self._told = dict(known)
        self._thread = threading.Thread(target=self._run, name="adapter-folders", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        pause = LOOK_SECONDS
        while not self._closed.wait(pause):
            began = self._clock()
            try:
                self.look(began)
            except Exception:
                log.exception("looking at the adapters' folders failed; it goes on")
            took = self._clock() - began
            pause = min(max(LOOK_SECONDS, took / SHARE), LONGEST_LOOK_SECONDS)

    def look(self, now: float) -> None:
        """One look; tells of what is new and still, or gone."""
        try:
            folders = self._find()
        except InvalidArgument:
            return  # the root cannot be read: what is known goes on serving
        settled: dict[str, tuple[Path, Stamp]] = {}
        seen: dict[str, tuple[Path, Stamp, float]] = {}
        for name, folder in folders.items():
            stamp = stamp_of(folder)
            before = self._seen.get(name)
            same = before is not None and before[:2] == (folder, stamp)
            seen[name] = before if before is not None and same else (folder, stamp, now)
            if self._told.get(name) == (folder, stamp) or now - seen[name][2] >= SETTLED_SECONDS:
                settled[name] = (folder, stamp)
            elif name in self._told:
                settled[name] = self._told[name]  # until then the old version serves
        self._seen = seen
        if settled != self._told:
            self._told = settled
            self._changed(settled)
