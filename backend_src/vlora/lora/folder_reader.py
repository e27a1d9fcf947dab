"""Reading of adapter folders that were added or changed, and reporting of removed ones.

The thread that watches the folders uses this module. The engine's thread applies the results.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from vlora.errors import InvalidArgument
from vlora.lora.adapter import (
    Adapter,
    AdapterDescription,
    AdapterFiles,
    AdapterInfo,
    load_adapter,
)
from vlora.lora.folders import stamp_of
from vlora.lora.handle import AdapterHandle, Stamp
from vlora.lora.model_shape import ModelShape
from vlora.lora.peft_config import ErrorFactory, as_text
from vlora.lora.transient import Backoff, as_adapter_error, is_transient

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class FolderRead:
    """A new version of an adapter.

    adapter: its weights; None if only the declarations were read.
    """

    handle: AdapterHandle
    adapter: Adapter | None


@dataclass(frozen=True)
class FolderFailed:
    """A folder that cannot be read.

    transient: whether the cause lies outside its files, so that a later attempt may succeed.
    """

    name: str
    error: InvalidArgument
    transient: bool


@dataclass(frozen=True)
class FolderRemoved:
    """A folder that no longer exists."""

    name: str


FolderResult = FolderRead | FolderFailed | FolderRemoved


class FolderReader:
    """Reads adapter folders and reports each result."""

    def __init__(
        self,
        model: ModelShape,
        max_bytes: int,
        allowed_bytes: Callable[[], float],
        report: Callable[[FolderResult], None],
        clock: Callable[[], float],
    ) -> None:
        """Create a reader that has read no folder.

        max_bytes: maximum size of one adapter's weights in fp32.
        allowed_bytes: returns the maximum size in bytes of all weights that this reader has read
            and will read. If an adapter's weights would exceed it, only the declarations are read.
        report: called with each result.
        clock: returns seconds.
        """
        self._model = model
        self._max_bytes = max_bytes
        self._allowed_bytes = allowed_bytes
        self._report = report
        self._clock = clock
        self._read_bytes = 0
        self._retries: dict[str, Backoff] = {}
        self._to_retry: SimpleQueue[tuple[str, float]] = SimpleQueue()
        self.stamps: Mapping[str, tuple[Path, Stamp]] = {}
        """Folder and stamp of each name when it was last read. The mapping is replaced, not
        changed.
        """

    def update(self, folders: Mapping[str, tuple[Path, Stamp]]) -> None:
        """Read the folders that are new or changed, in order of name, and report removed ones.

        folders: folder and stamp of every present name. A name that is missing here was removed.

        Never raises: any failure is reported as an error of its adapter.
        """
        before = self.stamps
        for name in before.keys() - folders.keys():
            log.info("adapter '%s' was removed", as_text(name))
            self._retries.pop(name, None)
            self._report(FolderRemoved(name))
        for name, (folder, stamp) in sorted(folders.items()):
            if before.get(name) != (folder, stamp):
                self._read(name, folder, stamp)
        self.stamps = dict(folders)

    def read_again(self, name: str) -> None:
        """Mark a folder so that `retry` reads it again. Safe to call from any thread.

        Call this if the folder could not be loaded for a cause outside its files.
        """
        self._to_retry.put((name, self._clock()))

    def retry(self) -> None:
        """Retry the folders that could not be read for a cause outside their files.

        A folder is left out while its backoff lasts. If its files have changed, `update` reads it
        instead.
        """
        now = self._clock()
        while not self._to_retry.empty():
            name, failed_at = self._to_retry.get()
            self._retries.setdefault(name, Backoff()).failed(failed_at)
        for name in sorted(name for name, wait in self._retries.items() if wait.due <= now):
            folder, stamp = self.stamps.get(name, (None, b""))
            if folder is None:
                del self._retries[name]
            elif stamp_of(folder) == stamp:
                self._read(name, folder, stamp)

    def _read(self, name: str, folder: Path, stamp: Stamp) -> None:
        """Read the adapter of a folder and report it, or the error of reading it."""
        try:
            description, adapter = self._read_files(name, folder, stamp)
        except BaseException as error:  # A panic of a Rust library is not an Exception.
            transient = is_transient(error)
            if transient:
                self._retries.setdefault(name, Backoff()).failed(self._clock())
            else:
                self._retries.pop(name, None)
            self._report(FolderFailed(name, as_adapter_error(name, folder, error), transient))
            return
        self._retries.pop(name, None)
        self._read_bytes += 0 if adapter is None else description.host_bytes
        self._report(FolderRead(AdapterHandle(name, folder, stamp, description), adapter))

    def _read_files(
        self, name: str, folder: Path, stamp: Stamp
    ) -> tuple[AdapterDescription, Adapter | None]:
        """Return the description of an adapter, and its weights if they fit into the bytes that
        `allowed_bytes` returns.

        Raises a transient error if the files are no longer those of the stamp. Without this check,
        engine and encoder could apply different weights as one version of the adapter.
        """
        try:
            files = AdapterFiles(name, folder, self._model, self._max_bytes)
            size = files.description.host_bytes
            fits = self._read_bytes + size <= self._allowed_bytes()
            adapter = files.read() if fits else None
        except BaseException as error:
            if not is_transient(error):
                _require_unchanged(name, folder, stamp)
            raise
        _require_unchanged(name, folder, stamp)
        return files.description, adapter


def _require_unchanged(name: str, folder: Path, stamp: Stamp) -> None:
    if stamp_of(folder) != stamp:
        reason = "its files are being changed"
        error = ErrorFactory(name, str(folder))(f"cannot be read: {reason}")
        raise error from OSError(errno.EBUSY, reason)


def read_each(
    folders: Mapping[str, Path], read: Callable[[str, Path], T]
) -> tuple[dict[str, T], dict[str, InvalidArgument]]:
    """Call `read` for each name and folder, in order of name.

    Returns (results by name, errors by name of the calls that raised).
    """
    found, errors = {}, {}
    for name, folder in sorted(folders.items()):
        try:
            found[name] = read(name, folder)
        except Exception as error:
            errors[as_text(name)] = as_adapter_error(name, folder, error)
    return found, errors


def read_infos(
    folders: Mapping[str, Path], model: ModelShape, max_bytes: int
) -> tuple[list[AdapterInfo], dict[str, InvalidArgument]]:
    """Read each folder with its weights, in order of name.

    At most one adapter's weights are in memory at a time.

    max_bytes: maximum size of one adapter's weights in fp32.

    Returns (descriptions with digests, errors by name).
    """
    infos, errors = read_each(
        folders, lambda name, folder: load_adapter(name, folder, model, max_bytes).info
    )
    return list(infos.values()), errors
