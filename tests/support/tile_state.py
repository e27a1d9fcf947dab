"""State of the compiled kernels that tests change and read: the tile table and its counters."""

from __future__ import annotations

from typing import cast

from vlora import native
from vlora.atmm import tiles


def clear() -> None:
    """Use the built-in tile for every shape."""
    tiles.use({})


def counters() -> dict[str, int]:
    """Return the counts of look-ups by outcome since the last reset.

    `hits` found their bucket, `misses` used the nearest bucket of the table, and `defaults` the
    built-in configuration, because the table has no entry for the operation and dtype.
    """
    return cast(dict[str, int], native.kernels().atmm.counters())


def reset_counters() -> None:
    native.kernels().atmm.reset_counters()
