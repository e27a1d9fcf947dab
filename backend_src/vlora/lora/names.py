"""What an adapter's name means now: a handle, or the error that its folder is.

Reads folders as they come, change and go. Where the weights of a handle are is the store's to say,
which shares the lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from vlora.errors import InvalidArgument, NotFound, known_names
from vlora.ids import MatrixId
from vlora.lora.adapter import AdapterFiles, AdapterInfo, ModelShape
from vlora.lora.folders import stamp_of
from vlora.lora.handle import AdapterHandle, Stamp
from vlora.lora.host import HostTier
from vlora.lora.peft_config import Refusal, as_text

log = logging.getLogger(__name__)


class AdapterNames:
    """Names → handles. Everything here may be called from any thread."""

    def __init__(self, model: ModelShape, max_bytes: int, host: HostTier) -> None:
        """max_bytes: what one adapter's weights may need in fp32. host: takes weights that are
        read, while its budget lasts."""
        self._model = model
        self._max_bytes = max_bytes
        self._host = host
        self._lock = threading.RLock()
        self._current: dict[str, AdapterHandle] = {}
        self._broken: dict[str, InvalidArgument] = {}
        self._stamps: dict[str, tuple[Path, Stamp]] = {}
        self.places: set[MatrixId] = set()
        """Matrices that any known adapter changes."""
        self.version = 0
        """Grows whenever a name may mean another handle."""
        self.on_news: Callable[[], None] = lambda: None
        """Called on their threads: something that was waited for may be there."""

    def read(self, folders: Mapping[str, Path]) -> None:
        """Each named folder, in order of name: with its weights while the host's budget lasts, else
        what it declares. Whatever fails is that adapter's error alone."""
        for name, folder in sorted(folders.items()):
            self._read(name, folder, stamp_of(folder))

    def update(self, folders: Mapping[str, tuple[Path, Stamp]]) -> None:
        """The folders as they are now: what is new or has changed is read, what is gone is
        forgotten. Requests that have started finish with the version they started with."""
        with self._lock:
            gone = set(self._stamps) - set(folders)
            before = dict(self._stamps)
        for name in gone:
            self._forget(name)
        for name, (folder, stamp) in sorted(folders.items()):
            if before.get(name) != (folder, stamp):
                self._read(name, folder, stamp)

    @property
    def stamps(self) -> Mapping[str, tuple[Path, Stamp]]:
        """What has been read."""
        return self._stamps

    def _read(self, name: str, folder: Path, stamp: Stamp) -> None:
        """A new version of the name's adapter, or the error that it is."""
        known = as_text(name)
        try:
            files = AdapterFiles(name, folder, self._model, self._max_bytes)
            handle = AdapterHandle(name, folder, stamp, files.description)
            room = self._host.room_for(handle.description.host_bytes)
            adapter = files.read() if room else None
        except InvalidArgument as error:
            self._refuse(known, error)
        except Exception as error:
            log.exception("while an adapter was loaded")
            self._refuse(known, Refusal(name, str(folder))(f"does not load: {error!r}"))
        else:
            with self._lock:
                self._retire(known)
                self._broken.pop(known, None)
                self._current[known] = handle
                self.places.update(handle.description.ranks)
                if adapter is not None:
                    self._host.add(handle, adapter)
        with self._lock:
            self._stamps[name] = (folder, stamp)
            self.version += 1
        self.on_news()

    def _refuse(self, name: str, error: InvalidArgument) -> None:
        log.warning("%s", error)
        with self._lock:
            self._retire(name)
            self._broken[name] = error

    def _forget(self, name: str) -> None:
        log.info("adapter '%s' is gone", as_text(name))
        with self._lock:
            self._retire(as_text(name))
            self._broken.pop(as_text(name), None)
            del self._stamps[name]
            self.version += 1
        self.on_news()

    def _means(self, handle: AdapterHandle) -> bool:
        """Whether its name still means this version."""
        return self._current.get(as_text(handle.name)) is handle

    def _retire(self, name: str) -> None:
        """The name means this handle no more; nobody new takes it, so it is the first to go."""
        handle = self._current.pop(name, None)
        if handle is not None:
            handle.used = 0
            self._host.drop(handle)

    def __len__(self) -> int:
        """Adapters that can be asked for."""
        return len(self._current)

    def names(self) -> tuple[str, ...]:
        """Names of the adapters that can be asked for, in order."""
        return tuple(sorted(self._current))

    @property
    def broken(self) -> Mapping[str, InvalidArgument]:
        """Adapters that exist but do not load, with the reason."""
        return self._broken

    def handle(self, name: str) -> AdapterHandle:
        """The present version. Raises NotFound (lists the known), or InvalidArgument for one that
        does not load."""
        with self._lock:
            if name in self._broken:
                raise self._broken[name]
            if name not in self._current:
                raise NotFound(f"unknown adapter '{name}'{known_names(name, list(self._current))}")
            return self._current[name]

    def info(self, name: str) -> AdapterInfo:
        """Raises as `handle`."""
        return self.handle(name).info
