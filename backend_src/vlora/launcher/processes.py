"""Processes started, watched and ended; psutil tells one from a later one that got its id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from vlora.launcher import tether

KILL_SECONDS = 5.0
"""What a killed process may take to be gone; more only where it hangs in the kernel."""


def start_tied(
    command: list[str], environment: Mapping[str, str], log: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """A process that ends when this one does, in a session of its own; what it says goes to `log`
    or, without, where this one's output goes.

    The kernel ties it to the very thread that makes it, so a thread is made for it that lives as
    long as it does.
    """
    made: Future[subprocess.Popen[bytes]] = Future()

    def keep() -> None:
        tied = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command]
        try:
            process = subprocess.Popen(
                tied,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            made.set_exception(error)
            return
        made.set_result(process)
        with suppress(ChildProcessError):  # collected elsewhere
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=keep, name="tritonserver", daemon=True).start()
    return made.result()


def children(pid: int) -> set[psutil.Process]:
    """The direct children of `pid`; empty when it is gone."""
    try:
        return set(psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return set()


def is_alive(process: psutil.Process) -> bool:
    """Whether this very process runs: not one that took its id, nor one that has ended and that
    its parent has not collected, as Triton does not collect its models'."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end(processes: Iterable[psutil.Process], grace_seconds: float = 2.0) -> None:
    """Give the processes a moment to leave by themselves, then kill those still alive; returns
    when they are gone."""
    for process in _still_alive(processes, grace_seconds):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _still_alive(processes, KILL_SECONDS)


def _still_alive(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that have not ended after so long (psutil's own wait takes an uncollected one for
    alive)."""
    deadline = time.monotonic() + seconds
    while (alive := [one for one in processes if is_alive(one)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def how_it_ended(process: psutil.Process) -> str:
    """`signal SIGKILL`, `status 3`, or empty where the system no longer tells."""
    with suppress(OSError, psutil.NoSuchProcess):
        if process.is_running():  # uncollected, so its line is still there and its own
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            return ended_with(os.waitstatus_to_exitcode(int(fields[49])))
    return ""


def ended_with(code: int) -> str:
    """An exit code as subprocess has it, in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
