"""A busy neighbour: a process that takes one of our cores for as long as it may run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from benchmarks.timing import interleaved

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPIN = (
    "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile 1: pass"
)


def slow_down(step: Callable[[], None], *, rounds: int, budget: float) -> float:
    """Time of `step` with one of this process's cores taken, over its time without."""
    with _spinning(max(os.sched_getaffinity(0))) as resume:

        def disturbed() -> None:
            with resume():
                step()

        found = interleaved(
            {"alone": step, "disturbed": disturbed}, rounds=rounds, warm=False, budget=budget
        )
    return found["disturbed"].median / found["alone"].median


@contextmanager
def _spinning(core: int) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """A paused process on `core`, and how to let it run for a while."""
    process = subprocess.Popen([sys.executable, "-c", _SPIN, str(core)], stdout=subprocess.PIPE)

    @contextmanager
    def resume() -> Iterator[None]:
        process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            process.send_signal(signal.SIGSTOP)

    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        yield resume
    finally:
        process.kill()
        process.communicate()
