"""Identifiers that the scheduler, the adapters and the memory share. This module has no imports."""

from __future__ import annotations

# Id of a matrix that an adapter may change: (layer, target), (-1, "lm_head"), or (VISION, path).
MatrixId = tuple[int, str]
# First part of the id of a linear layer of the vision tower or the connector. The second part is
# its path, as `model_shape.vision_path` returns it.
VISION = -2
BASE = -1  # Slot number of the base model without an adapter.
NO_IMAGE = -1  # Value of `feature_row` at positions with text.


def order_of(slot: int, live: int) -> tuple[int, int]:
    """Return the sort key of a row of a step: rows of the live adapter come first, then those of
    the base, then all others by slot.

    In this order, the rows of each adapter are contiguous, and so are all rows from which the live
    adapter must be subtracted.
    """
    return (0 if slot == live else 1, slot)
