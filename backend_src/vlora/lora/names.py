"""Adapters by name: the handle that a name means now, or the error of a folder that is unusable.

Reads folders as they are added, changed and removed. `lora/store.py`, which shares the lock, keeps
track of where a handle's weights are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from vlora.errors import InvalidArgument, NotFound, known_names
from vlora.ids import MatrixId
from vlora.lora.adapter import AdapterFiles, AdapterInfo
from vlora.lora.folders import stamp_of
from vlora.lora.handle import AdapterHandle, Stamp
from vlora.lora.host import HostTier
from vlora.lora.model_shape import ModelShape
from vlora.lora.peft_config import ErrorFactory, as_text
from vlora.lora.transient import MAX_ATTEMPTS, Backoff, is_transient

log = logging.getLogger(__name__)


def as_adapter_error(name: str, folder: Path, error: Exception) -> InvalidArgument:
    """Return `error` as one that names the adapter; log it with its traceback if it is untyped."""
    if isinstance(error, InvalidArgument):
        return error
    log.error("adapter '%s' failed to load", as_text(name), exc_info=error)
    return ErrorFactory(name, str(folder))(f"failed to load: {error!r}")


class AdapterNames:
    """Mapping from names to handles. All methods may be called from any thread.

    Collections that it returns never change.
    """

    def __init__(self, model: ModelShape, max_bytes: int, host: HostTier) -> None:
        """Create a mapping without names.

        max_bytes: maximum size of one adapter's weights in fp32.
        host: keeps weights that are read, while its budget lasts.
        """
        self._model = model
        self._max_bytes = max_bytes
        self._host = host
        self._lock = threading.RLock()
        self._current: dict[str, AdapterHandle] = {}
        self._broken: dict[str, InvalidArgument] = {}
        self._stamps: dict[str, tuple[Path, Stamp]] = {}
        self._retries: dict[str, Backoff] = {}
        self.clock: Callable[[], float] = time.monotonic
        self.matrices: frozenset[MatrixId] = frozenset()
        """Matrices that any adapter seen so far changes; replaced as a whole when it grows."""
        self.on_change: Callable[[], None] = lambda: None
        """Called on the reading thread after an adapter was read, removed, loaded or packed."""

    def read(self, folders: Mapping[str, Path]) -> None:
        """Read each named folder, in order of name: with its weights while the host's budget lasts,
        otherwise its declarations only. Any failure is an error of that adapter only."""
        for name, folder in sorted(folders.items()):
            self._read(name, folder, stamp_of(folder))

    def update(self, folders: Mapping[str, tuple[Path, Stamp]]) -> None:
        """Read folders that are new or have changed and forget those that are missing here.

        Requests that have started finish with the version that they started with.
        """
        with self._lock:
            removed = set(self._stamps) - set(folders)
            before = dict(self._stamps)
        for name in removed:
            self._forget(name)
        for name, (folder, stamp) in sorted(folders.items()):
            if before.get(name) != (folder, stamp):
                self._read(name, folder, stamp)

    def retry(self) -> None:
        """Read folders again whose last attempt failed for a reason outside of their files, once
        their wait is over. A folder that has changed since is left to `update`."""
        now = self.clock()
        with self._lock:
            due = {
                name: self._stamps[name] for name, wait in self._retries.items() if wait.due <= now
            }
        for name, (folder, stamp) in sorted(due.items()):
            if stamp_of(folder) == stamp:
                self._read(name, folder, stamp)

    @property
    def stamps(self) -> Mapping[str, tuple[Path, Stamp]]:
        """Folder and stamp of each name, as last read."""
        with self._lock:
            return dict(self._stamps)

    def _read(self, name: str, folder: Path, stamp: Stamp) -> None:
        """Replace the name's adapter by what the folder holds now, or by its error.

        An adapter whose folder cannot be read for a reason outside of its files keeps the version
        that it has, and `retry` reads it again.
        """
        text = as_text(name)
        try:
            files = AdapterFiles(name, folder, self._model, self._max_bytes)
            handle = AdapterHandle(name, folder, stamp, files.description)
            fits = self._host.fits(handle.description.host_bytes)
            adapter = files.read() if fits else None
        except Exception as error:
            with self._lock:
                if is_transient(error):
                    self._retries.setdefault(name, Backoff()).failed(self.clock())
                else:
                    self._retries.pop(name, None)
                    self._retire(text)
                self._mark_broken(text, as_adapter_error(name, folder, error))
        else:
            with self._lock:
                self._retries.pop(name, None)
                self._retire(text)
                self._broken.pop(text, None)
                self._current[text] = handle
                self.matrices |= handle.description.ranks.keys()
                if adapter is not None:
                    self._host.add(handle, adapter)
        with self._lock:
            self._stamps[name] = (folder, stamp)
        self.on_change()

    def _mark_broken(self, name: str, error: InvalidArgument) -> None:
        """Set the error of a name, unless it still has a version that serves."""
        log.warning("%s", error)
        if name not in self._current:
            self._broken[name] = error

    def _fail(self, handle: AdapterHandle, error: Exception) -> None:
        """Note that a handle could not be loaded or packed.

        A reason outside of its files delays the next attempt. Any other reason, and the last
        attempt's, is the error of the handle, and of its name if that still means this handle.
        """
        with self._lock:
            now, transient = self.clock(), is_transient(error)
            if transient:
                handle.backoff.failed(now)
                if handle.backoff.attempts < MAX_ATTEMPTS:
                    log.warning("adapter '%s' is loaded again: %s", as_text(handle.name), error)
                    return
            handle.error = as_adapter_error(handle.name, handle.folder, error)
            if self._is_current(handle):
                if transient:
                    self._retries.setdefault(handle.name, Backoff()).failed(now)
                self._retire(as_text(handle.name))
                self._mark_broken(as_text(handle.name), handle.error)

    def _forget(self, name: str) -> None:
        text = as_text(name)
        log.info("adapter '%s' was removed", text)
        with self._lock:
            self._retire(text)
            self._broken.pop(text, None)
            self._retries.pop(name, None)
            del self._stamps[name]
        self.on_change()

    def _is_current(self, handle: AdapterHandle) -> bool:
        """Return whether the handle's name still means this version."""
        return self._current.get(as_text(handle.name)) is handle

    def _retire(self, name: str) -> None:
        """Detach the name from its handle: no new request can use it, and it is evicted first."""
        handle = self._current.pop(name, None)
        if handle is not None:
            self._detach(handle)
            self._host.drop(handle)

    def _detach(self, handle: AdapterHandle) -> None:
        """Note that a handle's name no longer means it."""
        handle.retired = True

    def __len__(self) -> int:
        """Return the number of adapters that requests can use."""
        return len(self._current)

    def names(self) -> tuple[str, ...]:
        """Return the names of the adapters that requests can use, in order."""
        with self._lock:
            return tuple(sorted(self._current))

    @property
    def broken(self) -> Mapping[str, InvalidArgument]:
        """Adapters that exist but do not load, with the error of each."""
        with self._lock:
            return dict(self._broken)

    def handle(self, name: str) -> AdapterHandle:
        """Return the present version. Raise NotFound, which lists the known names, or the
        InvalidArgument of an adapter that does not load."""
        with self._lock:
            if name in self._broken:
                raise self._broken[name]
            if name not in self._current:
                raise NotFound(f"unknown adapter '{name}'{known_names(name, list(self._current))}")
            return self._current[name]

    def info(self, name: str) -> AdapterInfo:
        """Return the description of an adapter. Raise as `handle` does."""
        return self.handle(name).info
