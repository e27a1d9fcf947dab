"""Signals between a server that is stopping and its models, as files in the run's folder.

Triton 2.51 has no such signals: it passes requests to the models until idle connections are closed.
A model with requests to finish has a file in `draining/`, which it removes when they have ended. To
stop, `vlora serve` writes the file `drain` with the deadline in seconds of CLOCK_MONOTONIC, and
whether other servers shall answer the requests that have not begun.
"""

from __future__ import annotations

import time
from pathlib import Path


def register(folder: Path, name: str) -> None:
    """Register a model's process by a unique name, so that a stop of the run waits for it."""
    models = folder / "draining"
    models.mkdir(exist_ok=True)
    (models / name).touch()


def deregister(folder: Path, name: str) -> None:
    """Report that the requests of a model have ended."""
    (folder / "draining" / name).unlink(missing_ok=True)


HAND_OVER = "hand over"


def begin(folder: Path, seconds: float, hand_over: bool = False) -> None:
    """Ask all models of a run to finish their requests within this number of seconds.

    hand_over: whether to refuse those that have not begun, which another server may answer.
    """
    temporary = folder / "drain.new"
    temporary.write_text(f"{time.monotonic() + seconds}\n{HAND_OVER if hand_over else ''}")
    temporary.replace(folder / "drain")


def seconds_left(folder: Path) -> float | None:
    """Return the seconds left to finish, at least 0; None if the server is not stopping."""
    try:
        deadline = float((folder / "drain").read_text().partition("\n")[0])
    except FileNotFoundError:
        return None
    return max(deadline - time.monotonic(), 0.0)


def hands_over(folder: Path) -> bool:
    """Return whether the models of a stopping server refuse the requests that have not begun."""
    return HAND_OVER in (folder / "drain").read_text()


def unfinished(folder: Path) -> list[str]:
    """Return the names of the registered models for which the server must still wait."""
    return sorted(path.name for path in (folder / "draining").glob("*"))
