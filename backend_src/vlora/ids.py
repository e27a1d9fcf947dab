"""Identifiers that the scheduler, the adapters and the memory share. Imports nothing."""

from __future__ import annotations

MatrixId = tuple[int, str]
"""Matrix that an adapter may change: (layer, target), or (-1, "lm_head")."""

BASE = -1
"""Slot number of rows that use the base model without an adapter."""

NO_IMAGE = -1
"""Value of `feature_row` at positions that hold text, not an image."""


def order_of(slot: int, live: int) -> tuple[int, int]:
    """Return the sort key of a step's rows: the live adapter first, then the base, then by slot.

    In this order each adapter is one segment, and all rows that need −live are contiguous.
    """
    return (0 if slot == live else 1, slot)
