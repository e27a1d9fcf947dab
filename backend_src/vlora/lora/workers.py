"""The two threads that bring adapters nearer: one reads files, the other packs into pages, so that
nothing that is in memory waits behind a disk. Knows no adapters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor


class Workers:
    """Jobs of each thread are done in the order in which they were given."""

    def __init__(self) -> None:
        self._loader = ThreadPoolExecutor(1, "adapter-loader")
        self._packer = ThreadPoolExecutor(1, "adapter-packer")
        self._lock = threading.Lock()
        self._left = 0

    def load(self, job: Callable[[], None]) -> None:
        self._submit(self._loader, job)

    def pack(self, job: Callable[[], None]) -> None:
        self._submit(self._packer, job)

    def _submit(self, thread: Executor, job: Callable[[], None]) -> None:
        with self._lock:
            self._left += 1
        thread.submit(self._work, job)

    def _work(self, job: Callable[[], None]) -> None:
        try:
            job()
        finally:
            with self._lock:
                self._left -= 1

    @property
    def busy(self) -> bool:
        return self._left > 0

    def finish(self) -> None:
        """Waits until both have done all that they have been given."""
        for thread in (self._loader, self._packer):
            thread.submit(lambda: None).result()

    def close(self) -> None:
        for thread in (self._loader, self._packer):
            thread.shutdown()
