"""Batches that another process prepares ahead of training."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Batch = TypeVar("Batch")
DEPTH = 24
"""Maximum number of batches that are ready and not yet used."""


@contextmanager
def ahead(make: Callable[[int], Batch], first: int, last: int) -> Iterator[Iterator[Batch]]:
    """Yield an iterator over make(first), …, make(last - 1).

    A worker process makes the batches in advance. It ends with the context.

    make: must be picklable (a top-level function, or a partial of one). Its result must depend on
        the index only, so that a resumed run sees the same batches as an uninterrupted one.
    """
    context = multiprocessing.get_context("spawn")
    ready: Any = context.Queue(DEPTH)
    worker = context.Process(target=_fill, args=(make, first, last, ready), daemon=True)
    worker.start()
    try:
        yield (_next(ready, worker) for _ in range(first, last))
    finally:
        worker.terminate()
        worker.join()


def _next(ready: Any, worker: Any) -> Any:
    while True:
        try:
            return ready.get(timeout=5)
        except Exception as empty:
            if not worker.is_alive():
                raise RuntimeError("the process that renders scenes has died") from empty


def _fill(make: Callable[[int], Any], first: int, last: int, ready: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for index in range(first, last):
        ready.put(make(index))
