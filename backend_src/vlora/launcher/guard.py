"""`python -m vlora.launcher.guard FOLDER`: ends what a killed `vlora serve` leaves behind.

The process waits until no process holds the lock of the run's folder. If the folder is still there,
the run was killed. The guard then ends the run's server and models, and removes their shared memory
and the folder. The guard is needed because a model may be unable to end itself: Triton's Python
backend holds the interpreter's lock while it sends a metric's new value to the server and waits for
the reply. A server that was killed never replies.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Run a guard of this folder of a run until the end of the block.

    The guard is in a session of its own, so Ctrl-C in the terminal does not end it.
    """
    guard = subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
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
