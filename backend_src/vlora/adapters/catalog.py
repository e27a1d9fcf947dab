"""Catalogue of adapters: their folders, the watch over them, and the table of their names.

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
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, TypeVar

from vlora import native
from vlora.adapters.errors import Backoff, ErrorFactory, as_adapter_error, as_text, is_transient
from vlora.adapters.files import Adapter, AdapterDescription, describe_adapter, read_adapter
from vlora.adapters.handle import AdapterHandle, Stamp
from vlora.adapters.model_shape import ModelShape
from vlora.adapters.routing import Router
from vlora.errors import InvalidArgument, NotFound, known_names
from vlora.file_names import to_path, to_text

log = logging.getLogger(__name__)

T = TypeVar("T")

SETTLED_SECONDS = 1.0  # Time without changes after which a folder is read.

# Minimum seconds between two scans of the folders, and maximum share of a core that scanning takes.
# If scans take so long that MAX_LOOK_SECONDS limits the pause between them, the share is larger.
LOOK_SECONDS, MAX_CORE_SHARE = 0.5, 0.02

# Maximum seconds between two scans. A change takes effect after two scans and a load. The
# documentation promises five seconds for this.
MAX_LOOK_SECONDS = 1.5

# Maximum number of unchanged folders that a scan reads, in 0.3 s. More take turns, so that new
# folders are found as soon, whatever else the root holds.
MAX_SCANNED = 20_000

REPORT_SECONDS = 0.2  # Minimum seconds between two reports of a reader that goes on reading.
# Maximum number of adapters that the log names when many change at once, and the text about others.
MAX_LOGGED = 100
CANNOT_BE_LOADED = "cannot be loaded; `vlora adapters check` names all"

MAX_HINT_LENGTH = 256  # Maximum length of an unknown name for which similar names are suggested.

# Number of names before and after an unknown name that are compared with it, in each of two orders.
# Comparing two names takes about 70 µs.
HINT_NEIGHBOURS = 16


LOST_AND_FOUND = "lost+found"  # Of a file system's root, which may be the adapters' volume.
EMPTY: Stamp = b""  # Stamp of an empty folder.

# -- folders and their stamps ----------------------------------------------------------------------


def find_folders(root: Path | None, names: Mapping[str, str]) -> dict[str, Path]:
    """Return name → folder of all adapters.

    root: folder whose subfolders are adapters unless they are empty; None for no such folder.
    names: name → folder of further adapters, relative to the root (absolute without one), as in the
        vLLM backend's `multi_lora.json`. They take precedence over subfolders with the same name.
    """
    found = {} if root is None else {name: root / to_path(name) for name in folders_in(root)}
    stamps = stamps_of([os.fsencode(folder) for folder in found.values()])
    own = {
        name: folder
        for (name, folder), stamp in zip(found.items(), stamps, strict=True)
        if stamp != EMPTY
    }
    named = _paths(root, names)
    for name in named:
        if name in own and not _same_file(own[name], named[name]):
            texts = map(as_text, (name, str(named[name]), str(own[name])))
            log.warning("adapter '%s' is defined twice: %s is used, and %s is not", *texts)
    return own | named


def _paths(root: Path | None, names: Mapping[str, str]) -> dict[str, Path]:
    return {name: (root or Path()) / to_path(at) for name, at in names.items()}


class FolderFinder:
    """Callable with the result of `find_folders`: the same object until the result changes."""

    def __init__(self, root: Path | None, names: Mapping[str, str]) -> None:
        self._root = root
        self._named = _paths(root, names)
        self._present: Sequence[str] | None = None
        self._folders = self._named

    def __call__(self) -> Mapping[str, Path]:
        """Return name → folder. Raise InvalidArgument if the root cannot be read."""
        if self._root is not None and (present := folders_in(self._root)) != self._present:
            self._present = present
            known = self._folders  # Making 100,000 paths takes half a second.
            found = {name: known.get(name) or self._root / to_path(name) for name in present}
            self._folders = found | self._named
        return self._folders


def folders_in(root: Path) -> Sequence[str]:
    """Return the names of the entries that may be adapters, as text, in the order of their bytes.

    Raises InvalidArgument if the root cannot be read.
    """
    if not root.is_dir():
        raise InvalidArgument(f"the adapter root {root} is not a folder")
    core = _native()
    try:
        if core is not None:
            found = core.adapter_names(os.fsencode(root))
            names = [name.decode("utf-8", "surrogateescape") for name in found]
        else:
            entries = sorted(root.iterdir(), key=os.fsencode)
            shown = (e for e in entries if not e.name.startswith("."))
            names = [to_text(e.name) for e in shown if _may_be_adapter(e)]
    except OSError as error:
        raise InvalidArgument(f"the adapter root {root} cannot be read: {error}") from error
    return [name for name in names if name != LOST_AND_FOUND]


def _may_be_adapter(entry: Path) -> bool:
    try:
        # A broken link is reported as an adapter that cannot be loaded.
        return entry.is_dir() or (entry.is_symlink() and not entry.exists())
    except OSError:
        return True


def _same_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except (OSError, ValueError):
        return False


def stamp_of(folder: Path) -> Stamp:
    """Return the stamp of a folder, which changes whenever one of its files changes. Never raises:
    the stamp of an unreadable folder contains the error (see `error_of`).
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
    # The stamp follows links. That of an unreadable folder contains the number of the error.
    try:
        with os.scandir(folder) as entries:
            return b"".join(_entry_stamp(e) for e in sorted(entries, key=lambda e: e.name))
    except ValueError:
        return b"!%d" % errno.EINVAL
    except OSError as error:
        return b"!%d" % (error.errno or 0)


def _entry_stamp(entry: os.DirEntry[bytes]) -> bytes:
    values = (0, 0, 0, 0, 0)
    try:
        status = entry.stat()
        # A program that copies files in place can restore the modification time only.
        times = (status.st_mtime_ns, status.st_ctime_ns)
        values = (status.st_dev, status.st_ino, status.st_size, *times)
    except OSError:
        pass
    return entry.name + b"\0" + struct.pack("<QQQqq", *values)


@cache
def _native() -> Any:
    try:
        # One call scans thousands of folders without holding the GIL.
        return native.kernels().folder_scan
    except ImportError:
        return None


@dataclass(eq=False)
class FolderWatch:
    """Thread that scans the adapters' folders repeatedly, from `start` until it is closed.

    find: returns the present folders by name.
    changed: called when a folder was added, was missing in two scans, or has changed and then
        settled for SETTLED_SECONDS. Its argument has the folder and the stamp of every present
        name. A changing folder keeps the stamp that was last reported, and is missing if there is
        none.
    retry: called after each scan, to retry folders that could not be read.
    """

    find: Callable[[], Mapping[str, Path]]
    changed: Callable[[Mapping[str, tuple[Path, Stamp]]], None]
    retry: Callable[[], None] = lambda: None
    _reported: Mapping[str, tuple[Path, Stamp]] = field(default_factory=dict)
    _folders: Mapping[str, Path] = field(default_factory=dict)
    # Names and paths of these folders, and the stamp of each that needs no report; None for others,
    # which each scan reads.
    _names: list[str] = field(default_factory=list)
    _paths: list[bytes] = field(default_factory=list)
    _settled: list[Stamp | None] = field(default_factory=list)
    # Stamp at the last scan of each name without a stamp above, and when it was first seen.
    _seen: dict[str, tuple[Stamp, float]] = field(default_factory=dict)
    _missing: Set[str] = frozenset()  # Reported names that the last scan did not find.
    _next: int = 0  # Index of the folder from which the next scan goes on.
    _closed: threading.Event = field(default_factory=threading.Event)
    _pause: float = field(default_factory=lambda: LOOK_SECONDS)
    _thread: threading.Thread | None = None

    def start(self, known: Mapping[str, tuple[Path, Stamp]]) -> None:
        """Start the thread. `known`: folder and stamp of each name that was read already."""
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
            began = time.monotonic()
            try:
                self.look(began)
                self.retry()
            except Exception:
                log.exception("looking at the adapters' folders failed; trying again")
            took = time.monotonic() - began
            self._pause = min(max(LOOK_SECONDS, took / MAX_CORE_SHARE), MAX_LOOK_SECONDS)

    def _closed_before_next(self) -> bool:
        """Wait until the next scan is due or the watch is closed; return whether it is closed."""
        # If the watch is closed during the wait and started again, the rest of the time is waited.
        began = time.monotonic()
        closed = self._closed.wait(self._pause)
        self._pause = max(0.0, self._pause - (time.monotonic() - began))
        return closed

    def look(self, now: float) -> None:
        """Scan the folders once, and call `changed` if needed. `now`: seconds, monotonic."""
        try:
            folders = self.find()
        except InvalidArgument:
            return  # The root cannot be read. Known adapters stay available.
        missing = self._missing & self._reported.keys()
        if folders is not self._folders:
            self._take(folders)
            missing = self._reported.keys() - folders.keys()
        # A scan may fall between the two renames that exchange a folder.
        gone, self._missing = missing & self._missing, missing
        due = self._due()
        seen, self._seen = self._seen, {}
        changes = {}
        for index, stamp in zip(due, stamps_of([self._paths[i] for i in due]), strict=True):
            if stamp == self._settled[index]:
                continue
            name = self._names[index]
            version, is_settled = self._version_of(name, stamp, seen.get(name), now)
            self._settled[index] = stamp if is_settled else None
            if version is None or version == self._reported.get(name):
                continue
            if version[1] != EMPTY or name in self._reported:
                changes[name] = version
        if changes or gone:
            kept = {name: one for name, one in self._reported.items() if name not in gone}
            self._reported = kept | changes
            self.changed(self._reported)

    def _take(self, folders: Mapping[str, Path]) -> None:
        known = dict(zip(self._names, zip(self._paths, self._settled, strict=True), strict=True))
        known |= {
            n: (os.fsencode(p), stamp) for n, (p, stamp) in self._reported.items() if n not in known
        }
        self._folders = folders
        self._names = list(folders)
        self._paths = [os.fsencode(folder) for folder in folders.values()]
        found = zip(self._paths, map(known.get, self._names), strict=True)
        self._settled = [
            one[1] if one is not None and one[0] == path else None for path, one in found
        ]

    def _due(self) -> list[int]:
        """Return the indices of the folders that this scan reads: those that are new or changing,
        and the next MAX_SCANNED of all, in turn.
        """
        count = len(self._names)
        turn = range(self._next, self._next + min(count, MAX_SCANNED))
        self._next = turn.stop % max(1, count)
        changing = [index for index, stamp in enumerate(self._settled) if stamp is None]
        return list(dict.fromkeys([*changing, *(index % count for index in turn)]))

    def _version_of(
        self, name: str, stamp: Stamp, before: tuple[Stamp, float] | None, now: float
    ) -> tuple[tuple[Path, Stamp] | None, bool]:
        """Return the version of a folder to report, and whether it is the one on the disk."""
        reported, error = self._reported.get(name), error_of(stamp)
        if reported is not None and error is not None and is_transient(error):
            return reported, False
        version = self._folders[name], stamp
        since = before[1] if before is not None and before[0] == stamp else now
        if reported == version or now - since >= SETTLED_SECONDS:
            return version, True
        self._seen[name] = stamp, since
        return reported, False  # The old version serves until the new one has settled.


# -- reading folders -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderRead:
    """A new version of an adapter. `adapter` is None if only its declarations were read."""

    handle: AdapterHandle
    adapter: Adapter | None


@dataclass(frozen=True)
class FolderFailed:
    """A folder that cannot be read; `transient` if a later attempt may succeed."""

    name: str
    error: InvalidArgument
    transient: bool


@dataclass(frozen=True)
class FolderRemoved:
    """A folder that no longer exists."""

    name: str


FolderResult = FolderRead | FolderFailed | FolderRemoved


@dataclass(eq=False)
class FolderReader:
    """Reads adapter folders and reports each result, on the thread that watches the folders.

    max_bytes: maximum size of one adapter's weights in fp32.
    allowed_bytes: returns the maximum size of all weights that this reader has read and will read.
        Of an adapter whose weights would exceed it, only the declarations are read.
    report: called with results, at most some tenths of a second after the first of them.
    clock: returns seconds.
    stamps: folder and stamp of each name when it was last read. The mapping is only replaced.
    """

    model: ModelShape
    max_bytes: int
    allowed_bytes: Callable[[], float]
    report: Callable[[Sequence[FolderResult]], None]
    clock: Callable[[], float] = time.monotonic
    stamps: Mapping[str, tuple[Path, Stamp]] = field(default_factory=dict)
    _read_bytes: int = 0
    _retries: dict[str, Backoff] = field(default_factory=dict)
    _broken: set[str] = field(default_factory=set)
    _to_retry: SimpleQueue[tuple[str, float]] = field(default_factory=SimpleQueue)
    _results: list[FolderResult] = field(default_factory=list)
    _reported_at: float = 0.0

    def update(self, folders: Mapping[str, tuple[Path, Stamp]]) -> None:
        """Read the folders that are new or changed, in order of name, and report removed ones and
        all failures. `folders` has the folder and stamp of every present name.
        """
        before = self.stamps
        removed = before.keys() - folders.keys()
        for name in removed:
            self._retries.pop(name, None)
            self._broken.discard(name)
            self._add(FolderRemoved(name))
        _log_first(logging.INFO, removed, "adapter '{}' was removed", "were removed")
        changed = [one for one in folders.items() if before.get(one[0]) != one[1]]
        self._read_all((name, *version) for name, version in sorted(changed))
        self.stamps = folders

    def read_again(self, name: str) -> None:
        """Mark a folder so that `retry` reads it again. Safe to call from any thread."""
        self._to_retry.put((name, self.clock()))

    def retry(self) -> None:
        """Retry, after their backoff, folders that failed for a cause outside their files."""
        now = self.clock()
        while not self._to_retry.empty():
            name, failed_at = self._to_retry.get()
            self._retries.setdefault(name, Backoff()).failed(failed_at)
        due = sorted(name for name, wait in self._retries.items() if wait.due <= now)
        for name in [name for name in due if name not in self.stamps]:
            del self._retries[name]
        versions = [(name, *self.stamps[name]) for name in due if name in self.stamps]
        self._read_all(one for one in versions if stamp_of(one[1]) == one[2])

    def _read_all(self, folders: Iterable[tuple[str, Path, Stamp]]) -> None:
        failed, mended, vague = [], [], []
        self._reported_at = time.monotonic()
        for name, folder, stamp in folders:
            result = self._read(name, folder, stamp)
            self._add(result)
            if isinstance(result, FolderFailed):
                self._broken.add(name)
                failed.append(str(result.error))
                continue
            if name in self._broken:
                self._broken.remove(name)
                mended.append(name)
            if len((info := result.handle.info).tasks) > 1 and info.own_task is None:
                vague.append(name)
        self._report()
        _log_first(logging.WARNING, failed, "{}", CANNOT_BE_LOADED)
        _log_first(logging.INFO, mended, "adapter '{}' can be loaded now", "can be loaded now")
        _log_first(
            logging.WARNING,
            vague,
            "adapter '{}' has several tasks and no 'default_task' in its vlora.json: messages that"
            " name no task get the checkpoint's chat template",
            "have several tasks and no 'default_task' in their vlora.json",
        )

    def _add(self, result: FolderResult) -> None:
        self._results.append(result)
        if time.monotonic() - self._reported_at >= REPORT_SECONDS:
            self._report()

    def _report(self) -> None:
        # The receiver's work for each report grows with the number of all adapters.
        if self._results:
            self.report(self._results)
        self._results, self._reported_at = [], time.monotonic()

    def _read(self, name: str, folder: Path, stamp: Stamp) -> FolderRead | FolderFailed:
        try:
            description, adapter = self._read_files(name, folder, stamp)
        except BaseException as error:  # A panic of a Rust library is not an Exception.
            transient = is_transient(error)
            if transient:
                self._retries.setdefault(name, Backoff()).failed(self.clock())
            else:
                self._retries.pop(name, None)
            return FolderFailed(name, as_adapter_error(name, folder, error).copy(), transient)
        self._retries.pop(name, None)
        self._read_bytes += 0 if adapter is None else description.host_bytes
        return FolderRead(AdapterHandle(name, folder, stamp, description), adapter)

    def _read_files(
        self, name: str, folder: Path, stamp: Stamp
    ) -> tuple[AdapterDescription, Adapter | None]:
        try:
            description = describe_adapter(name, folder, self.model, self.max_bytes)
            fits = self._read_bytes + description.host_bytes <= self.allowed_bytes()
            adapter = read_adapter(folder, description) if fits else None
        except BaseException as error:
            if not is_transient(error):
                _require_unchanged(name, folder, stamp)
            raise
        # Otherwise, engine and encoder could apply different weights as one version of the adapter.
        _require_unchanged(name, folder, stamp)
        return description, adapter


def _log_first(level: int, items: Collection[str], text: str, rest: str) -> None:
    """Log a text for each of the first MAX_LOGGED items, and the number of others in one line."""
    for item in islice(items, MAX_LOGGED):
        log.log(level, "%s", text.format(as_text(item)))
    if len(items) > MAX_LOGGED:
        log.log(level, "%d more adapters %s", len(items) - MAX_LOGGED, rest)


def _require_unchanged(name: str, folder: Path, stamp: Stamp) -> None:
    if stamp_of(folder) != stamp:
        reason = "its files are being changed"
        error = ErrorFactory(name, str(folder))(f"cannot be read: {reason}")
        raise error from OSError(errno.EBUSY, reason)


def read_each(
    folders: Mapping[str, Path], read: Callable[[str, Path], T]
) -> tuple[dict[str, T], dict[str, InvalidArgument]]:
    """Call `read` for each folder, in order of name. Return (results, errors) by name."""
    found, errors = {}, {}
    for name, folder in sorted(folders.items()):
        try:
            found[name] = read(name, folder)
        except Exception as error:
            errors[as_text(name)] = as_adapter_error(name, folder, error)
    return found, errors


# -- names -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NameTable:
    """Adapters by name at one moment, and the errors of `broken` adapters, which cannot be loaded.
    Immutable, so any thread may read it.
    """

    current: Mapping[str, AdapterHandle]
    broken: Mapping[str, InvalidArgument]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Sorted names of the adapters that requests can use."""
        return tuple(sorted(self.current))

    @cached_property
    def _backwards(self) -> Sequence[str]:
        return sorted(name[::-1] for name in self.names)

    @cached_property
    def router(self) -> Router:
        return Router({name: handle.info.skills for name, handle in self.current.items()})

    def handle(self, name: str) -> AdapterHandle:
        """Return the version of a name. Raises NotFound, or the error of a broken adapter."""
        if name in self.broken:
            raise self.broken[name].copy()
        if name not in self.current:
            hint = known_names(name, self.names, self.similar(name))
            raise NotFound(f"unknown adapter '{name}'{hint}")
        return self.current[name]

    def similar(self, name: str) -> Sequence[str]:
        """Return names that may be similar to an unknown one, at most 4 · HINT_NEIGHBOURS."""
        if len(name) > MAX_HINT_LENGTH:
            return ()
        # A single typing error leaves the first or the last half of a name correct. So the intended
        # name is near the unknown one in the list of names, or in that of names spelled backwards.
        backwards = _neighbours(self._backwards, name[::-1])
        both = [*_neighbours(self.names, name), *(found[::-1] for found in backwards)]
        return tuple(dict.fromkeys(both))


def _neighbours(words: Sequence[str], word: str) -> Sequence[str]:
    position = bisect_left(words, word)
    return words[max(0, position - HINT_NEIGHBOURS) : position + HINT_NEIGHBOURS]


class AdapterNames:
    """Mapping from names to handles, or to the errors of adapters that cannot be loaded.

    Only the engine's thread may use it, but any thread may read `table`, which `publish` replaces.
    """

    def __init__(self) -> None:
        self._entries: dict[str, AdapterHandle | InvalidArgument] = {}
        self._changed = False
        self.table = NameTable({}, {})

    def set(self, name: str, entry: AdapterHandle | InvalidArgument | None) -> AdapterHandle | None:
        """Map a name to a version or an error, or to nothing. Return the version before."""
        previous = self.current(name)
        self._entries.pop(as_text(name), None)
        if entry is not None:
            self._entries[as_text(name)] = entry
        self._changed = True
        return previous

    def current(self, name: str) -> AdapterHandle | None:
        entry = self._entries.get(as_text(name))
        return entry if isinstance(entry, AdapterHandle) else None

    def publish(self) -> None:
        """Make all changes visible to other threads."""
        if not self._changed:
            return
        entries = self._entries.items()
        current = {name: entry for name, entry in entries if isinstance(entry, AdapterHandle)}
        broken = {name: entry for name, entry in entries if isinstance(entry, InvalidArgument)}
        self.table = NameTable(MappingProxyType(current), MappingProxyType(broken))
        self._changed = False
