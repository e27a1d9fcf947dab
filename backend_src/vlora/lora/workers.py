"""Two threads that load and pack adapters.

One thread reads files and the other packs weights into pages, so that adapters in memory do not
wait for the disk. This module knows no adapters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor


class Workers:
    """The loader and the packer; each runs its jobs in the order of submission."""

    def __init__(self) -> None:
        self._loader = ThreadPoolExecutor(1, "adapter-loader")
        self._packer = ThreadPoolExecutor(1, "adapter-packer")
        self._lock = threading.Lock()
        self._unfinished = 0

    def load(self, job: Callable[[], None]) -> None:
        self._submit(self._loader, job)

    def pack(self, job: Callable[[], None]) -> None:
        self._submit(self._packer, job)

    def _submit(self, thread: Executor, job: Callable[[], None]) -> None:
        with self._lock:
            self._unfinished += 1
        thread.submit(self._work, job)

    def _work(self, job: Callable[[], None]) -> None:
        try:
            job()
        finally:
            with self._lock:
                self._unfinished -= 1

    @property
    def busy(self) -> bool:
        return self._unfinished > 0

    def finish(self) -> None:
        """Wait until both threads have done all jobs submitted so far."""
        for thread in (self._loader, self._packer):
            thread.submit(lambda: None).result()

    def close(self) -> None:
        for thread in (self._loader, self._packer):
            thread.shutdown()
