"""The processes of a server's models."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from vlora.launcher.processes import children, is_alive

MIB = 1 << 20


def model_processes(server: int) -> dict[psutil.Process, str]:
    """Return the model processes of a server, each with the name of its model.

    server: process id of the server.
    """
    return {process: _model_of(process) for process in children(server) if is_alive(process)}


def describe_loading(server: int) -> str:
    """Return a text with the processor time and the memory of each model process."""
    parts = []
    for process, name in model_processes(server).items():
        with suppress(psutil.NoSuchProcess):
            times, memory = process.cpu_times(), process.memory_info().rss
            seconds = times.user + times.system
            parts.append(f"{name} ({seconds:.0f} s of processor time, {memory // MIB} MiB)")
    return ", ".join(sorted(parts)) or "no model process runs"


def _model_of(process: psutil.Process) -> str:
    """Return the model of a stub, whose first argument is `…/<model>/<version>/model.py`."""
    try:
        return Path(process.cmdline()[1]).parent.parent.name
    except (IndexError, psutil.Error):
        return f"of process {process.pid}"
