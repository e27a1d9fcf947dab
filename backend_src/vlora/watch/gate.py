"""The gate: whether a chunk shows something else than the chunk that was last answered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from vlora.watch.chunks import Chunk
from vlora.watch.config import Gate
from vlora.watch.pixels import Pixels, Region, Shot, View

Mask = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

CELLS = 48  # Cells along the longer side of the small grey picture.
# A cell has changed if its grey value differs by more; noise and compression differ by less.
MIN_DIFFERENCE = 20


class SceneGate:
    """Compares chunks with the last one that was answered."""

    def __init__(self, gate: Gate, regions: Sequence[Region], view: View) -> None:
        """Take the regions of the whole picture, of which the chunks show what `view` does."""
        self._gate = gate
        self._regions = [view.inside(region) for region in regions]
        self._known: Pixels | None = None
        self._answered_at = 0.0

    def has_changed(self, chunk: Chunk[Shot], now: float) -> bool:
        """Return whether to ask about a chunk at Unix time `now`."""
        known = self._known
        if known is None or now - self._answered_at >= self._gate.every_seconds:
            return True
        return any(self._difference(known, one) >= self._gate.threshold for one in _greys(chunk))

    def note_answer(self, chunk: Chunk[Shot], now: float) -> None:
        """Compare further chunks with the last frame of this one, which was answered."""
        self._known, self._answered_at = _greys(chunk)[-1], now

    def _difference(self, known: Pixels, picture: Pixels) -> float:
        """Return the share of the cells inside the regions that have changed."""
        if known.shape != picture.shape:
            return 1.0
        changed = np.abs(known.astype(np.int16) - picture) > MIN_DIFFERENCE
        return float(changed[_mask(self._regions, picture.shape)].mean())


def _greys(chunk: Chunk[Shot]) -> list[Pixels]:
    return [shot.grey for shot in chunk.frames if shot.grey is not None]


def small_grey(pixels: Pixels) -> Pixels:
    """Return an RGB picture [height, width, 3] as a small grey one, [rows, columns]."""
    image = Image.fromarray(pixels)
    scale = CELLS / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return np.asarray(image.convert("L").resize(size, Image.Resampling.BOX), np.uint8)


def _mask(regions: Sequence[Region], shape: tuple[int, ...]) -> Mask:
    """Return which cells lie in a region, all if there are none; at least one cell for each."""
    rows, columns = shape
    mask = np.full(shape, not regions)
    for region in regions:
        top, left = int(region.top * rows), int(region.left * columns)
        bottom, right = (int(np.ceil(region.bottom * rows)), int(np.ceil(region.right * columns)))
        mask[min(top, rows - 1) : bottom, min(left, columns - 1) : right] = True
    return mask
