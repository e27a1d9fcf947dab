"""Threads that load and pack adapters, and the queue that carries results to the engine's thread.

One thread reads files and another packs weights into pages, so that adapters in memory do not wait
for the disk. The threads change no shared state. The engine's thread applies their results in the
order in which they arrive. This module does not depend on adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

Failed = Callable[[BaseException], None]
"""Function that is called with the exception of a job."""


class Results:
    """Queue of results of other threads.

    Any thread may call `post`. Only one thread may call `apply` and `apply_next`.
    """

    def __init__(self, on_post: Callable[[], None]) -> None:
        """Create an empty queue.

        on_post: called after each `post`, on the thread that posts.
        """
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._on_post = on_post

    def post(self, apply: Callable[[], None]) -> None:
        """Queue a function that applies a result. The thread that calls `Results.apply` or
        `apply_next` runs the function.
        """
        self._queue.put(apply)
        self._on_post()

    @property
    def pending(self) -> bool:
        """True if there are results to apply."""
        return not self._queue.empty()

    def apply(self) -> None:
        """Apply all results that are queued."""
        while self.pending:
            self._queue.get()()

    def apply_next(self) -> None:
        """Wait for a result and apply it."""
        self._queue.get()()


class Workers:
    """Two threads, the loader and the packer. Each runs its jobs in the order of submission.

    A job is a function that returns a result. When it ends, the engine's thread calls `done` with
    the result or `failed` with the exception. Only the engine's thread submits jobs.
    """

    def __init__(self, results: Results) -> None:
        self._results = results
        self._loader = ThreadPoolExecutor(1, "adapter-loader")
        self._packer = ThreadPoolExecutor(1, "adapter-packer")
        for thread in (self._loader, self._packer):
            # This starts the thread, which may fail later, when the process has too many.
            thread.submit(lambda: None)
        self._unfinished = 0

    def load(self, job: Callable[[], T], done: Callable[[T], None], failed: Failed) -> None:
        """Run a job on the loader's thread."""
        self._submit(self._loader, job, done, failed)

    def pack(self, job: Callable[[], T], done: Callable[[T], None], failed: Failed) -> None:
        """Run a job on the packer's thread."""
        self._submit(self._packer, job, done, failed)

    def _submit(
        self,
        thread: Executor,
        job: Callable[[], T],
        done: Callable[[T], None],
        failed: Failed,
    ) -> None:
        def run() -> None:
            try:
                apply = partial(done, job())
            except BaseException as error:  # A panic of a Rust library is not an Exception.
                apply = partial(failed, error)
            self._results.post(partial(self._finish_job, apply))

        self._unfinished += 1
        thread.submit(run)

    def _finish_job(self, apply: Callable[[], None]) -> None:
        self._unfinished -= 1
        apply()

    @property
    def busy(self) -> bool:
        """True if there are jobs whose results have not been applied."""
        return self._unfinished > 0

    def finish(self) -> None:
        """Wait for the results of all jobs submitted so far, and apply them."""
        while self.busy:
            self._results.apply_next()

    def close(self) -> None:
        """Wait until the jobs end. Their results are not applied."""
        for thread in (self._loader, self._packer):
            thread.shutdown()
