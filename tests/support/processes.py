"""Child processes of a test."""

from __future__ import annotations

import os

import psutil

from vlora.launcher.processes import children, is_alive


def children_that_run(module: str) -> list[psutil.Process]:
    """Return the running child processes of this process that execute a Python module.

    A zombie, which another test may have left, does not count.
    """
    return [child for child in children(os.getpid()) if _runs(child, module)]


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        return is_alive(process) and module in process.cmdline()
    except psutil.NoSuchProcess:
        return False
