"""Slow-down of a step while another process keeps one of the engine's cores busy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from benchmarks.timing import interleaved

_SPIN = (
    "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile 1: pass"
)


def slow_down(step: Callable[[], None], *, rounds: int, budget: float) -> float:
    """Return the time of `step` with a core of this process busy, divided by its usual time."""
    with _spinning_process(max(os.sched_getaffinity(0))) as resumed:

        def disturbed() -> None:
            with resumed():
                step()

        timings = interleaved(
            {"undisturbed": step, "disturbed": disturbed}, rounds=rounds, warm=False, budget=budget
        )
    return timings["disturbed"].median / timings["undisturbed"].median


@contextmanager
def _spinning_process(core: int) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Start a spinning process on `core` and pause it.

    Yield a function that returns a context. The process runs while the context is open.
    """
    process = subprocess.Popen([sys.executable, "-c", _SPIN, str(core)], stdout=subprocess.PIPE)

    @contextmanager
    def resumed() -> Iterator[None]:
        process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            process.send_signal(signal.SIGSTOP)

    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        yield resumed
    finally:
        process.kill()
        process.communicate()
