"""How a server's models learn that it begins to stop, and how it learns that they have finished.

Through files of the run's folder, since Triton 2.51 tells neither: it goes on handing out requests
while it waits for idle connections to end. A model that finishes what runs keeps a file in
`draining/`. `vlora serve` writes `drain`, which holds the moment at which all must be done
(seconds of CLOCK_MONOTONIC, the same in all processes); each model then removes its file.
"""

from __future__ import annotations

import time
from pathlib import Path


def register(folder: Path, name: str) -> None:
    """The model of this name (unique in the run) is to be waited for."""
    place = folder / "draining"
    place.mkdir(exist_ok=True)
    (place / name).touch()


def deregister(folder: Path, name: str) -> None:
    """It has finished."""
    (folder / "draining" / name).unlink(missing_ok=True)


def begin(folder: Path, seconds: float) -> None:
    """Tell all models to be done in so many seconds."""
    written = folder / "drain.new"
    written.write_text(str(time.monotonic() + seconds))
    written.replace(folder / "drain")


def seconds_left(folder: Path) -> float | None:
    """What is left of the time to finish, 0 at its end; None while the server does not stop."""
    try:
        deadline = float((folder / "drain").read_text())
    except FileNotFoundError:
        return None
    return max(deadline - time.monotonic(), 0.0)


def unfinished(folder: Path) -> list[str]:
    """The models that have something to finish still."""
    return sorted(path.name for path in (folder / "draining").glob("*"))
