"""Starting, watching and ending processes, among them those of a server's models."""

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
from vlora.server_run import SERVER_VARIABLE

KILL_SECONDS = 5.0  # Only a process that hangs in the kernel takes longer to end.
MIB = 1 << 20


def start_tied(
    command: list[str],
    environment: Mapping[str, str],
    log: IO[bytes] | None,
    folder: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a new session, and return it. It ends when this process ends.

    log: file for its output; None to use this process's output.
    folder: its working folder; None to use that of this process.
    """
    # The kernel ends the process when the thread that started it ends. So it is started by a new
    # thread, which lives as long as the process.
    started: Future[subprocess.Popen[bytes]] = Future()

    def start_and_wait() -> None:
        arguments = [str(os.getpid()), SERVER_VARIABLE, *command]
        tied = [sys.executable, "-I", "-S", tether.__file__, *arguments]
        try:
            process = subprocess.Popen(
                tied,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True,
            )
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(process)
        # Another thread may have collected the process already.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=start_and_wait, name="tritonserver", daemon=True).start()
    return started.result()


def children(pid: int) -> set[psutil.Process]:
    """Return the direct children of process `pid`; none if it has ended."""
    try:
        return set(psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return set()


def is_alive(process: psutil.Process) -> bool:
    """Return whether this process is running. A later process with the same id does not count."""
    # A zombie does not count either: Triton never waits for the ended processes of its models.
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end(processes: Iterable[psutil.Process], grace_seconds: float = 2.0) -> None:
    """Wait up to `grace_seconds` for the processes to end, then kill the remaining ones."""
    for process in _still_alive(processes, grace_seconds):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _still_alive(processes, KILL_SECONDS)


def _still_alive(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    # psutil's own function for this counts a zombie as running.
    deadline = time.monotonic() + seconds
    while True:
        alive = [process for process in processes if is_alive(process)]
        if not alive or time.monotonic() >= deadline:
            return alive
        time.sleep(0.02)


def how_it_ended(process: psutil.Process) -> str:
    """Return how a process ended, such as `signal SIGKILL` or `status 3`; "" if that is unknown."""
    with suppress(OSError, psutil.NoSuchProcess):
        # psutil calls a zombie running. Its status is in this file until it is collected.
        if process.is_running():
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            return ended_with(os.waitstatus_to_exitcode(int(fields[49])))
    return ""


def ended_with(code: int) -> str:
    """Return a text for an exit code of `subprocess`, such as `signal SIGKILL` or `status 3`."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def model_processes(server: int) -> dict[psutil.Process, str]:
    """Return the model processes of the server with this id, each with the name of its model."""
    return {process: _model_of(process) for process in children(server) if is_alive(process)}


def describe_loading(server: int) -> str:
    """Return a text with the processor time and the memory of each model process."""
    parts = []
    for process, name in model_processes(server).items():
        with suppress(psutil.NoSuchProcess):
            times, memory = process.cpu_times(), process.memory_info().rss
            seconds = times.user + times.system
            parts.append(f"{name} ({seconds:.0f} s of CPU, {memory // MIB} MiB)")
    return ", ".join(sorted(parts)) or "no model process runs"


def _model_of(process: psutil.Process) -> str:
    """Return the model of a stub, whose first argument is `…/<model>/<version>/model.py`."""
    try:
        return Path(process.cmdline()[1]).parent.parent.name
    except (IndexError, psutil.Error):
        return f"of process {process.pid}"
