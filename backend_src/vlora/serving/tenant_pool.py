"""A pool of threads that no tenant can occupy alone."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

Work = Callable[[], None]


class TenantPool:
    """Runs work of tenants, who take turns. A tenant may use as many threads as are left for all
    others. Work of no tenant (None) may use all.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._running: Counter[str | None] = Counter()
        # By tenant; the next one to have a turn comes first.
        self._waiting: dict[str | None, deque[Work]] = {}

    def submit(self, tenant: str | None, work: Work) -> None:
        """Let work wait for a thread. Raises RuntimeError after `shutdown`."""
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(work)
            self._begin()

    def shutdown(self) -> None:
        """Drop the work that waits, and return when the rest has ended."""
        with self._lock:
            self._waiting.clear()
        self._executor.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        while left := self._threads - self._running.total():
            may_begin = [t for t in self._waiting if t is None or self._running[t] < left]
            if not may_begin:
                return
            tenant = may_begin[0]
            queue = self._waiting.pop(tenant)
            work = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            self._running[tenant] += 1
            self._executor.submit(self._run, tenant, work)

    def _run(self, tenant: str | None, work: Work) -> None:
        try:
            work()
        finally:
            with self._lock, suppress(RuntimeError):  # Raised after `shutdown`.
                self._running -= Counter([tenant])
                self._begin()
