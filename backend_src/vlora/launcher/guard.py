"""`python -m vlora.launcher.guard FOLDER`: ends what a killed `vlora serve` leaves behind.

It waits until the lock of the run's folder is free, and clears the folder if it is still there. A
model may be unable to end itself: Triton's Python backend holds the interpreter's lock while it
sends a metric to the server, and a killed server never replies.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlora.interpreters import python_command, python_environment


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Run a guard of this folder of a run until the end of the block."""
    guard = subprocess.Popen(
        python_command(__name__, str(folder)),
        cwd=folder,
        env=python_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # So that Ctrl-C in the terminal does not end it.
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()


def _guard(folder: Path) -> None:
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    # Imported only now, so that a waiting guard takes little memory.
    from vlora.launcher.run_folder import clear_dead_runs

    clear_dead_runs(folder.parent)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]))
