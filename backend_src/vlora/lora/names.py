"""Adapters by name: the handle that a name means now, or the error of a folder that is unusable.

Reads folders as they are added, changed and removed. `lora/store.py`, which shares the lock, keeps
track of where a handle's weights are.
"""

from __future__ import annotations

import logging
import threading
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
from vlora.memory.eviction import EVICT_FIRST

log = logging.getLogger(__name__)


def as_adapter_error(name: str, folder: Path, error: Exception) -> InvalidArgument:
    """Return `error` as one that names the adapter; log it with its traceback if it is untyped."""
    if isinstance(error, InvalidArgument):
        return error
    log.error("adapter '%s' failed to load", as_text(name), exc_info=error)
    return ErrorFactory(name, str(folder))(f"failed to load: {error!r}")


class AdapterNames:
    """Mapping from names to handles. All methods may be called from any thread."""

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
        self.matrices: set[MatrixId] = set()
        """Matrices that any adapter seen so far changes."""
        self.version = 0
        """Counter that grows whenever a name may mean another handle."""
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

    @property
    def stamps(self) -> Mapping[str, tuple[Path, Stamp]]:
        """Folder and stamp of each name, as last read."""
        return self._stamps

    def _read(self, name: str, folder: Path, stamp: Stamp) -> None:
        """Replace the name's adapter by what the folder holds now, or by its error."""
        text = as_text(name)
        try:
            files = AdapterFiles(name, folder, self._model, self._max_bytes)
            handle = AdapterHandle(name, folder, stamp, files.description)
            fits = self._host.fits(handle.description.host_bytes)
            adapter = files.read() if fits else None
        except Exception as error:
            self._mark_broken(text, as_adapter_error(name, folder, error))
        else:
            with self._lock:
                self._retire(text)
                self._broken.pop(text, None)
                self._current[text] = handle
                self.matrices.update(handle.description.ranks)
                if adapter is not None:
                    self._host.add(handle, adapter)
        with self._lock:
            self._stamps[name] = (folder, stamp)
            self.version += 1
        self.on_change()

    def _mark_broken(self, name: str, error: InvalidArgument) -> None:
        log.warning("%s", error)
        with self._lock:
            self._retire(name)
            self._broken[name] = error

    def _fail(self, handle: AdapterHandle, error: InvalidArgument) -> None:
        """Set the error of a handle, and of its name if that still means this handle."""
        with self._lock:
            handle.error = error
            if self._is_current(handle):
                self._mark_broken(as_text(handle.name), error)
            self.version += 1

    def _forget(self, name: str) -> None:
        text = as_text(name)
        log.info("adapter '%s' was removed", text)
        with self._lock:
            self._retire(text)
            self._broken.pop(text, None)
            del self._stamps[name]
            self.version += 1
        self.on_change()

    def _is_current(self, handle: AdapterHandle) -> bool:
        """Return whether the handle's name still means this version."""
        return self._current.get(as_text(handle.name)) is handle

    def _retire(self, name: str) -> None:
        """Detach the name from its handle: no new request can use it, and it is evicted first."""
        handle = self._current.pop(name, None)
        if handle is not None:
            handle.last_used = EVICT_FIRST
            self._host.drop(handle)

    def __len__(self) -> int:
        """Return the number of adapters that requests can use."""
        return len(self._current)

    def names(self) -> tuple[str, ...]:
        """Return the names of the adapters that requests can use, in order."""
        return tuple(sorted(self._current))

    @property
    def broken(self) -> Mapping[str, InvalidArgument]:
        """Adapters that exist but do not load, with the error of each."""
        return self._broken

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
