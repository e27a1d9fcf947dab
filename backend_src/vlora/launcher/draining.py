"""Signals between a server that is stopping and its models, as files in the run's folder.

Triton 2.51 has no such signals. It continues to pass requests to the models while it waits for idle
connections to close. A model that must finish its requests when the server stops creates a file in
`draining/` when it is loaded. To stop, `vlora serve` writes the file `drain`, which contains the
deadline of all models in seconds of CLOCK_MONOTONIC, a clock that all processes share. The model
removes its file when its requests have ended.
"""

from __future__ import annotations

import time
from pathlib import Path


def register(folder: Path, name: str) -> None:
    """Register a model, so that the server, when it stops, waits until `deregister` is called.

    folder: folder of the run.
    name: name of the model's process, unique within the run.
    """
    models = folder / "draining"
    models.mkdir(exist_ok=True)
    (models / name).touch()


def deregister(folder: Path, name: str) -> None:
    """Report that the requests of a model have ended. The server no longer waits for the model."""
    (folder / "draining" / name).unlink(missing_ok=True)


def begin(folder: Path, seconds: float) -> None:
    """Ask all models of a run to finish their requests within this number of seconds.

    folder: folder of the run.
    """
    temporary = folder / "drain.new"
    temporary.write_text(str(time.monotonic() + seconds))
    temporary.replace(folder / "drain")


def seconds_left(folder: Path) -> float | None:
    """Return the seconds left to finish, at least 0; None if the server is not stopping."""
    try:
        deadline = float((folder / "drain").read_text())
    except FileNotFoundError:
        return None
    return max(deadline - time.monotonic(), 0.0)


def unfinished(folder: Path) -> list[str]:
    """Return the names of the registered models for which the server must still wait."""
    return sorted(path.name for path in (folder / "draining").glob("*"))
